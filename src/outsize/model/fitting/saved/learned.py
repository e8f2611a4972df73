"""What a few samples have shown of a step, as plain data, and back: so another process need not look again.

In: a `Work` that was looked at. Out: data, and from them the same knowledge for the same work, checked against its model and its
batch. Generators of the user's own have no name: whether there are any is noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from outsize.core.noun import from_plain, to_plain
from outsize.model.fitting import batch as batches
from outsize.model.fitting.axes import Axes
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.run.loss import Normaliser
from outsize.model.fitting.run.random_sources import GLOBAL
from outsize.model.fitting.run.replayed_draws import Draw, Replay
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.saved.decisions import Unfit
from outsize.model.torch_port.objects import buffer_table


def to_data(work: Work) -> dict[str, Any]:
    names = {id(module): name for name, module in work.model.named_modules()}
    rule = work.normaliser
    return {
        "axes": {
            "at": dict(work.axes.at),
            "packed": {path: list(pair) for path, pair in work.axes.packed.items()},
            "whole": work.axes.whole,
        },
        "normaliser": {field.name: to_plain(getattr(rule, field.name)) for field in dataclasses.fields(rule)},
        "splits": work.splits,
        "heads": list(work.heads),
        "written": {names[id(module)]: list(buffers) for module, buffers in work.written.items()},
        "draws": None if work.replay is None else [[draw.name, draw.axis] for draw in work.replay.draws],
        "sources": [source.name for source in work.sources if source in GLOBAL],
        "own_sources": any(source not in GLOBAL for source in work.sources),
        "backwards": work.backwards,
    }


def from_data(data: Mapping[str, Any], work: Work, batch: Any) -> Work:
    """The work with what was learned of it, but for generators of the user's own."""
    modules = dict(work.model.named_modules())
    written = {_pick(modules, name): tuple(buffers) for name, buffers in data["written"].items()}
    for module, buffers in written.items():
        if not set(buffers) <= set(buffer_table(module)):
            raise Unfit(f"it names buffers {buffers!r:.80} that the model does not have")
    heads = tuple(data["heads"])
    if not all(isinstance(_pick(modules, name), torch.nn.Linear) for name in heads):
        raise Unfit(f"{heads!r:.80} are no linear layers")
    tensors = batches.tensors_of(batch)
    rule = from_plain(Normaliser, data["normaliser"])
    for path in (*([rule.path] if rule.path else []), *(path for path, _ in rule.whole)):
        _pick(tensors, path)
    draws = data["draws"]
    backwards = data["backwards"]
    if not isinstance(backwards, int) or (backwards > 0) != (work.backwards > 0) or backwards > 2:
        raise Unfit(f"its calls of backward cannot be {backwards!r:.40}")
    return dataclasses.replace(
        work, axes=_axes(data["axes"], tensors), normaliser=rule, splits=bool(data["splits"]), heads=heads, written=written,
        replay=None if draws is None else Replay(tuple(_draw(name, axis) for name, axis in draws)),
        sources=tuple(source for source in GLOBAL if source.name in data["sources"]), backwards=max(work.backwards, backwards),
    )  # fmt: skip


def as_findings(work: Work, rows: int) -> Findings:
    """As far as remedies ask for them."""
    return Findings(
        rows=rows, few=1, random=(), sources=work.sources, written=work.written, heads=work.heads, lower=False,
        normaliser=work.normaliser if work.splits else None, why_not="its batch is not cut",
    )  # fmt: skip


def _axes(data: Mapping[str, Any], tensors: Mapping[str, Any]) -> Axes:
    at = {path: axis for path, axis in data["at"].items() if _has_axis(_pick(tensors, path), axis)}
    packed = {path: (owner, axis) for path, (owner, axis) in data["packed"].items()}
    for path, (owner, axis) in packed.items():
        _pick(tensors, owner)
        _has_axis(_pick(tensors, path), axis)
    return Axes(at=at, packed=packed, whole=str(data["whole"]))


def _has_axis(tensor: Any, axis: Any) -> bool:
    if axis not in (None, "ends") and not (type(axis) is int and 0 <= axis < max(1, tensor.dim())):
        raise Unfit(f"a tensor of the batch has no axis {axis!r:.40}")
    return True


def _draw(name: Any, axis: Any) -> Draw:
    if not isinstance(name, str) or not (axis is None or (type(axis) is int and 0 <= axis < 64)):
        raise Unfit(f"it names a draw {name!r:.40} along {axis!r:.40}")
    return Draw(name, axis)


def _pick(table: Mapping[str, Any], name: Any) -> Any:
    if name not in table:
        raise Unfit(f"it names {name!r:.80}, which is not there")
    return table[name]
