"""What a row about a framework or a program may say: ways out, limits and how they are raised.

In: a table of TOML (`frameworks.toml`, `programs.toml`). Out: `Advice`, a way out with the line to use and when it helps, and
`Framework`, what is known of one framework. A key that is no field, or a name that nothing has, is an error.
"""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from outsize.core.failure import CauseName, Exactness
from outsize.failure.work import Work

BITWISE, ROUNDING, APPROXIMATE = Exactness.BITWISE, Exactness.ROUNDING, Exactness.APPROXIMATE

NEED, FULL, LIMIT, OTHERS = CauseName.TRUE_NEED, CauseName.ALREADY_FULL, CauseName.LIMIT, CauseName.OTHER_PROCESS
HOST_CAUSES = (NEED, FULL, LIMIT, CauseName.MACHINE, CauseName.KILLED, CauseName.LEAK, CauseName.LARGER_THAN_MACHINE)
SERVING_CAUSES = (NEED, OTHERS, CauseName.LARGER_THAN_DEVICE)

_CAUSES = {"host": HOST_CAUSES, "serving": SERVING_CAUSES, **{cause.name.lower(): (cause,) for cause in CauseName}}
_WORKS = {
    "training": (Work.TRAINS, Work.UNKNOWN),
    "tuning": (Work.TRAINS, Work.UNKNOWN, Work.LOADS),
    "using": (Work.INFERS, Work.PAINTS, Work.LOADS, Work.SERVES, Work.EVALUATES),
    **{work.name.lower(): (work,) for work in Work},
}
"""Names that tables use: one cause or work, or a group of them."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A way out that one framework has."""

    name: str
    """What to do."""
    how: str
    """The line or setting."""
    causes: tuple[CauseName, ...]
    """Causes it helps against."""
    costs: str = "nothing"
    """What it costs."""
    exactness: Exactness = BITWISE
    """What it does to results."""
    _: KW_ONLY
    gives: str = ""
    """Name of the number of a `Case` that says how many bytes it gives back; empty where that is not known."""
    variable: str = ""
    """Environment variable that it sets."""
    done: str = ""
    """Value of the variable that means it is on already; empty where any value does."""
    place: str = ""
    """Kind of device it is for, `cuda` where the message does not say, `device` for all but RAM; empty for everywhere."""
    formats: tuple[str, ...] = ()
    """Wordings it is for; empty for all."""
    process: str = ""
    """Name of the process it is for; empty for all."""
    works: tuple[Work, ...] = ()
    """Work during which it helps; empty for all."""
    only: str = ""
    """What the text must show, as a pattern; empty where nothing has to."""
    already: str = ""
    """What a text shows where it is on already, or cannot be had, as a pattern; empty where nothing tells."""
    without: tuple[str, ...] = ()
    """Kinds of device on which it cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What is known of one framework; everything may be left open."""

    title: str = ""
    """Its name as people write it."""
    device: str | None = None
    """Device where its messages do not name one."""
    host: bool = False
    """True where it names no device and uses none but RAM."""
    accelerated: bool = False
    """True where it computes on a device unless a message says otherwise."""
    python: bool = True
    """False where no Python program can be behind it, so that nothing of Outsize can run it."""
    killer: str = ""
    """Whose limit it is that kills, and where that is set: for schedulers and containers."""
    setting: str = ""
    """What holds the limit that the program keeps itself to."""
    optional: bool = False
    """True where that limit is there only if somebody set it: the message then states it."""
    raising: tuple[str, str] | None = None
    """How its limit is raised: what to do, and the line, in which {mib} and {bytes} stand for the new limit."""
    split: str = (
        "for start in range(0, {axis_length}, {length}):\n"
        "    part = load(start, start + {length})   # yours: make or read only this part"
    )
    """How an array is worked on in pieces."""
    cast: str = "np.empty(shape, dtype=np.{dtype})   # at creation: x.astype() holds both"
    """How an array becomes smaller."""
    advice: tuple[Advice, ...] = ()
    """What it alone offers."""


def read_table(name: str) -> dict[str, Any]:
    """A table that stands beside this file."""
    return tomllib.loads((pathlib.Path(__file__).parent / name).read_text("utf-8"))


def read_advice(row: Mapping[str, Any], **usual: Any) -> Advice:
    """A way out from its row; `usual` has what the row leaves out."""
    fields = usual | {"name" if key == "do" else key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    for key, names in (("causes", _CAUSES), ("works", _WORKS)):
        if key in row:
            fields[key] = sum((names[name] for name in row[key]), ())
    if "exactness" in row:
        fields["exactness"] = Exactness[row["exactness"].upper()]
    return Advice(**fields)
