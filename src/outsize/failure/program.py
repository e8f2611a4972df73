"""Programs that people run, known by the traces they leave in a text, and what each of them offers when memory runs out.

In: a text. Out: the `Program`s that it shows, the most telling first. A message alone names a framework; the module paths of
its traceback, its command line and its log tell whose program it was. There the knobs are that program's own, and code for
somebody else's array helps nobody. A row of `program_models` or `program_tools` is one program.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outsize.core.failure import CauseName, Exactness
from outsize.failure.advice import APPROXIMATE, HOST_CAUSES, Advice
from outsize.failure.signs import SPARED
from outsize.failure.work import Work

KILLS = (CauseName.KILLED, CauseName.LIMIT, CauseName.MACHINE)
DEVICE_CAUSES = (CauseName.TRUE_NEED, CauseName.ALREADY_FULL, CauseName.LARGER_THAN_DEVICE, CauseName.LARGER_THAN_LIMIT)


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its own ways out."""

    name: str
    """As people write it."""
    signs: re.Pattern[str]
    """What it leaves in a text."""
    advice: tuple[Advice, ...]
    """What it offers."""
    only: str = ""
    """The framework without which it is not that program; empty for any."""


def program(name: str, signs: str, *advice: Advice, only: str = "") -> Program:
    """A row."""
    return Program(name, re.compile(signs), advice, only)


def on_device(
    name: str,
    how: str,
    costs: str = "time, or smaller results",
    *works: Work,
    exactness: Exactness = APPROXIMATE,
    already: str = "",
    without: tuple[str, ...] = (),
) -> Advice:
    """A way out for a program whose device is full."""
    return Advice(
        name, how, DEVICE_CAUSES, costs, exactness, place="device", works=works, already=already, without=without
    )


def where_it_ran(name: str, how: str, costs: str = "nothing") -> Advice:
    """A way out for a program that was killed where it ran."""
    return Advice(name, how, KILLS, costs, place="cpu", already=SPARED.pattern)


def in_ram(
    name: str,
    how: str,
    costs: str = "time",
    *works: Work,
    exactness: Exactness = APPROXIMATE,
) -> Advice:
    """A way out for a program that fills RAM."""
    return Advice(name, how, HOST_CAUSES, costs, exactness, place="cpu", works=works)
