"""What a run did, beside what its plan said: seconds, bytes, the measured peak, and where the results are."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.contents import StoredArray
from outsize.core.noun import Noun
from outsize.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome(Noun):
    """A finished run."""

    plan: Plan
    seconds: float
    measured: int | None
    """The most that the process held beyond what it held before; None where nobody measured."""
    results: tuple[StoredArray, ...]
    """What was written; `key` is the path."""
    step_seconds: tuple[float, ...] = ()
    """How long each step of the plan took; empty where that was not asked for."""
    resumed: int = 0
    """Bytes that an earlier, interrupted run had already moved."""

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def read(self) -> int:
        return self.plan.read

    @property
    def written(self) -> int:
        return self.plan.written

    @property
    def projected(self) -> int:
        return self.plan.peak()

    @property
    def distance(self) -> float | None:
        """Bytes moved / the fewest possible: 1.0 is the best there is."""
        return self.plan.distance

    @property
    def rate(self) -> float | None:
        """Bytes moved in a second; None where it was too quick to say."""
        moved = self.read + self.written - self.resumed
        return moved / self.seconds if self.seconds > 0 and moved > 0 else None
