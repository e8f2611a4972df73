"""Two footprints of one step, an earlier one and a later one: what its peak was, what it is, and which part of it grew."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.errors import InputError
from outsize.core.footprint import Amount, Footprint
from outsize.core.memory import Part
from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Noun):
    """One number, then and now."""

    name: str
    before: int
    """Bytes in the baseline."""
    after: int
    """Bytes now."""

    @property
    def bytes(self) -> int:
        """By how much it grew; negative if it shrank."""
        return self.after - self.before

    def grew(self, tolerance: float) -> bool:
        """True where it is larger by more than the tolerance, a fraction of what it was."""
        return self.after > self.before * (1 + tolerance)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FootprintChange(Noun):
    """What has changed since a baseline."""

    name: str
    tolerance: float
    """By which fraction a peak may grow."""
    peaks: tuple[Change, ...]
    """Allocated and reserved bytes at the peak, and those of host tensors where both know them: these decide."""
    parts: tuple[Change, ...]
    """What is alive at the peak, by kind: the largest growth first."""
    modules: tuple[Change, ...]
    """The same by module."""
    lines: tuple[Change, ...]
    """The same by line of code."""

    @property
    def grew(self) -> bool:
        """True where a peak grew by more than the tolerance."""
        return any(peak.grew(self.tolerance) for peak in self.peaks)

    @property
    def culprit(self) -> str | None:
        """The kind, the module and the line that grew most; None where no peak grew."""
        if not self.grew:
            return None
        grown = (("", self.parts), ("in ", self.modules), ("at ", self.lines))
        first = [f"{word}{changes[0].name}" for word, changes in grown if changes and changes[0].bytes > 0]
        return ", ".join(first) or "what the allocator holds without using it"


def compare_footprints(before: Footprint, after: Footprint, tolerance: float = 0.01) -> FootprintChange:
    """What changed from a baseline to now. Footprints of different places cannot be compared."""
    for what, old, new in (
        ("device", str(before.pool), str(after.pool)),
        ("card", _card(before), _card(after)),
        ("number of steps", before.steps, after.steps),
    ):
        if old != new:
            raise InputError(f"the baseline has another {what} ({old}, now {new}): save a new one")
    amounts: list[tuple[str, Amount | None, Amount | None]] = [
        ("allocated", before.peak_allocated, after.peak_allocated),
        ("reserved", before.peak_reserved, after.peak_reserved),
        ("host tensors", before.host, after.host),
    ]
    peaks = tuple(Change(name=name, before=old.bytes, after=new.bytes) for name, old, new in amounts if old and new)
    return FootprintChange(
        name=after.name, tolerance=tolerance, peaks=peaks, parts=_changes(before.parts, after.parts),
        modules=_changes(before.modules, after.modules), lines=_changes(before.lines, after.lines),
    )  # fmt: skip


def _card(footprint: Footprint) -> str:
    return "none" if footprint.card is None else footprint.card.name


def _changes(before: tuple[Part, ...], after: tuple[Part, ...]) -> tuple[Change, ...]:
    """Every name of either, those that grew most first."""
    old, new = ({part.name: part.bytes for part in parts} for parts in (before, after))
    found = (Change(name=name, before=old.get(name, 0), after=new.get(name, 0)) for name in {**old, **new})
    return tuple(sorted((change for change in found if change.bytes), key=lambda change: -change.bytes))
