"""Programs that people run, known by the traces they leave in a text, and what each of them offers when memory runs out.

In: a text. Out: the `Program`s that it shows, the most telling first. A message alone names a framework; the module paths of
its traceback, its command line and its log tell whose program it was. There the knobs are that program's own, and code for
somebody else's array helps nobody. `programs.toml` has the programs, and is read when the first text is explained.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.core.failure import CauseName
from outsize.failure.advice import APPROXIMATE, HOST_CAUSES, Advice, read_advice, read_table
from outsize.failure.signs import SPARED, TORCH

KILLS = (CauseName.KILLED, CauseName.LIMIT, CauseName.MACHINE)
DEVICE_CAUSES = (
    CauseName.TRUE_NEED,
    CauseName.ALREADY_FULL,
    CauseName.LARGER_THAN_DEVICE,
    CauseName.LARGER_THAN_LIMIT,
    CauseName.REFUSED,
)

_USUAL: dict[str, dict[str, Any]] = {
    "device": {"causes": DEVICE_CAUSES, "place": "device", "exactness": APPROXIMATE},
    "ram": {"causes": HOST_CAUSES, "place": "cpu", "exactness": APPROXIMATE},
    "killed": {"causes": KILLS, "place": "cpu", "already": SPARED.pattern},
}
"""Where memory ran out -> what its ways out have in common."""


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


IN_PYTHON = ("numpy", "pytorch", "tensorflow", "jax", "cupy", "pandas")
"""Who fails inside a Python process: a server or an editor that the text names beside it is not what ran out."""


def _read_program(row: Mapping[str, Any]) -> Program:
    advice = tuple(read_advice(way, **_USUAL[way.pop("where")]) for way in row["ways"])
    return Program(row["name"], re.compile("".join(row["signs"])), advice, row.get("only", ""))


@functools.cache
def read_programs() -> dict[str, tuple[Program, ...]]:
    """Every program, by what it is for, those that say most of the work first."""
    return {kind: tuple(map(_read_program, rows)) for kind, rows in read_table("programs.toml").items()}


def programs_of(text: str, framework: str) -> tuple[Program, ...]:
    """Programs that the text shows, where that framework failed."""
    kinds = ("models", "data", "biology", "builds", *(() if framework in IN_PYTHON else ("services",)))
    rows = (row for kind in kinds for row in read_programs()[kind])
    failed = "pytorch" if framework == "unknown" and TORCH.search(text) is not None else framework  # a user's own words
    return tuple(row for row in rows if row.only in ("", framework, failed) and row.signs.search(text) is not None)


def managers_of(text: str) -> tuple[Program, ...]:
    """What started the program and asks for memory on its behalf."""
    return tuple(row for row in read_programs()["managers"] if row.signs.search(text) is not None)


def places_of(text: str) -> tuple[Program, ...]:
    """Where the program ran: a cluster, a container, a build server."""
    return tuple(row for row in read_programs()["places"] if row.signs.search(text) is not None)
