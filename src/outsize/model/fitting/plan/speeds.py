"""How long a step takes, and how fast bytes move: measured on a card, estimated elsewhere.

In: the user's work, a batch, the plain step's projection. Out: `Timing`: forward and backward pass at one or two batch
sizes, the forward pass of every module, the rate of the link to the host. A slice with gradients has to fit. A forward pass
without them keeps nothing, so it is also timed with more samples, where the card is busy with work and not with launches.
Times between two measured sizes are interpolated. Above the largest they grow with the samples, below the smallest they
stay the same, as launches take as long. Of a model that lives on the host `Rates`: bytes a second of the link in each direction,
alone and both at once, and of parameters that the user's optimizer updates on the host.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outsize.core.noun import Noun
from outsize.model.fitting.learn.findings import dropping
from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import CardMover, Mover
from outsize.model.fitting.move.out_of_memory import clear_up, where_room
from outsize.model.fitting.plan.dry_run import copy_optimizer
from outsize.model.fitting.plan.projection import Projection, inclusive
from outsize.model.fitting.run.chunked_loss import chunked_heads
from outsize.model.fitting.run.forward_functions import without_cache
from outsize.model.fitting.run.loss import read_loss
from outsize.model.fitting.run.resident import ResidentRunner
from outsize.model.fitting.run.runner import Work
from outsize.model.torch_port.objects import around_modules

LINKS = {"cpu": 1e9, "cuda": 5e10}
"""Bytes a second to the place next to a device, where nothing was measured: a scratch disk, pinned host memory."""

LAUNCH = {"cpu": 1e-5, "cuda": 1e-5}
"""Seconds of the processor for an operator, where nothing was measured: a card works meanwhile, a CPU does not."""

ROOM = 0.8
"""Part of the budget that a measured slice may take by the plain step's arithmetic."""

HEADS = 16
"""Pieces of the loss in a forward pass alone, so that logits do not take the room."""

RUNS = 3
"""How often something is timed, where it is short."""

SHORT = 0.2
"""Seconds of one run after which it is not timed again."""

LONG = 1.0
"""Seconds of a run that counts although it is the first: what warms up is little beside it."""

PROBE = 64 * 2**20
"""Bytes copied to measure the link."""

SAMPLE = 128 * 2**20
"""Bytes of one measured copy at most."""
ELEMENTS = 8 * 2**20
"""Elements of the parameter on which optimizers are timed."""

TYPICAL = {"cpu": (8e9, 8e9, 1e9), "cuda": (5e10, 5e10, 3e9)}
"""In, out, update on the host in bytes a second: what is assumed where nothing is measured (a dry run without the device)."""


Point = tuple[int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Noun):
    """Times of the plain step."""

    points: tuple[Point, ...]
    """(samples, seconds of the forward pass, of the backward pass), the smaller first."""
    modules: dict[str, float]
    """Seconds of each module's forward pass with the largest number of samples, everything inside included."""
    link: float
    """Bytes a second to the place next to the device."""
    measured: bool

    def passes(self, rows: int) -> float:
        """Seconds of forward and backward pass of so many samples."""
        return self.forward(rows) + self._at(rows, 2)

    @property
    def least(self) -> float:
        """Seconds below which no passes go, however few the samples: those of their launches."""
        return min(forward + backward for _, forward, backward in self.points)

    def forward(self, rows: int) -> float:
        """Seconds of a forward pass of so many samples."""
        return self._at(rows, 1)

    def _at(self, rows: int, which: int) -> float:
        last = self.points[-1]
        if rows >= last[0]:
            return last[which] * rows / last[0]
        return float(np.interp(rows, [point[0] for point in self.points], [point[which] for point in self.points]))

    def module(self, name: str, rows: int) -> float:
        """Seconds of a module's forward pass of so many samples."""
        biggest = self.points[-1][0]
        return self.modules.get(name, 0.0) * self.forward(rows) / max(self.forward(biggest), 1e-12)


def estimate_times(device: str, plain: Projection, rows: int) -> Timing:
    """From the numbers that operators compute and touch, and from how many there are."""
    took = _seconds(plain)
    least = {phase: plain.operators.get(phase, 0) * LAUNCH[device] for phase in took}
    join = sum if device == "cpu" else max
    points = [
        (n, *(join((least[phase], seconds * n / rows)) for phase, seconds in took.items())) for n in sorted({1, rows})
    ]
    modules = inclusive({name: t for (phase, name), t in plain.seconds.items() if phase == "forward"})
    scale = points[-1][1] / max(took["forward"], 1e-12)
    return Timing(
        points=tuple(points), modules={name: t * scale for name, t in modules.items()}, link=LINKS[device], measured=False  # type: ignore[arg-type]
    )  # fmt: skip


