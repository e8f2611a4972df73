"""A plan: what a run will hold, read and write. It can be read before the run, and raises an error if it does not
fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outsize.core.errors import BudgetError
from outsize.core.memory import HOST, Allowance, Part, Pool
from outsize.core.noun import Known, Noun
from outsize.core.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak(Noun):
    """What a step or a plan holds at most in one pool."""

    pool: Pool
    bytes: int
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Level(Noun):
    """What a step moves through one level of the machine (or computes), and how long that level alone takes."""

    name: str
    """`disk`, `link in`, `link out`, `device memory` or `arithmetic`."""
    amount: int
    """Bytes that pass it; operations for `arithmetic`."""
    floor: int | None
    """Fewest that any schedule inside the budget needs, None if no bound is known."""
    rate: float
    """Bytes or operations a second that it can do."""

    @property
    def seconds(self) -> float:
        return self.amount / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Noun):
    """One pass over data, or one phase of a training step."""

    name: str
    peaks: tuple[Peak, ...]
    """Projected peak per pool while it runs."""
    parts: tuple[Part, ...] = ()
    read: int = 0
    """Bytes it reads from disk."""
    written: int = 0
    """Bytes it writes to disk."""
    floor: int | None = None
    """Fewest bytes any schedule could move for this step inside this budget, None if no bound is known."""
    tiles: int = 1
    tile: tuple[int, ...] = ()
    """Shape of a tile of the output."""
    shape: tuple[int, ...] = ()
    """Shape of what is cut into tiles; empty if nothing is."""
    smallest: int | None = None
    """Smallest host budget in bytes with which this step could run, None if unknown."""
    notes: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()
    """Traffic and floor per level of the machine, where a device takes part."""

    @property
    def distance(self) -> float | None:
        """Bytes moved / floor: 1.0 is the best possible."""
        return None if not self.floor else (self.read + self.written) / self.floor

    @property
    def binds(self) -> str | None:
        """The level that takes longest: no schedule of this traffic is faster. None without levels."""
        return max(self.levels, key=lambda level: level.seconds).name if self.levels else None

    def peak(self, pool: Pool) -> int:
        return max((peak.bytes for peak in self.peaks if peak.pool == pool), default=0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Noun):
    """The steps in order, with what they will hold, read and write."""

    name: str
    steps: tuple[Step, ...]
    budgets: tuple[Allowance, ...]
    smallest: int | None
    """Smallest host budget in bytes that works, None if unknown."""
    smallest_device: int | None = None
    """Smallest device budget in bytes that works, None where no device takes part."""
    notes: tuple[str, ...] = ()
    """Choices about the whole plan that are worth knowing, such as why a device is used or not."""
    workers: int | None = None
    """Workers of a cluster that share it, None where it runs in one process. Budgets and peaks are then those of one worker."""
    useful_workers: int | None = None
    """Workers beyond which one more has nothing to do in the step that moves most, None where it runs in one process."""
    floor: int | None = None
    """Fewest bytes that any schedule of the whole could move inside this budget, None if no bound is known."""

    said_twice: ClassVar[tuple[str, ...]] = ("pool",)

    @property
    def fits(self) -> bool:
        """True where every pool's projected peak is inside its budget."""
        return all(self.peak(allowance.pool) <= allowance.bytes for allowance in self.budgets)

    @property
    def read(self) -> int:
        return sum(step.read for step in self.steps)

    @property
    def written(self) -> int:
        return sum(step.written for step in self.steps)

    @property
    def distance(self) -> float | None:
        """Bytes that the whole moves / floor: 1.0 is the best possible."""
        return None if not self.floor else (self.read + self.written) / self.floor

    @property
    def pool(self) -> Pool:
        """The pool that the plan is about, whose budget comes first: the card's for a step on a card."""
        return self.budgets[0].pool if self.budgets else HOST

    def peak(self, pool: Pool | None = None) -> int:
        """Projected peak in bytes, in the pool that the plan is about unless another is named."""
        pool = pool or self.pool
        return max((step.peak(pool) for step in self.steps), default=0)

    def check(self) -> None:
        """Raise a `BudgetError` that names the worst step and the smallest budget that works; return if it fits."""
        for allowance in self.budgets:
            needed = self.peak(allowance.pool)
            if needed <= allowance.bytes:
                continue
            worst = max(self.steps, key=lambda step: step.peak(allowance.pool))
            # of page-locked memory the barest plan is the one that was made
            least = {"host": self.smallest, "device": self.smallest_device, "pinned": needed}
            smallest = least.get(allowance.pool.kind)
            way_out = "" if smallest is None else f"; the smallest budget that works is {format_bytes(smallest)}"
            why = f" ({allowance.reason})" if allowance.pool.kind == "device" and allowance.reason else ""
            raise BudgetError(
                f"{self.name}: step '{worst.name}' holds {format_bytes(needed)} of {allowance.pool}, "
                f"the budget is {format_bytes(allowance.bytes)}{why}{way_out}",
                needed=needed, budget=allowance.bytes, smallest=smallest, culprit=worst.name, plan=self,
            )  # fmt: skip
