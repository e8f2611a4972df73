"""The plain step, taken apart.

In: a projection of the plain step and the findings of a few samples. Out: `Facts`: the blocks that can be treated one by one
with what each keeps and how long it runs, the modules that can be computed again, and why a remedy is forbidden.

Which modules to compute again is a ladder, from the cheapest byte to the dearest. Of a module only what it does not give out is
freed: its output is somebody's input and is kept for that. Its last product is not computed again, because recomputation stops
at the last tensor that the backward pass wants.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.move.units import LISTS
from outsize.model.fitting.plan.facts import Block, Facts, Ladder, Part
from outsize.model.fitting.plan.projection import Projection, inclusive
from outsize.model.fitting.plan.recipe_ladder import Rung, build_ladders
from outsize.model.fitting.plan.remedies import find_forbidden
from outsize.model.fitting.plan.speeds import Timing
from outsize.model.fitting.recipes.survey import Survey
from outsize.model.fitting.run.expandable_segments import can_grow
from outsize.model.fitting.run.frozen_weights import frozen_modules
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.run.sequential_runs import SPANS, find_spans
from outsize.model.fitting.update.optimizer_subset import parameters_of
from outsize.model.torch_port.objects import sizeof, storage_key

SHARE = 3
"""A module that keeps more than one part in so many of the activations is looked into: blocks are its children."""

SHARES = (1, 8, 16)
"""Ladders of modules that keep at most one part in so many of the activations."""

LEAST = 500
"""A module that frees less than one part in so many of the activations is not worth a call of its own."""

PRODUCTS = ("Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d", "LazyLinear", "NonDynamicallyQuantizableLinear")
"""Modules whose output no backward pass of their own wants."""

Option = tuple[tuple[str, ...], int, float]
"""Modules of one block, bytes that they free, seconds to compute them again."""


def gather_facts(
    work: Work, findings: Findings, plain: Projection, own_step: bool, timing: Timing, chunked: Projection | None,
    survey: Survey | None = None,
) -> Facts:  # fmt: skip
    model = work.model
    trainable = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in trainable]
    held = parameters_of(work.optimizer) if work.optimizer is not None else []
    state = plain.state
    heads = work.heads
    blocks = find_blocks(model, plain, timing)
    activations = sum(plain.kept.values())
    seconds = {name: timing.module(name, findings.rows) for name in plain.calls}
    kept = inclusive(plain.kept)
    parts = find_parts(model, kept, plain.stays, seconds, plain.calls)
    names = [block.name for block in blocks]
    cuts = [find_spans(model, kept, plain.gives, plain.calls, set(names), activations // n) for n in SPANS]
    owners = _find_owners(plain, kept)
    for spans in cuts:
        parts |= _span_parts(spans, kept, plain, seconds)
    if survey is not None:
        survey.leave_out(findings.operators)
    recipes = _in_seconds(survey, timing.forward(findings.rows)) if survey is not None else ()
    parts = {name: part for name, part in parts.items() if name.partition(":")[0] not in findings.writing}
    return Facts(
        device=work.device, rows=findings.rows, plain=plain, blocks=blocks, weights=_bytes(model.parameters()),
        gradients=sum(sizes), state=max(0, state if held else 0), largest=max(sizes, default=0),
        frozen=sum(sizeof(weight) for weights in frozen_modules(work.model).values() for weight in weights),
        copies=state / max(1, sum(sizes)), parameters=len(sizes), activations=activations, heads=heads,
        shares=_shares([p for p in held if p.requires_grad]),
        logits=_head_bytes(heads, plain), chunked=chunked,
        parts=parts,
        ladders=_ladders(
            parts, [names, *(_beside(names, found) for found in (*cuts, owners) if found)], activations, heads
        ),
        recipes=recipes, rungs={rung.sites: rung for ladder in recipes for rung in ladder},
        saved=_saved(survey) if survey is not None else {},
        timing=timing,
        redrawn=plain.drawing if work.replay is not None else 0.0,
        replays=work.replay is not None,
        growable=work.device == "cuda" and can_grow(),
        writing=findings.writing,
        forbidden=find_forbidden(work, findings, own_step),
    )  # fmt: skip


def _in_seconds(survey: Survey, forward: float) -> tuple[tuple[Rung, ...], ...]:
    """Ladders of recipes, with the times of this device."""
    scale = forward / max(1e-12, sum(row.seconds for row in survey.rows))
    return tuple(
        tuple(replace(rung, seconds=scale * rung.seconds) for rung in ladder) for ladder in build_ladders(survey)
    )


def _saved(survey: Survey) -> dict[str, int]:
    """Bytes that autograd saves of what each call makes, in the order of the calls."""
    found = {}
    for row in survey.rows:
        size = sum(survey.sizes[item] for item in row.all_made if item in survey.saved)
        if size:
            found[row.site] = size
    return found


def _span_parts(
    spans: dict[str, tuple[str, ...]], kept: dict[str, int], plain: Projection, seconds: dict[str, float]
) -> dict[str, Part]:
    """Spans that free something: all that their children keep but what goes in and comes out."""
    found = {}
    for name, children in spans.items():
        size = sum(kept.get(child, 0) for child in children)
        alone = plain.stays[children[0]] - plain.gives[children[0]]
        freed = size - alone - plain.gives[children[-1]]
        if freed > 0:
            took, runs = max(1e-9, sum(seconds.get(child, 0.0) for child in children)), plain.calls[children[0]]
            found[name] = Part(name=name, kept=-(-size // runs), freed=freed, seconds=took, runs=runs)
    return found


def _find_owners(plain: Projection, kept: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Modules that keep more than their children do, so that only they can free it, with all that is inside."""
    found: dict[str, tuple[str, ...]] = {}
    for name in plain.calls:
        inside = tuple(other for other in plain.calls if other.startswith(name + "."))
        mostly = name and inside and 2 * plain.kept.get(name, 0) > kept.get(name, 0)
        if mostly and not any(name in children for children in found.values()):
            found = {owner: children for owner, children in found.items() if owner not in inside} | {name: inside}
    return found


