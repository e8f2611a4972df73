"""How long a step takes: measured on a card, estimated elsewhere.

In: the user's work, a batch, the plain step's projection. Out: `Timing`: forward and backward pass at one or two batch
sizes that fit, the forward pass of every module, the rate of the link to the host. A pass takes its share of the
larger one's time, and at least as long as the smaller one's, because launches, not work, fill that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from outsize.core.noun import Noun
from outsize.model.fitting import batch as batches
from outsize.model.fitting.exhaustion import clear_up, is_out_of_memory
from outsize.model.fitting.projection import Projection
from outsize.model.fitting.runner import Runner, Work, read_loss, without_cache

LINKS = {"cpu": 1e9, "cuda": 5e10}
"""Bytes a second to the place next to a device, where nothing was measured: a scratch disk, pinned host memory."""

LAUNCH = {"cpu": 5e-6, "cuda": 1e-5}
"""Seconds an operator takes at least, where nothing was measured."""

ROOM = 0.8
"""Part of the budget that a measured slice may take by the plain step's arithmetic."""

PROBE = 64 * 2**20
"""Bytes copied to measure the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Noun):
    """Times of the plain step."""

    points: tuple[tuple[int, float, float], ...]
    """(samples, seconds of the forward pass, of the backward pass), the smaller first."""
    modules: dict[str, float]
    """Seconds of each module's forward pass with the largest number of samples, everything inside included."""
    link: float
    """Bytes a second to the place next to the device."""
    measured: bool

    def passes(self, rows: int) -> float:
        """Seconds of forward and backward pass of so many samples."""
        return self.forward(rows) + self._at(rows, 2)

    def forward(self, rows: int) -> float:
        """Seconds of a forward pass of so many samples."""
        return self._at(rows, 1)

    def _at(self, rows: int, which: int) -> float:
        first, last = self.points[0], self.points[-1]
        return max(first[which], last[which] * rows / last[0])

    def module(self, name: str, rows: int) -> float:
        """Seconds of a module's forward pass of so many samples."""
        biggest = self.points[-1][0]
        return self.modules.get(name, 0.0) * self.forward(rows) / max(self.forward(biggest), 1e-12)


def estimate_times(
    device: str, plain: Projection, rows: int, inclusive: Callable[[dict[str, float]], dict[str, float]]
) -> Timing:
    """From the numbers that operators compute and touch, and from how many there are."""
    took = {phase: sum(t for (p, _), t in plain.seconds.items() if p == phase) for phase in ("forward", "backward")}
    least = {phase: plain.operators.get(phase, 0) * LAUNCH[device] for phase in took}
    points = [
        (n, *(max(least[phase], seconds * n / rows) for phase, seconds in took.items())) for n in sorted({1, rows})
    ]
    modules = inclusive({name: t for (phase, name), t in plain.seconds.items() if phase == "forward"})
    scale = points[-1][1] / max(took["forward"], 1e-12)
    return Timing(
        points=tuple(points), modules={name: t * scale for name, t in modules.items()}, link=LINKS[device], measured=False  # type: ignore[arg-type]
    )  # fmt: skip


def measure_times(work: Work, batch: Any, plain: Projection, budget: int) -> Timing | None:
    """Times on the card of slices that fit, None where none does. Random state, buffers and gradients are the caller's care."""
    rows = batches.count_rows(batch)
    each = max(1, (plain.peak - plain.fixed) // rows)
    there = plain.fixed - plain.state
    most = max(1, min(rows, int((ROOM * budget - there) // each)))
    while True:
        try:
            return _measure(work, batch, most, rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        clear_up()
        if most == 1:
            return None
        most //= 2


def _measure(work: Work, batch: Any, most: int, rows: int) -> Timing:
    few = max(1, most // 8)
    names = {id(module): name for name, module in work.model.named_modules()}
    with without_cache(work.model), _dropping(work.model):
        _run(work, batches.take(batch, 0, few))
        points = [(n, *_clocked(work, batches.take(batch, 0, n))) for n in sorted({few, most})]
        with _watched(names) as events:
            forward, _ = _clocked(work, batches.take(batch, 0, most), again=False)
    scale = points[-1][1] / max(forward, 1e-9)  # the marks themselves take time where launches fill it
    modules = {name: scale * 1e-3 * float(start.elapsed_time(stop)) for name, (start, stop) in events.items() if stop}
    return Timing(points=tuple(points), modules=modules, link=measure_link(), measured=True)


def _run(work: Work, part: Any) -> None:
    read_loss(work.loss(work.model, part))[0].backward()


def _clocked(work: Work, part: Any, again: bool = True) -> tuple[float, float]:
    """Seconds of forward and backward pass; a first run warms up."""
    import torch

    if again:
        _run(work, part)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda.synchronize()
    marks[0].record()
    loss = read_loss(work.loss(work.model, part))[0]
    marks[1].record()
    loss.backward()
    marks[2].record()
    torch.cuda.synchronize()
    return 1e-3 * marks[0].elapsed_time(marks[1]), 1e-3 * marks[1].elapsed_time(marks[2])


def try_out(runner: Runner, batch: Any) -> float | None:
    """Seconds of forward and backward pass as a choice runs them, None where memory does not suffice."""
    import torch

    try:
        runner._passes(batch)
        _forget(runner.work.model)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        marks[0].record()
        runner._passes(batch)
        marks[1].record()
        torch.cuda.synchronize()
        _forget(runner.work.model)
        return 1e-3 * float(marks[0].elapsed_time(marks[1]))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    _forget(runner.work.model)
    clear_up()
    return None


def _forget(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def _dropping(model: Any) -> Iterator[None]:
    """Gradients are let go as they come."""

    def drop(parameter: Any) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _watched(names: dict[int, str]) -> Iterator[dict[str, list[Any]]]:
    """Marks before and after the first forward pass of every module."""
    import torch
    from torch.nn.modules import module as hooks

    events: dict[str, list[Any]] = {}

    def enter(module: Any, args: Any) -> None:
        name = names.get(id(module))
        if name is not None and name not in events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events[name] = [event, None]

    def leave(module: Any, args: Any, out: Any) -> None:
        pair = events.get(names.get(id(module), ""))
        if pair is not None and pair[1] is None and id(module) in names:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            pair[1] = event

    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def measure_link() -> float:
    """Bytes a second from pinned host memory to the card, the slower of both ways."""
    import torch

    host = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(PROBE, dtype=torch.uint8, device="cuda")
    slowest = 0.0
    for into, source in ((card, host), (host, card)):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        marks[0].record()
        into.copy_(source, non_blocking=True)
        marks[1].record()
        torch.cuda.synchronize()
        slowest = max(slowest, 1e-3 * marks[0].elapsed_time(marks[1]))
    return PROBE / slowest
