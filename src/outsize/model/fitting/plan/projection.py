"""The tracer of a fitted step, and what a step would hold from the trace of one.

In: a step that runs on tensors without contents. Out: the ledger of its storages with phases, calls of modules and estimated
times (`Watch`), and from them a `Projection`: peaks by phase, what each module keeps, and whether an allocator with a limit gets
through. A card's kernels, workspaces and allocator are those of `outsize.estimate`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outsize.allocator import PhaseEvent
from outsize.core.noun import Noun
from outsize.model.fitting.move import evicted
from outsize.model.fitting.run.random_sources import draws
from outsize.model.torch_port.dispatch import arguments_of, is_functorch, tensors_in
from outsize.model.torch_port.objects import around_modules
from outsize.model.tracing.records.attribution import Owners
from outsize.model.tracing.records.ledger import Held, Ledger
from outsize.model.tracing.records.replay import peaks_of, replay_on_card, split_steps
from outsize.model.tracing.rules.operators import look_up
from outsize.model.tracing.tracer import Tracer

RATES = {"cpu": (8.5e10, 1.7e10), "cuda": (1.5e14, 3e12)}
"""Operations and bytes a second of a kind of device; only their ratio matters: times are shared out by it."""

CAPABILITY = (9, 0)
"""Whose kernels are assumed where there is no card to ask: that on which the tracer's rules were read."""

NUMBER = 8
"""Bytes of a Python number as a tensor."""

