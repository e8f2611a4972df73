"""A model, an optimizer and a batch without contents, on which a fitted step runs to show what it would hold.

In: the user's work and a choice. Out: a `Projection`. The user's own module objects run, with tensors without contents
in the place of their parameters for that time; every attribute is put back. The tracer that `outsize.estimate` uses
writes down every storage, so that a card's kernels, workspaces and allocator are those of the estimate.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from outsize.core.errors import OutsizeError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move import evicted
from outsize.model.fitting.move.out_of_memory import is_out_of_memory
from outsize.model.fitting.move.stores import IN_FLIGHT, NoStore
from outsize.model.fitting.plan.foreign_tensors import look_beside
from outsize.model.fitting.plan.projection import Ends, Projection, kept_by
from outsize.model.fitting.run.random_sources import same_draws
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.optimizer_subset import state_of
from outsize.model.torch_port.dispatch import is_functorch, torch_off
from outsize.model.torch_port.objects import (
    buffer_table,
    flat_weights,
    forget_step_hooks,
    parameter_table,
    set_flat_weights,
    storage_key,
)
from outsize.model.tracing.attribution import Owners
from outsize.model.tracing.known_values import KEEP_ELEMENTS
from outsize.model.tracing.ledger import Held, Ledger
from outsize.model.tracing.operators import look_up
from outsize.model.tracing.replay import peaks_of, split_steps
from outsize.model.tracing.result_shapes import Shapes
from outsize.model.tracing.tracer import Tracer

RATES = {"cpu": (5e10, 1e10), "cuda": (1.5e14, 3e12)}
"""Operations and bytes a second of a kind of device; only their ratio matters: times are shared out by it."""

CAPABILITY = (9, 0)
"""Whose kernels are assumed where there is no card to ask: that on which the tracer's rules were read."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Enough of a tensor to make another without contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    grad: bool
    parameter: bool
    contents: Any = None
    """A storage with what a small tensor holds, for a step that looks at it."""

    @classmethod
    def of(cls, tensor: Any, known: bool = False) -> Outline:
        """Its shape, layout and part in autograd; its contents, which may be elsewhere, only where they are `known`."""
        import torch

        contents = None
        if known and tensor.numel() <= KEEP_ELEMENTS:
            once = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # of what is repeated, one
            with torch.no_grad():
                copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype).copy_(once)
            contents = copy.untyped_storage()
        return cls(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter), contents,
        )  # fmt: skip

    def known_to(self, tracer: Tracer, label: str) -> Any:
        """The tensor without contents, of whose contents a trace has a copy that it may write into."""
        made = self.make(label)
        if self.contents is not None:
            with torch_off():
                tracer.ledger.values[storage_key(made)] = self.contents.clone()
        return made

    def make(self, device: str) -> Any:
        """The tensor without contents, under the mode that is on."""
        import torch

        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.parameter:
            return torch.nn.Parameter(made, requires_grad=self.grad)
        return made.requires_grad_(self.grad)


