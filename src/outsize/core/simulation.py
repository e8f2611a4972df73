"""What work would take on a cluster that is not there."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep(Noun):
    """One step of the plan."""

    name: str
    seconds: float
    tasks: int
    """Tasks that could run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation(Noun):
    """A plan on so many workers, on paper: estimates."""

    name: str
    workers: int
    seconds: float
    """From the first task to the end of the last."""
    steps: tuple[SimulatedStep, ...]
    peak: int
    """Most bytes that a worker holds."""
    read: int
    written: int
    moved: int
    """Bytes that tasks move through storage in all: partial results and what runs again too."""
    lost: int
    """Tasks whose worker was lost; they run again."""
    taken_over: int
    """Tasks of slow workers that another finished first."""
    busy: float
    """Share of the workers' time with a task."""
    full: float
    """Share of the time in which storage was what tasks waited for."""
    price: float | None = None
    """What an hour of a worker costs, None where nobody said."""

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.workers * self.seconds / 3600

    @property
    def limited_by(self) -> str:
        """What keeps it from being faster: storage, the workers' own links, or too few tasks for them."""
        if self.full > 0.5:
            return "storage"
        return "workers" if self.busy > 0.7 else "tasks"
