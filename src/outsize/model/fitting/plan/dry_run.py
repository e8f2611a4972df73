"""A model, an optimizer and a batch without contents, on which a fitted step runs to show what it would hold.

In: the user's work and a choice. Out: a `Projection`. The runner that the choice asks for is the one that runs the real step. The
user's own module objects run: those of a model on its device with tensors without contents in the place of their parameters
for that time, those of a model on the host with the proxies that they visit with. Every attribute is put back.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from outsize.core.errors import OutsizeError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.mover import NoMover
from outsize.model.fitting.move.out_of_memory import is_out_of_memory
from outsize.model.fitting.move.pinned_blocks import Layout, Shape, State, state_bytes
from outsize.model.fitting.move.ring import aligned
from outsize.model.fitting.move.stores import IN_FLIGHT, NoStore, Store
from outsize.model.fitting.move.units import Cut, cut_model
from outsize.model.fitting.move.visits import Source, Visits
from outsize.model.fitting.plan.foreign_tensors import NOTHING, Beside, look_beside
from outsize.model.fitting.plan.projection import Projection, Watch, label_of, projection_of
from outsize.model.fitting.recipes.survey import Survey
from outsize.model.fitting.run.hosted import open_hosted
from outsize.model.fitting.run.random_sources import GLOBAL, same_draws
from outsize.model.fitting.run.recorder import watching
from outsize.model.fitting.run.resident import ResidentRunner, open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.optimizer_subset import copy_all, state_of
from outsize.model.fitting.update.undo_log import written_buffers
from outsize.model.torch_port.dispatch import torch_off
from outsize.model.torch_port.objects import (
    buffer_table,
    flat_weights,
    forget_step_hooks,
    hooked,
    parameter_table,
    set_flat_weights,
    sizeof,
    storage_key,
)
from outsize.model.torch_port.sharding import is_spread, local_part, spread_like
from outsize.model.tracing.rules.known_values import KEEP_ELEMENTS
from outsize.model.tracing.tracer import Tracer

NUMBERS = 64
"""Bytes of host memory in which operators keep the Python numbers that they are given."""

NEVER = 2**31 - 1
"""So many collections of what is younger before Python's collector looks at all there is."""

Call = Callable[[Any, Any], Any]
"""How an inference calls the model."""


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
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.parameter:
            return torch.nn.Parameter(made, requires_grad=self.grad)
        return made.requires_grad_(self.grad)


