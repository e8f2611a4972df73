"""The plain step, taken apart.

In: a projection of the plain step and the findings of a few samples. Out: `Facts`: the blocks that can be treated one by one
with what each keeps and how long it runs, the modules that can be computed again, and why a remedy is forbidden.
"""

from __future__ import annotations

import itertools
from typing import Any

from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.plan.facts import Block, Facts
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.recompute_ladder import Part, Rung, build_ladder, find_parts
from outsize.model.fitting.plan.remedies import find_forbidden
from outsize.model.fitting.plan.speeds import Timing
from outsize.model.fitting.run.expandable_segments import can_grow
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.run.sequential_runs import SPANS, find_spans
from outsize.model.fitting.update.optimizer_subset import parameters_of
from outsize.model.torch_port.objects import storage_key

SHARE = 3
"""A module that keeps more than one part in so many of the activations is looked into: blocks are its children."""

LISTS = ("Sequential", "ModuleList", "ModuleDict")
"""Containers that are looked into where they hold more than single operators."""

SHARES = (1, 8, 16)
"""Ladders of modules that keep at most one part in so many of the activations."""

LEAST = 500
"""A module that frees less than one part in so many of the activations is not worth a call of its own."""


def gather_facts(
    work: Work, findings: Findings, plain: Projection, own_step: bool, timing: Timing, pieces: Projection | None
) -> Facts:
    """Take the plain step apart."""
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
    parts = {name: part for name, part in parts.items() if name.partition(":")[0] not in findings.writing}
    return Facts(
        device=work.device, rows=findings.rows, plain=plain, blocks=blocks, weights=_bytes(model.parameters()),
        gradients=sum(sizes), state=max(0, state if held else 0), largest=max(sizes, default=0),
        copies=state / max(1, sum(sizes)), parameters=len(sizes), activations=activations, heads=heads,
        shares=_shares([p for p in held if p.requires_grad]),
        logits=_head_bytes(heads, plain), pieces=pieces,
        parts=parts,
        ladders=_ladders(
            parts, [names, *(_beside(names, found) for found in (*cuts, owners) if found)], activations, heads
        ),
        timing=timing,
        growable=work.device == "cuda" and can_grow(),
        writing=findings.writing,
        forbidden=find_forbidden(work, findings, own_step),
    )  # fmt: skip


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
) -> tuple[tuple[Rung, ...], ...]:
    """What a module keeps is there at once when it is computed again: ladders without large modules peak lower.

    Heads whose loss is taken in pieces cannot be computed again: there are ladders without them.
    """
    found: dict[tuple[Rung, ...], None] = {}
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
        if (
            name and ran and len(found) == before
        ):  # small, or nothing in it runs: attention takes its children's weights
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


def inclusive(values: dict[str, Any]) -> dict[str, Any]:
    """Sums over a module and everything inside it."""
    sums: dict[str, Any] = {}
    for name, value in values.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            key = ".".join(parts[:depth])
            sums[key] = sums.get(key, 0) + value
    return sums