def _beside(names: list[str], spans: dict[str, tuple[str, ...]]) -> list[str]:
    """Blocks that are in no span, and the spans; a span is whatever takes the place of several modules."""
    inside = {child for children in spans.values() for child in children} | set(spans)
    return [*(name for name in names if name not in inside), *spans]


def _ladders(
    parts: dict[str, Part], cuts: list[list[str]], activations: int, heads: tuple[str, ...]
) -> tuple[Ladder, ...]:
    """What a module keeps is there at once when it is computed again: ladders without large modules peak lower.

    Heads whose loss is taken in pieces cannot be computed again: there are ladders without them.
    """
    found: dict[Ladder, None] = {}
    without = [[name for name in names if name not in heads] for names in cuts] if heads else []
    for share, names in itertools.product(SHARES, [*cuts, *without]):
        small = {name: part for name, part in parts.items() if part.kept * share <= activations}
        found[build_ladder(small, tuple(names), activations // LEAST)] = None
    return tuple(ladder for ladder in found if ladder)


def _shares(parameters: list[Any]) -> tuple[float, ...]:
    sizes = sorted((p.numel() * p.element_size() for p in parameters), reverse=True)
    return tuple(held / max(1, sum(sizes)) for held in itertools.accumulate(sizes))


def _bytes(tensors: Any) -> int:
    return sum(int(t.untyped_storage().nbytes()) for t in {storage_key(t): t for t in tensors}.values())


def _head_bytes(heads: tuple[str, ...], plain: Projection) -> int:
    """What head and loss keep: the logits and what the loss, outside every module or in the head's owner, makes of them."""
    owners = {name.rpartition(".")[0] for name in heads} | {""} if heads else set()
    return sum(size for name, size in plain.kept.items() if name in owners | set(heads))


def find_blocks(model: Any, plain: Projection, timing: Timing) -> tuple[Block, ...]:
    """Modules, none inside another, each with a small share of the activations, together as much of the model as can be."""
    kept = inclusive(plain.kept)
    limit = sum(plain.kept.values()) / SHARE
    found: list[Block] = []

    def visit(name: str, module: Any) -> None:
        children = list(module.named_children())
        ran = plain.calls.get(name, 0)
        list_of_blocks = type(module).__name__ in LISTS and any(list(child.children()) for _, child in children)
        room = limit * max(1, ran)  # of several runs one is there at a time
        small = kept.get(name, 0) <= room and not list_of_blocks
        before = len(found)
        if not (name and ran and small):
            for child, part in children:
                visit(f"{name}.{child}" if name else child, part)
        # small, or nothing in it runs: attention takes its children's weights
        if name and ran and len(found) == before:
            found.append(
                Block(
                    name=name,
                    kept=int(kept.get(name, 0)),
                    weights=_bytes(module.parameters()),
                    seconds=timing.modules.get(name, 0.0),
                    compound=bool(children),
                    runs=ran,
                )
            )

    visit("", model)
    return tuple(found)


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


def build_ladder(parts: dict[str, Part], blocks: tuple[str, ...], least: int) -> Ladder:
    """Sets of modules, each with more freed bytes than the one before; parts that free at most `least` are left out.

    A set may hold a whole block or a few modules inside it (an activation function written in Python keeps many times its
    input and takes next to no time), never a module inside another.
    """
    steps: list[tuple[float, int, int, tuple[str, ...]]] = []
    for place, block in enumerate(blocks):
        inside = [p for name, p in parts.items() if (name == block or name.startswith(block + ".")) and p.freed > least]
        hull = _hull(_options(inside))
        for number, (before, after) in enumerate(zip([((), 0, 0.0), *hull], hull, strict=False)):
            steps.append((-_slope(before, after), number, place, after[0]))
    chosen: dict[int, tuple[str, ...]] = {}
    ladder: list[tuple[str, ...]] = []
    for _, _, place, names in sorted(steps):
        chosen[place] = names
        ladder.append(tuple(name for place in sorted(chosen) for name in chosen[place]))
    return tuple(ladder)


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