Ends = tuple[set[Held], set[Held]]
"""Records that a module took in the forward pass, and those that it made and gave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(Noun):
    """What a step would hold."""

    peaks: dict[str, int]
    """Bytes on the device, by phase: of storages on a CPU; on a card of what torch's allocator has handed out, and what
    it has `reserved` for that, which only grows."""
    away: int
    """Most bytes that wait elsewhere."""
    kept: dict[str, int]
    """Bytes alive at the end of the forward pass, by the module that made them; empty for inference."""
    stays: dict[str, int]
    """Bytes that stay where a module keeps its input only: what it gives out, and inputs that nobody else keeps."""
    gives: dict[str, int]
    """Those of them that it gives out."""
    fixed: int
    """Bytes that are there before every step but the first: weights, buffers, batch, state."""
    state: int
    """Bytes of optimizer state on the device."""
    calls: dict[str, int]
    """How often each module ran in the forward pass, 0 for those that the user's own code runs again in the backward pass."""
    seconds: dict[tuple[str, str], float]
    """Estimated time by (phase, module)."""
    operators: dict[str, int]
    """Operators by phase."""
    moves: tuple[PhaseEvent, ...] = field(repr=False)
    """Every allocation and free of the first step and before it."""
    again: tuple[PhaseEvent, ...] = field(repr=False)
    """Those of every later step: what the first one keeps comes once."""
    card: bool
    """A card's allocator is played."""
    drawing: float = 0.0
    """Estimated seconds of a CPU for random numbers."""
    grown_peaks: dict[str, int] = field(default_factory=dict, repr=False)
    """On a card the peaks where segments grow."""
    beside: int = 0
    """Bytes of them all that are held by tensors which are not the step's."""
    brought: int = 0
    """Of a model on the host: bytes of weights and state that come to the device in a step."""
    order: tuple[str, ...] = ()
    """Of a model on the host: its units, as a forward pass meets them."""
    outside: tuple[str, ...] = ()
    """Of a model on the host: parameters that are used while their unit is not there."""
    random: tuple[str, ...] = ()
    """Of a model on the host: operators and generators that draw random numbers."""
    sources: tuple[Any, ...] = ()
    """Of a model on the host: generators beside torch's that were drawn from."""
    written: dict[Any, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Of a model on the host: buffers that a forward pass writes, by module."""
    heads_taken: bool = False
    """Of a model on the host: output head and loss ran in pieces, as planned."""

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def computing(self) -> float:
        """Estimated seconds of all operators."""
        return sum(self.seconds.values())

    @property
    def grown(self) -> int:
        """Bytes that a card's allocator would reserve with segments that grow."""
        return self.grown_peaks.get("reserved", 0)

    def growing(self) -> Projection:
        """The same step where segments grow."""
        return replace(self, peaks=self.grown_peaks)

    def settles(self, limit: int) -> bool:
        """True where an allocator that may not reserve more than `limit` gets through, in the end without clearing its cache."""
        if not self.card:
            return self.peak <= limit
        replayed = replay_on_card(self.moves, self.again, limit)
        return not replayed.failed and not replayed.retries


def kept_by(
    ledger: Ledger, label: str, marks: list[tuple[int, str]], names: set[str], ends: dict[str, Ends]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes alive at the end of the first forward pass by the module that made them, what stays of a module with its input
    alone, and what of that it gave out."""
    start = next(index for index, name in marks if name == "forward")
    stop = next((index for index, name in marks if name == "backward"), start)
    sizes: dict[str, int] = {}
    alive: dict[int, int] = {}
    for held in ledger.all:
        if held.label == label and start <= held.born < stop and (held.died is None or held.died >= stop):
            name = held.module if held.module in names else ""
            sizes[name] = sizes.get(name, 0) + held.bytes
            alive[held.id] = held.bytes
    stays, gives = {}, {}
    for name, (taken, gave) in ends.items():
        alone = sum(h.bytes for h in taken if h.label == label and h.died is not None and h.died < stop)
        gives[name] = sum(alive.get(held.id, 0) for held in gave)
        stays[name] = alone + gives[name]
    return sizes, stays, gives


def label_of(kind: str, device: Any) -> str:
    """What a trace calls a device of this kind."""
    return "cpu" if kind == "cpu" else f"cuda:{device.index or 0}"


DRAWN = 5e-9
"""Seconds of a CPU for a random number."""


class ModuleNames(Owners):
    """Attributes storages to modules whose names are known beforehand, and to no line of the user's code."""

    def __init__(self, ledger: Ledger, names: dict[int, str]) -> None:
        super().__init__(ledger)
        self._names = dict(names)

    def add_root(self, model: Any) -> None:
        """The model whose modules are followed."""
        self._roots.add(model)

    def running(self) -> str:
        return self._stack[-1] if self._stack else ""

    def mark(self) -> None:
        """Weights are known already."""

    def _line(self) -> str:
        return ""


class Watch(Tracer):
    """The tracer of a fitted step: also phases, calls and estimated times."""

    owners: ModuleNames

    def __init__(self, label: str, model: Any) -> None:
        there = label != "cpu" and torch.cuda.is_available()
        super().__init__(label, torch.cuda.get_device_capability() if there else CAPABILITY)
        self.casting = ("cpu",) if label == "cpu" and not torch.cuda.is_available() else self.casting
        self.reuse = label != "cpu"  # on a CPU a mode in Python counts the real step too
        self.marks: list[tuple[int, str]] = []
        """(number of the event, phase that begins there)."""
        self.names = {id(child): name for name, child in model.named_modules()}
        self.calls: dict[str, int] = {}
        """How often modules ran in the forward pass; 0 for those that the user's own code runs again in the backward pass."""
        self._backward = False
        """A backward pass has begun."""
        self.ends: dict[str, Ends] = {}
        """What modules took and gave in the forward pass."""
        self._numbers: list[Held] = []
        """Python numbers that became tensors."""
        self._entered: dict[str, tuple[int, set[Held]]] = {}
        self.seconds: dict[tuple[str, str], float] = {}
        self.operators: dict[str, int] = {}
        self.drawing = 0.0
        """The part of it that draws random numbers."""
        self.spent = 0.0
        """Estimated time so far."""
        self._rates = RATES[label.partition(":")[0]]
        self.owners = ModuleNames(self.ledger, self.names)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        evicted.listeners.append(self.resized)
        try:
            with around_modules(self._called, self._gave), super().running():
                yield
        finally:
            evicted.listeners.remove(self.resized)

    def begin(self, model: Any) -> None:
        """Everything is built: a step begins."""
        self.ledger.step = 0
        self.owners.add_root(model)

    def phase(self, name: str) -> None:
        if name != "backward":
            while self._numbers:
                self.ledger.free(self._numbers.pop())
        self._backward |= name == "backward"
        self.marks.append((len(self.ledger.events), name))

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator, and its estimated time: what it computes or what it touches, whichever takes longer."""
        self._count_numbers(func, args)
        out = super().dispatch(func, args, kwargs)
        operator = look_up(func)
        if operator.view or not self.marks:
            return out
        count = operator.flops
        flops = count(*args, **kwargs, out_val=out) if count is not None else 0
        results = out if isinstance(out, tuple | list) else (out,)
        touched = sum(r.numel() * r.element_size() for r in results if isinstance(r, torch.Tensor))
        phase = self.marks[-1][1]
        module = self.owners.running()
        key = (phase, module if module in self.calls else "")
        seconds = max(flops / self._rates[0], 2 * touched / self._rates[1])
        if operator.draws and self.device == "cpu" and draws(func, args, kwargs):
            drawing = DRAWN * sum(r.numel() for r in results[:1] if isinstance(r, torch.Tensor))
            seconds, self.drawing = seconds + drawing, self.drawing + drawing
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self.spent += seconds
        self.operators[phase] = self.operators.get(phase, 0) + 1
        return out

    def _count_numbers(self, func: Any, args: Any) -> None:
        """Python numbers in the place of tensors become tensors, which autograd may keep until the backward pass has ended."""
        if self.device == "cpu" and self.marks and torch.is_grad_enabled():
            for place in _tensor_places(func):
                if place < len(args) and isinstance(args[place], int | float):
                    self._numbers.append(self.ledger.allocate(NUMBER, self.device, "number"))

    def placing_of(self, out: Any) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which other calls make their results where a call made these."""
        made = next(iter(tensors_in(out)), None)
        label = None if made is None else self.ledger.label_of(made)
        return contextlib.nullcontext if label is None else functools.partial(self.placing, label)

    def _called(self, module: Any, args: Any) -> None:
        name = self.names.get(id(module))
        if name is not None:
            self.calls[name] = 0 if self._backward else self.calls.get(name, 0) + 1
            self._entered[name] = len(self.ledger.events), self._records(args)

    def _gave(self, module: Any, args: Any, out: Any) -> None:
        name = self.names.get(id(module))
        if name is not None and not self._backward:
            entered, taken = self._entered[name]
            all_taken, gave = self.ends.setdefault(name, (set(), set()))
            all_taken |= taken
            gave |= {held for held in self._records(out) if held.born >= entered}

    def _records(self, value: Any) -> set[Held]:
        return {held for tensor in _tensors(value) if (held := self.ledger.of(tensor)) is not None}


def projection_of(
    watch: Watch, label: str, *, away: int, state: int, present: int, beside: int, taken_apart: bool, **found: Any
) -> Projection:
    """What a trace shows; `taken_apart`: also what each module keeps. `found`: what else is known of a model on the host."""
    moves, again = split_steps(watch.ledger, label, watch.marks, beside)
    card = label != "cpu"
    names = set(watch.names.values())
    kept, stays, gives = kept_by(watch.ledger, label, watch.marks, names, watch.ends) if taken_apart else ({}, {}, {})
    return Projection(
        peaks=peaks_of(moves, again, card), away=away, kept=kept, stays=stays, gives=gives, fixed=present + state + beside,
        state=state, calls=watch.calls, beside=beside, drawing=watch.drawing,
        seconds=watch.seconds, operators=watch.operators, moves=moves, again=again, card=card,
        grown_peaks=peaks_of(moves, again, card, expandable=True) if card and not found else {}, **found,
    )  # fmt: skip


@functools.cache
def _tensor_places(func: Any) -> tuple[int, ...]:
    """Positions of an operator's arguments that are tensors."""
    return tuple(place for place, argument in enumerate(arguments_of(func)) if str(argument.type) == "Tensor")


def _tensors(value: Any) -> Iterator[Any]:
    if type(value) is torch.Tensor:
        if not is_functorch(value):  # inside torch.func: it has no storage
            yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def inclusive(values: dict[str, Any]) -> dict[str, Any]:
    """Sums over a module and everything inside it."""
    sums: dict[str, Any] = {}
    for name, value in values.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            key = ".".join(parts[:depth])
            sums[key] = sums.get(key, 0) + value
    return sums