def measure_times(work: Work, batch: Any, plain: Projection, budget: int) -> Timing | None:
    """Times on the card of slices that fit, None where none does. Random state, buffers and gradients are the caller's care."""
    rows = work.axes.count(batch)
    each = max(1, (plain.peak - plain.fixed) // rows)
    there = plain.fixed - plain.state
    most = max(1, min(rows, int((ROOM * budget - there) // each)))
    timing = None
    while timing is None and most:
        timing = where_room(functools.partial(_measure, work, batch, most, rows, plain))
        most //= 2
    return timing


def _measure(work: Work, batch: Any, most: int, rows: int, plain: Projection) -> Timing:
    """Times of slices of up to so many samples with gradients, and of up to `rows` without."""
    with without_cache(work.model), dropping(work.model):
        sizes = sorted({max(1, most // 8), max(1, most // 2), most})
        read_loss(work.loss(work.model, work.axes.take(batch, 0, sizes[0])))[0].backward()
        points = [(n, *_clocked(work, work.axes.take(batch, 0, n))) for n in sizes]
        with chunked_heads(work.model, work.heads, HEADS, work.device, always=True):
            sizes = sorted({n for n in (rows // 2, rows) if n > most})
            points += _extrapolated(work, batch, points[-1], sizes, _ratio(plain))
            modules = _modules(work, work.axes.take(batch, 0, points[-1][0]), points[-1][1])
    for head in work.heads:  # it stood for its logits only
        modules[head] = _share(plain, head) * points[-1][1]
    return Timing(points=tuple(points), modules=modules, link=measure_link(), measured=True)


def _seconds(plain: Projection) -> dict[str, float]:
    return {phase: sum(t for (p, _), t in plain.seconds.items() if p == phase) for phase in ("forward", "backward")}


def _ratio(plain: Projection) -> float:
    """Time of the backward pass over that of the forward pass, by what their operators compute and touch."""
    took = _seconds(plain)
    return min(3.0, max(1.5, took["backward"] / max(took["forward"], 1e-12)))


def _extrapolated(work: Work, batch: Any, last: Point, sizes: list[int], ratio: float) -> list[Point]:
    """Points of sizes whose gradients have no room: both passes grow from the last one as a forward pass alone does.

    Where launches bind the last one, its backward pass would grow too much: `ratio` bounds it, unless it is longer already.
    """
    ratio = max(ratio, last[2] / max(last[1], 1e-12))
    few = _forward_alone(work, work.axes.take(batch, 0, last[0])) if sizes else None
    points: list[Point] = []
    for n in sizes:
        many = None if few is None else _forward_alone(work, work.axes.take(batch, 0, n))
        if few is not None and many is not None:
            growth = max(1.0, many / few)
            forward = max(many, min(last[1] * growth, 1.2 * many))
            points.append((n, forward, max(last[2], min(last[2] * growth, ratio * forward))))
    return points


def _share(plain: Projection, name: str) -> float:
    """A module's part of the forward pass, by what operators compute and touch."""
    took = {module: seconds for (phase, module), seconds in plain.seconds.items() if phase == "forward"}
    return took.get(name, 0.0) / max(sum(took.values()), 1e-12)


def _forward_alone(work: Work, part: Any) -> float | None:
    """Seconds of a forward pass that keeps nothing, None where even that has no room."""
    with torch.no_grad():
        return where_room(lambda: _quickest([lambda: work.loss(work.model, part)])[0])


def _modules(work: Work, part: Any, forward: float) -> dict[str, float]:
    """Seconds of each module's forward pass, so that the whole takes `forward`: marks take time where launches fill it."""
    names = {id(module): name for name, module in work.model.named_modules()}
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.no_grad(), _watched(names) as events:
        torch.cuda.synchronize()
        marks[0].record()
        work.loss(work.model, part)
        marks[1].record()
        torch.cuda.synchronize()
    scale = forward / max(1e-3 * marks[0].elapsed_time(marks[1]), 1e-9)
    return {
        name: scale * 1e-3 * sum(float(pair[0].elapsed_time(pair[1])) for pair in pairs if len(pair) == 2)
        for name, pairs in events.items()
    }


def _clocked(work: Work, part: Any) -> tuple[float, float]:
    losses: list[Any] = []
    forward, backward = _quickest([
        lambda: losses.append(read_loss(work.loss(work.model, part))[0]), lambda: losses.pop().backward(),
    ])  # fmt: skip
    return forward, backward


def _quickest(acts: list[Callable[[], Any]]) -> list[float]:
    """Seconds of each act in the quickest of a few runs, after one that warms up: other work of the machine only adds time."""
    best: list[float] = []
    for number in range(1 + RUNS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(1 + len(acts))]
        torch.cuda.synchronize()
        marks[0].record()
        for act, mark in zip(acts, marks[1:], strict=True):
            act()
            mark.record()
        torch.cuda.synchronize()
        took = [1e-3 * float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]
        counts = number > 0 or sum(took) > LONG
        if counts and (not best or sum(took) < sum(best)):
            best = took
        if counts and sum(took) > SHORT:
            break
    return best


def try_out(runner: ResidentRunner, batch: Any) -> float | None:
    """Seconds of forward and backward pass as a choice runs them, None where memory does not suffice."""

    def forget() -> None:
        for parameter in runner.work.model.parameters():
            parameter.grad = None

    def passes() -> float:
        try:
            return _quickest([lambda: runner.passes(batch, runner.sink), forget])[0]
        finally:
            forget()

    return where_room(passes)


@contextlib.contextmanager
def _watched(names: dict[int, str]) -> Iterator[dict[str, list[list[Any]]]]:
    """Marks before and after every run of every module."""
    events: dict[str, list[list[Any]]] = {}

    def mark(module: Any, act: Callable[[list[list[Any]], Any], None]) -> None:
        if id(module) in names:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            act(events.setdefault(names[id(module)], []), event)

    def enter(module: Any, args: Any) -> None:
        mark(module, lambda pairs, event: pairs.append([event]))

    def leave(module: Any, args: Any, out: Any) -> None:
        mark(module, lambda pairs, event: pairs[-1].append(event))

    with around_modules(enter, leave):
        yield events


def measure_link() -> float:
    """Bytes a second from pinned host memory to the card, the slower of both ways."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(Noun):
    """Bytes a second."""

    bring: float
    """Host to device."""
    send: float
    """Device to host."""
    both: float
    """Each direction while the other runs too."""
    host: float
    """Bytes of parameters that the optimizer updates on the host."""
    measured: bool
    """False where they are typical ones."""
    read: float = 0.0
    """From the scratch file; 0 where there is none."""
    write: float = 0.0
    """To it."""


def typical_rates(kind: str) -> Rates:
    """Assumed rates, where nothing can be measured."""
    bring, send, host = TYPICAL[kind]
    return Rates(bring=bring, send=send, both=0.9 * min(bring, send), host=host, measured=False)


def measure_rates(mover: Mover, optimizer: Any, room: int = 8 * SAMPLE) -> Rates:
    """Time a few copies and a few updates; `room` is the device's budget, of which a quarter is used meanwhile."""
    if not isinstance(mover, CardMover):
        return typical_rates("cpu")
    size = max(1, min(SAMPLE, room // 8))
    block = Block(2 * size)
    there = [mover.empty(size), mover.empty(size)]
    here = [block.bytes[:size], block.bytes[size:]]

    def bring() -> None:
        mover.bring(there[0], here[0])

    def send() -> None:
        mover.send(here[1], there[1])

    def both() -> None:
        bring()
        send()

    found = [size / _time_copies(work, mover) for work in (bring, send, both)]
    block.unlock()
    there.clear()
    clear_up()  # what comes next must not begin in a piece of these blocks, which could then not be given back
    host = typical_rates("cuda").host if optimizer is None else time_optimizer(optimizer, "cpu")
    return Rates(bring=found[0], send=found[1], both=found[2], host=host, measured=True)


def _time_copies(work: Callable[[], None], mover: Mover) -> float:
    work()
    mover.drain()
    start = time.perf_counter()
    for _ in range(3):
        work()
    mover.drain()
    return (time.perf_counter() - start) / 3


def time_optimizer(optimizer: Any, device: str, elements: int = ELEMENTS) -> float:
    """Bytes of parameters a second that a copy of the user's optimizer updates."""
    parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    copied = copy_optimizer(optimizer, [{**optimizer.param_groups[0], "params": [parameter]}])
    copied.step()
    start = time.perf_counter()
    copied.step()
    copied.step()
    return 2 * 4 * elements / (time.perf_counter() - start)
