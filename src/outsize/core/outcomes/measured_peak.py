"""The most memory that a piece of a program held, as it was measured, and who held it then."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.memory import Part, Pool
from outsize.core.noun import Known, Noun


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MeasuredPeak(Noun):
    """What a test (or any block of code) held at its highest moment, in one pool."""

    name: str
    pool: Pool
    bytes: int
    """The most it held beyond what was held when it began."""
    bound: int
    """Never below the truth, as far as anybody looked; above `bytes` where file pages came and went."""
    started_with: int
    """Bytes that were held when it began; not counted."""
    known: Known
    how: str
    budget: int | None = None
    """What it may hold; None where nothing was said."""
    seen: int = 0
    """The highest of the moments at which somebody looked; `line` and `holders` are of this one."""
    line: str | None = None
    """Where the program was then, as `test_big.py:12 in test_sum`; None if nobody looked."""
    holders: tuple[Part, ...] = ()
    """The largest arrays and tensors then, the largest first."""

    @property
    def fits(self) -> bool:
        """True where the budget was kept, or there is none."""
        return self.budget is None or self.bytes <= self.budget