@contextlib.contextmanager
def collecting_little() -> Iterator[None]:
    """Python's collector looks at what the block makes, not again and again at all that the process has loaded."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)  # `gc.freeze` would do, but to learn whether others use it takes up to 0.1 s
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class Stage:
    """Projects choices for one model and one batch."""

    def __init__(self, work: Work, batch: Any, *, device: Any = None, beside: Beside | None = None) -> None:
        """`device`: where a model that lives on the host is to visit, `beside`: what is there already."""
        self.work = work
        hosted, model = device is not None, work.model
        home = next(model.parameters()).device
        self.label = label_of(device.type, device) if hosted else label_of(work.device, home)
        self.batch = batches.transform(batch, lambda _, tensor: Outline.of(tensor, known=not hosted))
        """The batch, with outlines for tensors."""
        self._outlines: dict[int, tuple[Any, Outline]] = {}
        if not hosted:  # a model on the host has proxies for its parameters, and keeps its buffers
            buffers = {id(b): (b, Outline.of(b, known=not b.dtype.is_floating_point)) for b in model.buffers()}
            self._outlines = buffers | {id(p): (p, Outline.of(p)) for p in model.parameters()}
        if beside is None:
            beside = NOTHING if hosted else look_beside(home, _own(work, batch))
        self._beside = beside
        self._reads = False
        """A step fails unless it can read what the batch holds: labels that are looked up or checked."""
        self._weighed = False
        """Chosen values were compared with those of the batch."""
        self.surveyed: Survey | None = None
        """The calls of the plain step."""
        self._surveying: Survey | None = None
        """The survey of the trace that runs."""
        self._known: dict[Choice, Projection] = {}
        """Of a model on its device: what was projected before."""
        self._begun = False
        """The optimizer makes state as it is made itself, and finds it in its first step: Adagrad before torch 2.13."""

    @property
    def reads(self) -> bool:
        """Values of the batch steer the step, so that traces read them."""
        return self._reads

    def take_over(self, reads: bool) -> None:
        """Whether they do is known from traces of the same step before."""
        self._reads, self._weighed = reads, True

    def with_rows(self, rows: int) -> Stage:
        """The same work with a batch of so many samples, each like those of this one."""

        def grow(path: str, outline: Outline) -> Outline:
            axis = self.work.axes.at.get(path, 0)
            if not outline.shape or not isinstance(axis, int):
                return outline
            return replace(outline, shape=(*outline.shape[:axis], rows, *outline.shape[axis + 1 :]), contents=None)

        other = copy.copy(self)
        other._known = {}
        other.batch = batches.transform(self.batch, grow, leaf=Outline)
        return other

    def project(
        self, choice: Choice, *, call: Call | None = None, work: Work | None = None, layout: Layout | None = None,
        order: Iterable[str] = (), survey: bool = False,
    ) -> Projection:  # fmt: skip
        """Run a step (or, with `call`, an inference) without contents: other batches than this one hold at most as much.

        Where that fails on a model on its device, values of the batch steer the step: then it reads those of this batch.
        Of a model on the host `work` is what is known of it by now, `layout` its state and `order` that of its units.
        `survey`: note every call of its first forward pass in `surveyed`.
        """
        if choice.hosted or call is not None or survey:
            return self._project(choice, call, work, layout or {}, list(order), survey)
        if choice not in self._known:
            read = self._reads
            found = self._project(choice, None, None, {}, [], survey=False)
            if read != self._reads:  # what was chosen for the values that steer the step may have held less
                self._known.clear()
            self._known[choice] = found
        return self._known[choice]

    def _project(
        self, choice: Choice, call: Call | None, work: Work | None, layout: Layout, order: list[str], survey: bool
    ) -> Projection:
        """One trace, or two."""
        guessed: list[str] = []

        def trace(reads: bool) -> Projection:
            watch = Watch(self.label, self.work.model)
            with same_draws(), watch.running():
                fakes = {key: outline.known_to(watch, self.label) for key, (_, outline) in self._outlines.items()}

                def enter(path: str, outline: Outline) -> Any:
                    known = reads or not outline.shape or self.work.axes.at.get(path) == "ends"
                    return outline.known_to(watch, self.label) if known else outline.make(self.label)

                batch = batches.transform(self.batch, enter, leaf=Outline)
                present = sum(held.bytes for held in watch.ledger.live.values() if held.label == self.label)
                if choice.hosted:
                    found, alive = self._run_hosted(watch, choice, batch, call, work or self.work, layout, order)
                else:
                    self._surveying = Survey(self.work.model, lambda: watch.spent) if survey else None
                    self.surveyed = self._surveying or self.surveyed
                    found, alive = self._run_resident(watch, choice, batch, call, fakes)
            beside = self._beside.without(watch.met())
            guessed.extend((*watch.notes, *watch.guesses))
            projection = projection_of(watch, self.label, present=present, beside=beside, **found)
            del alive  # not before: what it holds would look as if the step had let it go
            return projection

        def weigh(chosen: Projection) -> Projection:
            """The first projection: where values were chosen that steer the step, those of this batch may ask for more."""
            self._weighed = True
            if not guessed:
                return chosen
            with contextlib.suppress(Exception):  # what cannot read its batch keeps to the values that were chosen
                projection = trace(reads=True)
                self._reads = projection.peak > chosen.peak
                return projection if self._reads else chosen
            return chosen

        with collecting_little():
            if not self._reads:
                try:
                    projection = trace(reads=False)
                    return projection if self._weighed or choice.hosted else weigh(projection)
                except Exception as error:
                    if choice.hosted or isinstance(error, OutsizeError) or is_out_of_memory(error):
                        raise
            projection = trace(reads=True)
            self._reads = True
            return projection

    # a model on its device

    def _run_resident(
        self, watch: Watch, choice: Choice, batch: Any, call: Call | None, fakes: dict[int, Any]
    ) -> tuple[dict[str, Any], Any]:
        """The step on fakes. Out: what it shows beside storages, and what still holds some."""
        store = NoStore(0 if self.label == "cpu" else IN_FLIGHT)
        optimizer = None if self.work.optimizer is None or call else self._optimizer(fakes, self.label)
        with self._swapped(fakes) as model:
            watch.begin(model)
            if self.work.compiled:
                watch.compiled.follow(model)
            runner = self._open(replace(self.work, optimizer=optimizer, scaler=None), choice, store)
            runner.phase = watch.phase
            runner.weights.survey, runner.weights.placing = self._surveying, watch.placing_of
            runner.sink.safe &= self.work.scaler is None
            # to go back
            before = [*copy_all(written_buffers(self.work.written)), torch.empty(self._numbers(), dtype=torch.uint8)]
            if call is not None:
                runner.infer(batch, call)
            elif self.work.backwards:
                runner.users_step(batch)
            else:
                runner.step(batch) if optimizer is not None else runner.backward(batch)
        state = sum(sizeof(local_part(tensor)) for tensor in _state(optimizer))
        return {"away": store.peak, "state": state, "taken_apart": call is None}, (runner, optimizer, before)

    def _open(self, work: Work, choice: Choice, store: Store) -> ResidentRunner:
        """The runner that the real step has."""
        return open_resident(work, choice, store, real=False)

    def _numbers(self) -> int:
        """Bytes of host memory that a step takes for numbers."""
        return NUMBERS

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

    # a model on the host

    def _run_hosted(
        self, watch: Watch, choice: Choice, batch: Any, call: Call | None, work: Work, layout: Layout, order: list[str]
    ) -> tuple[dict[str, Any], Any]:
        """One step, in which optimizer state is made: later ones find it and hold less. Out: as of the one on fakes."""
        optimizer = self._stateless_optimizer(layout)
        work = replace(work, optimizer=optimizer, scaler=None)
        cut = cut_model(work.model, choice.unit_bytes, choice.held, order)
        watch.begin(work.model)
        mover = NoMover(torch.device(self.label))
        runner = open_hosted(work, choice, cut, mover, Source(), order, state=State(cut, layout))
        runner.phase = watch.phase
        weights = runner.weights
        met: dict[str, None] = {}
        with watching(weights.visits) as seen, _meeting(cut, met):
            if call is not None:
                runner.infer(batch, call)
            elif optimizer is None or choice.update in ("kept", "none"):
                runner.rehearse(batch)
            else:
                runner.step(batch)
        visiting = 0
        if choice.state_ring and choice.update != "host":
            visiting = sum(state_bytes(shapes) for shapes in layout.values())
            visiting += 2 * cut.weights if choice.update == "kept" else 0
        sources = seen.drawn.sources()
        random = (*seen.random, *(source.name for source in sources if source in GLOBAL))
        names = {id(place.parameter): place.name for place in cut.places()}
        found = {
            "away": weights.kept_inputs.store.peak if weights.kept_inputs is not None else 0, "state": 0, "taken_apart": False,
            "brought": weights.visits.brought + visiting, "order": tuple(met), "random": tuple(dict.fromkeys(random)),
            "outside": tuple(names[key] for key in seen.outside), "sources": sources,
            "written": _written(work.model, weights.visits), "heads_taken": weights.heads_taken,
        }  # fmt: skip
        runner.roll_back()
        return found, (runner, optimizer)

    def layout(self) -> Layout:
        """Which state the user's optimizer keeps for each parameter, found by one step on tensors without contents."""
        if self.work.optimizer is None:
            return {}
        watch = Watch(self.label, self.work.model)
        with watch.running():
            pairs = []
            copied = copy_optimizer(self.work.optimizer)
            for group in copied.param_groups:
                fakes = []
                for parameter in group["params"]:
                    fake = Outline.of(parameter).make(self.label)
                    if parameter.requires_grad:
                        fake.grad = torch.empty_like(fake)
                    pairs.append((parameter, fake))
                    fakes.append(fake)
                group["params"] = fakes
            try:
                copied.step()
            except KeyError:
                self._begun = True
                bring_state(self.work.optimizer, copied, {id(parameter): fake for parameter, fake in pairs}, self.label)
                copied.step()
            return {id(parameter): self._shapes_of(copied.state.get(fake, {}), watch) for parameter, fake in pairs}

    def _stateless_optimizer(self, layout: Layout) -> Any:
        """The user's optimizer without state, or with what it cannot do without: what travels is elsewhere."""
        real = self.work.optimizer
        if real is None:
            return None
        copied = copy_optimizer(real)
        for parameter, values in real.state.items() if self._begun else ():
            travels = {shape.name for shape in layout.get(id(parameter), [])}
            copied.state[parameter] = {n: None if n in travels else copy.deepcopy(v) for n, v in values.items()}
        return copied

    def _shapes_of(self, state: dict[str, Any], watch: Watch) -> list[Shape]:
        """State that travels: what is as large as a parameter, and what the optimizer itself put on the device."""
        shapes: list[Shape] = []
        at = 0
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.dim() or watch.on_card(value)):
                shapes.append(Shape(name, tuple(value.shape), value.dtype, at))
                at += aligned(shapes[-1].size)
        return shapes


