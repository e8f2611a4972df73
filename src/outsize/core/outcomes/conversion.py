"""What a change of dtype saves and what it costs, measured on the data."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.noun import Noun
from outsize.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Noun):
    """The error of a cast, over the elements that were measured.

    Errors are |before - after| over elements that are finite before and after. Elements that left the range of the new
    type or became zero are only counted, because one of them would hide all other errors.
    """

    elements: int
    changed: int
    """How many of them differ after the cast."""
    max_abs: float
    max_rel: float
    """Largest error relative to the value, of values that did not become zero."""
    rms: float
    """Root of the mean squared error."""
    overflowed: int
    """Values beyond the new type's range: infinite now, or, in an integer type, some other number."""
    flushed: int
    """Values other than zero that are zero now."""
    nans_created: int
    """Numbers that are NaN now."""
    largest: float | None
    """Largest finite magnitude before the cast; None if it was not measured because the new type holds every old
    value."""
    smallest: float | None
    """Smallest magnitude above zero before the cast; None if there is none or it was not measured."""

    @property
    def exact(self) -> bool:
        """True where every measured element has the same value after the cast."""
        return not (self.changed or self.overflowed or self.flushed or self.nans_created)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion(Noun):
    """An array rewritten in another dtype or format, or only measured as if it were."""

    source: str
    target: str | None
    """What was written, None where it was only measured."""
    shape: tuple[int, ...]
    dtype_before: str
    dtype_after: str
    """Element type that was written or measured."""
    bytes_before: int
    bytes_after: int
    precision: Precision
    budget: int
    seconds: float
    notes: tuple[str, ...] = ()
    """What a user should know about these numbers, a sentence each."""
    plan: Plan | None = None
    measured: int | None = None
    """The most that the process held beyond what it held before; None where nobody measured."""

    @property
    def saved(self) -> int:
        """Bytes by which the elements are smaller."""
        return self.bytes_before - self.bytes_after
