"""A program that ran to its end under `outsize run`: its peak, its memory over time, and the lines that took most."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.footprint import Moment
from outsize.core.memory import Part
from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProgramRun(Noun):
    """What was seen of a program."""

    command: tuple[str, ...]
    status: int
    """Its exit status, as a shell gives it."""
    seconds: float
    peak: int | None
    """The most bytes of RAM that all its processes were seen to hold, file pages left out; None where nobody could look."""
    largest: int | None
    """The most bytes of RAM that one of its processes held, file pages included: the kernel's own count, exact."""
    processes: int
    timeline: tuple[Moment, ...] = ()
    lines: tuple[Part, ...] = ()
    """Lines of code at which its memory grew most, the largest first."""
