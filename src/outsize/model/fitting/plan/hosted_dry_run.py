"""A hosted step on tensors without contents: what it would hold on the device, in which order units run.

In: the user's work, a batch, a `Choice`. Out: a `Projection`: the peak of each phase on the device, bytes that wait on
the host, bytes over the link, the order of units, and the parameters that are used outside of their units, which have to
stay. The runner is the one that runs the real step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.mover import NoMover
from outsize.model.fitting.move.pinned_blocks import Layout, Shape, State, state_bytes
from outsize.model.fitting.move.ring import aligned
from outsize.model.fitting.move.units import cut_model
from outsize.model.fitting.move.visits import Source, Visits
from outsize.model.fitting.plan.dry_run import Outline, Watch, bring_state, copy_optimizer, label_of, projection_of
from outsize.model.fitting.plan.foreign_tensors import NOTHING, Beside
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.run.hosted import open_hosted
from outsize.model.fitting.run.random_sources import GLOBAL, Drawn, same_draws
from outsize.model.fitting.run.recorder import Recorder
from outsize.model.fitting.run.runner import Work
from outsize.model.torch_port.dispatch import dispatch_mode, leaves_of
from outsize.model.torch_port.objects import buffer_table, storage_key


class HostedStage:
    """Projects hosted choices for one model and one batch."""

    def __init__(self, work: Work, batch: Any, device: Any, beside: Beside = NOTHING) -> None:
        self.work, self._beside = work, beside
        self.label = label_of(device.type, device)
        self.batch = batches.transform(batch, lambda _, tensor: Outline.of(tensor))
        self._begun = False
        """The optimizer makes state as it is made itself, and finds it in its first step: Adagrad before torch 2.13."""

    def layout(self) -> Layout:
        """Which state the user's optimizer keeps for each parameter, found by one step on tensors without contents."""
        import torch

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
            return {id(parameter): self._shapes(copied.state.get(fake, {}), watch) for parameter, fake in pairs}

    def _optimizer(self, layout: Layout) -> Any:
        """The user's optimizer without state, or with what it cannot do without: what travels is elsewhere."""
        real = self.work.optimizer
        if real is None:
            return None
        copied = copy_optimizer(real)
        for parameter, values in real.state.items() if self._begun else ():
            travels = {shape.name for shape in layout.get(id(parameter), [])}
            copied.state[parameter] = {n: None if n in travels else copy.deepcopy(v) for n, v in values.items()}
        return copied

    def _shapes(self, state: dict[str, Any], watch: Watch) -> list[Shape]:
        """State that travels: what is as large as a parameter, and what the optimizer itself put on the device."""
        import torch

        shapes: list[Shape] = []
        at = 0
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.dim() or watch.on_card(value)):
                shapes.append(Shape(name, tuple(value.shape), value.dtype, at))
                at += aligned(shapes[-1].size)
        return shapes

    def project(
        self, choice: Choice, layout: Layout, order: list[str], written: dict[Any, tuple[str, ...]],
        call: Callable[[Any, Any], Any] | None = None,
    ) -> Projection:  # fmt: skip
        """One step, in which optimizer state is made: later ones find it and hold less; or one inference with `call`."""
        import torch

        watch = Watch(self.label, self.work.model)
        with same_draws(), watch.running():
            batch = batches.transform(self.batch, lambda _, outline: outline.make(self.label), leaf=Outline)
            given = sum(held.bytes for held in watch.ledger.live.values() if held.label == self.label)
            optimizer = self._optimizer(layout)
            work = replace(self.work, optimizer=optimizer, written=written, scaler=None)
            cut = cut_model(work.model, choice.unit_bytes, choice.held, order)
            watch.begin(work.model)
            runner = open_hosted(
                work, choice, cut, NoMover(torch.device(self.label)), Source(), order, state=State(cut, layout)
            )
            runner.phase = watch.phase
            met: list[str] = []
            with watching(runner.weights.visits) as seen, _meeting(cut, met):
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
            seen.random |= dict.fromkeys(source.name for source in sources if source in GLOBAL)
            names = {id(p.parameter): p.name for p in cut.places()}
            away = runner.weights.kept_inputs.held if runner.weights.kept_inputs is not None else 0
            outside = tuple(names[key] for key in seen.outside)
            written = _written(work.model, runner.weights.visits)
            brought = runner.weights.visits.brought + visiting
            heads_taken = runner.weights.heads_taken
            runner.roll_back()
        return projection_of(
            watch, self.label, away=away, state=0, given=given, beside=self._beside.without(watch.met()), taken_apart=False,
            brought=brought, order=tuple(dict.fromkeys(met)), outside=outside, random=tuple(seen.random), sources=sources,
            written=written, heads_taken=heads_taken,
        )  # fmt: skip


def _written(model: Any, visits: Visits) -> dict[Any, tuple[str, ...]]:
    found = {}
    for module in model.modules():
        names = tuple(n for n, b in buffer_table(module).items() if b is not None and id(b) in visits.written)
        if names:
            found[module] = names
    return found


@contextlib.contextmanager
def _meeting(cut: Any, met: list[str]) -> Iterator[None]:
    """Write down the units that run."""
    handles = [
        unit.module.register_forward_pre_hook(lambda module, args, name=name: met.append(name))
        for name, unit in cut.units.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Seen:
    """What a trace shows beside storages."""

    def __init__(self) -> None:
        self.outside: dict[int, None] = {}
        """ids of parameters whose proxies are used while they have no data."""
        self.random: dict[str, None] = {}
        """Operators that draw random numbers."""
        self.drawn = Drawn()
        """Generators beside torch's; those of the user's own are put back in the end."""


@contextlib.contextmanager
def watching(visits: Visits) -> Iterator[Seen]:
    """See what operators are called with while the block runs, on tensors with contents or without."""
    import torch

    seen = Seen()
    keys = {id(proxy): key for key, proxy in visits.proxies.items()}
    blanks = visits.blanks

    class Mode(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if "generator" in kwargs:
                seen.drawn.meet(kwargs["generator"])
            if torch.Tag.nondeterministic_seeded in func.tags and Recorder._draws(func, args, kwargs):
                seen.random.setdefault(func.overloadpacket.__name__)
            if func.namespace == "aten":
                for leaf in leaves_of((args, kwargs)):
                    if id(leaf) in keys and storage_key(leaf) in blanks:
                        seen.outside.setdefault(keys[id(leaf)])
            return func(*args, **kwargs)

    try:
        with Mode():
            yield seen
    finally:
        seen.drawn.put_back()
