"""Which modules to compute again, from the cheapest byte to the dearest.

In: what each module keeps, gives out and takes in time. Out: a ladder of sets of modules: each rung frees more bytes
and takes more time than the one below. A rung may hold a whole block or a few modules inside it (an activation
function written in Python keeps many times its input and takes next to no time), never a module inside another.
Of a module only what it does not give out is freed: its output is somebody's input and is kept for that. Its last
product is not computed again, because recomputation stops at the last tensor that the backward pass wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outsize.core.noun import Noun

PRODUCTS = ("Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d", "LazyLinear", "NonDynamicallyQuantizableLinear")
"""Modules whose output no backward pass of their own wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Noun):
    """A module as something to compute again."""

    name: str
    kept: int
    """Bytes that a run of it keeps for the backward pass, everything inside included."""
    freed: int
    """Bytes that are freed where it keeps its inputs only."""
    seconds: float
    """Time to compute all its runs again."""
    runs: int = 1
    """How often it runs in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung(Noun):
    """A set of modules."""

    names: tuple[str, ...]
    freed: int
    seconds: float


def find_parts(
    model: Any, kept: dict[str, int], stays: dict[str, int], seconds: dict[str, float], ran: dict[str, int]
) -> dict[str, Part]:
    """Every module that frees something, by name.

    `kept` and `seconds` include what is inside and all runs; `stays` are bytes that are there although the module keeps its
    inputs only.
    """
    found = {}
    last = _last_products(model, ran)
    for name in ran:
        freed = kept.get(name, 0) - stays.get(name, 0)
        if name and ran[name] and freed > 0:
            stops = seconds.get(last[name], 0.0) if last.get(name) else 0.0
            took = max(seconds.get(name, 0.0) - stops, 0.02 * seconds.get(name, 0.0), 1e-9)
            found[name] = Part(name=name, kept=-(-kept[name] // ran[name]), freed=freed, seconds=took, runs=ran[name])
    return found


def _last_products(model: Any, ran: dict[str, int]) -> dict[str, str]:
    """Module -> the product that ran last in it, where nothing with weights ran after it."""
    modules = dict(model.named_modules())
    last: dict[str, str] = {}
    for name in ran:  # in the order of their first run
        module = modules[name]
        if next(module.children(), None) is not None:
            continue
        product = type(module).__name__ in PRODUCTS
        if product or next(module.parameters(), None) is not None:
            parts = name.split(".")
            for depth in range(1, len(parts)):
                owner = ".".join(parts[:depth])
                last[owner] = name if product else ""
    return last


def build_ladder(parts: dict[str, Part], blocks: tuple[str, ...], least: int) -> tuple[Rung, ...]:
    """Rungs, each with more freed bytes than the one before; parts that free at most `least` are left out."""
    steps: list[tuple[float, int, int, tuple[str, ...]]] = []
    for place, block in enumerate(blocks):
        inside = [p for name, p in parts.items() if (name == block or name.startswith(block + ".")) and p.freed > least]
        hull = _hull(_options(inside))
        for number, (before, after) in enumerate(zip([((), 0, 0.0), *hull], hull, strict=False)):
            ratio = (after[1] - before[1]) / max(after[2] - before[2], 1e-12)
            steps.append((-ratio, number, place, after[0]))
    chosen: dict[int, tuple[str, ...]] = {}
    rungs = []
    for _, _, place, names in sorted(steps):
        chosen[place] = names
        every = [parts[name] for place in sorted(chosen) for name in chosen[place]]
        rungs.append(
            Rung(
                names=tuple(p.name for p in every),
                freed=sum(p.freed for p in every),
                seconds=sum(p.seconds for p in every),
            )
        )
    return tuple(rungs)


Option = tuple[tuple[str, ...], int, float]


def _options(parts: list[Part]) -> list[Option]:
    """Sets of modules of one block, the cheapest bytes first; a module takes the place of those inside it."""
    now: dict[str, Part] = {}
    options: list[Option] = []
    for part in sorted(parts, key=lambda p: p.seconds / p.freed):
        if any(part.name.startswith(other + ".") for other in now):
            continue
        inside = [name for name in now if name.startswith(part.name + ".")]
        if part.freed <= sum(now[name].freed for name in inside):
            continue
        now = {name: p for name, p in now.items() if name not in inside} | {part.name: part}
        options.append((tuple(now), sum(p.freed for p in now.values()), sum(p.seconds for p in now.values())))
    return options


def _hull(options: list[Option]) -> list[Option]:
    """Those of which no mixture of others frees more for its time."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o[2], -o[1])):
        if hull and option[1] <= hull[-1][1]:
            continue
        while hull and _slope(hull[-2] if len(hull) > 1 else ((), 0, 0.0), hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b[1] - a[1]) / max(b[2] - a[2], 1e-12)