@contextlib.contextmanager
def collecting_little() -> Iterator[None]:
    """Python's collector looks at what the block makes, not again and again at all that the process has loaded."""
    if gc.get_freeze_count():  # somebody else does that
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Stage:
    """Projects choices for one model and one batch."""

    def __init__(self, work: Work, batch: Any) -> None:
        self.work = work
        self.batch = batches.transform(batch, lambda _, tensor: Outline.of(tensor, known=True))
        """The batch, with outlines for tensors."""
        model = work.model
        self._outlines = {id(b): (b, Outline.of(b, known=not b.dtype.is_floating_point)) for b in model.buffers()}
        self._outlines |= {id(p): (p, Outline.of(p)) for p in model.parameters()}
        self._beside = look_beside(next(model.parameters()).device, _own(work, batch))
        self._shapes = Shapes()
        self._reads = False
        """A step fails unless it can read what the batch holds: labels that are looked up or checked."""

    def with_batch(self, batch: Any) -> Stage:
        """The same work with another batch of outlines."""
        other = copy.copy(self)
        other.batch = batch
        return other

    def project(self, choice: Choice, *, call: Callable[[Any, Any], Any] | None = None) -> Projection:
        """Run a step (or, with `call`, an inference) without contents: other batches than this one hold at most as much.

        Where that fails, values of the batch steer the step: then it reads those of this batch.
        """
        with collecting_little():
            if not self._reads:
                try:
                    return self._project(choice, call)
                except Exception as error:
                    if isinstance(error, OutsizeError) or is_out_of_memory(error):
                        raise
            projection = self._project(choice, call, reads=True)
            self._reads = True
            return projection

    def _project(self, choice: Choice, call: Callable[[Any, Any], Any] | None, reads: bool = False) -> Projection:
        label = label_of(self.work.device, next(self.work.model.parameters()).device)
        watch = Watch(label, self.work.model)
        watch.shapes = self._shapes
        store = NoStore(0 if label == "cpu" else IN_FLIGHT)
        with same_draws(), watch.running():
            fakes = {key: outline.known_to(watch, label) for key, (_, outline) in self._outlines.items()}

            def enter(_: str, outline: Outline) -> Any:
                return outline.known_to(watch, label) if reads or not outline.shape else outline.make(label)

            batch = batches.transform(self.batch, enter, leaf=Outline)
            given = sum(held.bytes for held in watch.ledger.live.values() if held.label == label)
            optimizer = None if self.work.optimizer is None or call else self._optimizer(fakes, label)
            with self._swapped(fakes) as model:
                watch.begin(model)
                work = replace(self.work, optimizer=optimizer, scaler=None)
                runner = open_resident(work, choice, store, real=False)
                runner.phase = watch.phase
                if call is not None:
                    runner.infer(batch, call)
                else:
                    runner.step(batch) if optimizer is not None else runner.backward(batch)
            size = sum(tensor.numel() * tensor.element_size() for tensor in _state(optimizer))
        beside = self._beside.without(watch.met())
        return projection_of(
            watch, label, away=store.peak, state=size, given=given, beside=beside, taken_apart=call is None
        )

    def _optimizer(self, fakes: dict[int, Any], label: str) -> Any:
        """The user's optimizer over fakes; state that it has comes along, state that it has not is made by its first step."""
        real = self.work.optimizer
        made = copy_optimizer(
            real, [{**group, "params": [fakes[id(p)] for p in group["params"]]} for group in real.param_groups]
        )
        bring_state(real, made, fakes, label)
        return made

    @contextlib.contextmanager
    def _swapped(self, fakes: dict[int, Any]) -> Iterator[Any]:
        """The model with fakes for parameters and buffers; everything as before afterwards."""
        model = self.work.model
        before = [
            (m, dict(m.__dict__), [(table, dict(table)) for table in (parameter_table(m), buffer_table(m))])
            for m in model.modules()
        ]
        try:
            for module, _, tables in before:
                for table, before_it in tables:
                    table.update({name: fakes[id(tensor)] for name, tensor in before_it.items() if tensor is not None})
                flat = flat_weights(module)
                if flat is not None:
                    set_flat_weights(module, [fakes.get(id(tensor), tensor) for tensor in flat])
            yield model
        finally:
            for module, attributes, tables in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                for table, before_it in tables:
                    table.clear()
                    table.update(before_it)


def label_of(kind: str, device: Any) -> str:
    """What a trace calls a device of this kind."""
    return "cpu" if kind == "cpu" else f"cuda:{device.index or 0}"


def _state(optimizer: Any) -> list[Any]:
    import torch

    if optimizer is None:
        return []
    return [value for value in state_of(optimizer) if isinstance(value, torch.Tensor) and value.dim()]