def _state(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return [value for value in state_of(optimizer) if isinstance(value, torch.Tensor) and value.dim()]


def _own(work: Work, batch: Any) -> list[Any]:
    weights = list(work.model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [*weights, *work.model.buffers(), *gradients, *_state(work.optimizer), *batches.tensors_of(batch).values()]


def bring_state(real: Any, fake: Any, fakes: Mapping[int, Any], label: str) -> None:
    """Give an optimizer over fakes the state that the real one has; some have it from the beginning and make none later."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        local = local_part(value)
        if not value.dim():
            return local.detach().clone()
        if not is_spread(value):
            return Outline.of(value).make(label)
        here = label if local.device.type == label.partition(":")[0] else "cpu"
        return spread_like(value, torch.empty(local.shape, dtype=value.dtype, device=here))

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


def _written(model: Any, visits: Visits) -> dict[Any, tuple[str, ...]]:
    found = {}
    for module in model.modules():
        names = tuple(n for n, b in buffer_table(module).items() if b is not None and id(b) in visits.written)
        if names:
            found[module] = names
    return found


def _meeting(cut: Cut, met: dict[str, None]) -> contextlib.AbstractContextManager[None]:
    return hooked(*(
        unit.module.register_forward_pre_hook(lambda module, args, name=name: met.setdefault(name))
        for name, unit in cut.units.items()
    ))  # fmt: skip
