"""Runs of a long `nn.Sequential` as something to compute again: a single operator keeps only what its neighbours need.

In: a model and what each module keeps and gives out. Out: spans, named `layers.0:6` (first and last child), cut where little is
handed on; and forward functions that run a `Sequential` with some spans computed again. Only sequences of single
operators are cut: where children are made of other modules, those are the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

SPANS = (12, 6, 3)
"""A span keeps at least one part in so many of the activations: short ones are little to have at once, long ones free more."""

Forward = Callable[..., Any]


def find_spans(
    model: Any, kept: dict[str, int], gives: dict[str, int], ran: dict[str, int], blocks: set[str], least: int
) -> dict[str, tuple[str, ...]]:
    """Span -> its children, of every sequence whose children are blocks by themselves; `kept` includes what is inside.

    A span keeps at least `least` bytes.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        runs = ran.get(name, 0)
        if type(module).forward is not torch.nn.Sequential.forward or len(module) < 2 or not runs:
            continue
        children = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
        flat = len(children) == len(module) and all(not list(part.children()) for _, part in children)
        if not flat or any(ran.get(child) != runs for child, _ in children) or not {c for c, _ in children} <= blocks:
            continue
        now: list[str] = []
        for number, (child, _) in enumerate(children):
            now.append(child)
            following = children[number + 1] if number + 1 < len(children) else None
            if following is not None:
                full = sum(kept.get(c, 0) for c in now) >= least and gives.get(child, 0) <= gives.get(following[0], 0)
                if not full or getattr(following[1], "inplace", False):  # it would write over what was handed on
                    continue
            if len(now) > 1:
                found[f"{now[0]}:{now[-1].rpartition('.')[2]}"] = tuple(now)
            now = []
    return found


def is_span(name: str) -> bool:
    return ":" in name


def owner_of(span: str) -> str:
    """The sequence that a span is cut from."""
    return span.partition(":")[0].rpartition(".")[0]


def in_spans(sequence: Any, spans: Iterable[str], again: Callable[[Any, Forward], Forward]) -> Forward:
    """A sequence's forward with these spans as `again(holder, forward)` makes them; `holder` has a span's children."""
    children = list(sequence.named_children())
    names = [name for name, _ in children]
    starts: dict[int, tuple[int, Forward]] = {}
    for span in spans:
        first, _, last = span.rpartition(".")[2].partition(":")
        start, stop = names.index(first), names.index(last) + 1
        holder = torch.nn.Sequential(*(part for _, part in children[start:stop]))
        starts[start] = stop, again(holder, holder.forward)

    def forward(x: Any) -> Any:
        place = 0
        while place < len(children):
            if place in starts:
                place, run = starts[place]
                x = run(x)
            else:
                x = children[place][1](x)
                place += 1
        return x

    return forward