def _own(work: Work, batch: Any) -> list[Any]:
    """The tensors that a step has before it begins."""
    weights = list(work.model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [*weights, *work.model.buffers(), *gradients, *_state(work.optimizer), *batches.tensors_of(batch).values()]


def projection_of(
    watch: Watch, label: str, *, away: int, state: int, given: int, beside: int, taken_apart: bool, **found: Any
) -> Projection:
    """What a trace shows; `taken_apart`: also what each module keeps. `found`: what else is known of a model on the host."""
    moves, again = split_steps(watch.ledger, label, watch.marks, beside)
    card = label != "cpu"
    names = set(watch.names.values())
    kept, stays, gives = kept_by(watch.ledger, label, watch.marks, names, watch.ends) if taken_apart else ({}, {}, {})
    return Projection(
        peaks=peaks_of(moves, again, card), away=away, kept=kept, stays=stays, gives=gives, fixed=given + state + beside,
        state=state, calls=watch.calls, beside=beside,
        seconds=watch.seconds, operators=watch.operators, moves=moves, again=again, card=card,
        grown_peaks=peaks_of(moves, again, card, expandable=True) if card and not found else {}, **found,
    )  # fmt: skip


class ModuleNames(Owners):
    """Attributes storages to modules whose names are known beforehand, and to no line of the user's code."""

    def __init__(self, ledger: Ledger, names: dict[int, str]) -> None:
        super().__init__(ledger)
        self._names = dict(names)

    def add_root(self, model: Any) -> None:
        """The model whose modules are followed."""
        self._roots.add(model)

    def running(self) -> str:
        """The module that runs now, empty outside of all."""
        return self._stack[-1] if self._stack else ""

    def mark(self) -> None:
        """Weights are known already."""

    def _line(self) -> str:
        return ""


class Watch(Tracer):
    """The tracer of a fitted step: also phases, calls and estimated times."""

    owners: ModuleNames

    def __init__(self, label: str, model: Any) -> None:
        import torch

        there = label != "cpu" and torch.cuda.is_available()
        super().__init__(label, torch.cuda.get_device_capability() if there else CAPABILITY)
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
        self._entered: dict[str, tuple[int, set[Held]]] = {}
        self.seconds: dict[tuple[str, str], float] = {}
        self.operators: dict[str, int] = {}
        self._rates = RATES[label.partition(":")[0]]
        self.owners = ModuleNames(self.ledger, self.names)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count while the block runs."""
        from torch.nn.modules import module as hooks

        handles = [
            hooks.register_module_forward_pre_hook(self._called),
            hooks.register_module_forward_hook(self._gave),
        ]
        evicted.listeners.append(self._resized)
        try:
            with super().running():
                yield
        finally:
            evicted.listeners.remove(self._resized)
            for handle in handles:
                handle.remove()

    def begin(self, model: Any) -> None:
        """Everything is built: a step begins."""
        self.ledger.step = 0
        self.owners.add_root(model)

    def phase(self, name: str) -> None:
        """A phase begins."""
        self._backward |= name == "backward"
        self.marks.append((len(self.ledger.events), name))

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator, and its estimated time: what it computes or what it touches, whichever takes longer."""
        import torch

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
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self.operators[phase] = self.operators.get(phase, 0) + 1
        return out

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

    def _resized(self, tensor: Any) -> None:
        self.ledger.add(tensor, self.device, "resize")


def bring_state(real: Any, fake: Any, fakes: Mapping[int, Any], label: str) -> None:
    """Give an optimizer over fakes the state that the real one has; some have it from the beginning and make none later."""
    import torch

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return Outline.of(value).make(label) if value.dim() else value.detach().clone()

    for parameter, values in real.state.items():
        if id(parameter) in fakes:
            fake.state[fakes[id(parameter)]] = {name: copied(value) for name, value in values.items()}


def copy_optimizer(optimizer: Any, groups: list[dict[str, Any]] | None = None) -> Any:
    """An optimizer like the user's, with groups and state of its own; `groups`: with these."""
    made = copy.copy(optimizer)  # torch's way of copying leaves out what a user's own optimizer counts or is set to
    data = {name: value for name, value in optimizer.__dict__.items() if name not in made.__dict__ and _is_data(value)}
    made.__dict__.update(copy.deepcopy(data))
    made.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the real one
    forget_step_hooks(made)
    made.__dict__["param_groups"] = groups or [dict(group) for group in optimizer.param_groups]
    made.__dict__["state"] = defaultdict(dict)
    return made


def _is_data(value: Any) -> bool:
    """True for numbers, texts, functions, and lists or tables of them: what is changed in a copy changes nothing else."""
    if isinstance(value, dict):
        return all(_is_data(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_data, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | FunctionType)


def _tensors(value: Any) -> Iterator[Any]:
    """Tensors in what a module gives."""
    import torch

    if type(value) is torch.Tensor:
        if not is_functorch(value):  # inside torch.func: it has no storage
            yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
