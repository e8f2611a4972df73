"""Runs one step as a choice says: slices, forward and backward passes, the update.

In: the user's model, loss and optimizer, a `Choice`, a batch. Out: the loss, and gradients or updated weights. The
model is changed only while a step runs (a few `forward` attributes), so between steps it is the user's own: copies,
hooks, names and saved files are as without us. The same code runs on tensors without contents, which is how a choice
is projected.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.learn.normaliser import Normaliser
from outsize.model.fitting.move.evicted import Parcels
from outsize.model.fitting.move.stores import Store
from outsize.model.fitting.move.streamed import Streamer
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.run.chunked_loss import chunked_heads
from outsize.model.fitting.run.interrupts import Interrupts
from outsize.model.fitting.run.join_outputs import join
from outsize.model.fitting.run.optimizer_step import Update, state_of
from outsize.model.fitting.run.saved_activations import Offload, checkpointed
from outsize.model.fitting.run.second_run import generators_of
from outsize.model.fitting.run.sequential_runs import in_spans, is_span, owner_of
from outsize.model.torch_port.objects import storage_key

Phase = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Work:
    """What the user gave, as the runner needs it."""

    model: Any
    """The module."""
    loss: Callable[[Any, Any], Any]
    """loss(model, batch) -> scalar, or (total, count)."""
    optimizer: Any
    """The optimizer, None for inference."""
    clip: float | None = None
    """Largest norm of the gradients, None: not clipped."""
    scaler: Any = None
    """The user's GradScaler, None: none."""
    written: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    """Buffers that a forward pass writes, by module."""
    normaliser: Normaliser = field(default_factory=Normaliser)
    """How losses of slices become the loss of the batch."""
    splits: bool = True
    """The loss of a batch is known from those of its slices."""
    device: str = "cpu"
    """Kind of device the model is on."""
    heads: tuple[str, ...] = ()
    """Linear layers whose logits go straight into a cross entropy."""
    sources: tuple[Any, ...] = ()
    """Generators beside torch's that a step draws random numbers from."""


class Runner:
    """A choice bound to a model."""

    def __init__(
        self,
        work: Work,
        choice: Choice,
        store: Store,
        *,
        real: bool = True,
        rows: int = 0,
        parcels: Parcels | None = None,
    ) -> None:
        self.work = work
        self.choice = choice
        self.store = store
        self.real = real
        self.phase: Phase = lambda name: None
        self.interrupts = Interrupts()
        self.parcels = Parcels(store, real) if parcels is None else parcels
        self._rows = rows
        """Samples of the batch that was planned for; 0: unknown."""
        modules = dict(work.model.named_modules())
        units = {name: modules[name] for name in choice.stream}
        ahead = work.device == "cuda"
        self.streamer = Streamer(units, self.parcels, ahead) if units else None
        self.update = None
        if work.optimizer is not None:
            self.update = Update(work.optimizer, choice, self.parcels, work.clip, work.scaler)
            self.update.bind(self.streamer.ids if self.streamer else set(), work.model)
        self._stepping = False
        """A step has begun and is not done."""
        self._modules = modules
        self._configs = find_configs(work.model)
        self._generators = [*generators_of(next(work.model.parameters()).device), *work.sources] if real else []

    # a step

    def step(self, batch: Any) -> Any:
        """Gradients and update; the loss of the batch, detached."""
        assert self.update is not None
        self._stepping = True
        self.update.forget()
        self.work.optimizer.zero_grad(set_to_none=True)
        if self.real and self.choice.state_away:
            own_memory(self.work.optimizer)
        if self.parcels.loaded:
            self.forget_replaced()
        self.update.send_state()
        loss, scale = self._passes(batch)
        self.phase("optimizer")
        with self.interrupts.held():
            self.update.finish(scale)
            self.work.optimizer.zero_grad(set_to_none=True)
            self.update.commit()
        self._stepping = False
        self.phase("done")
        return loss

    @property
    def half_updated(self) -> bool:
        """True where the update has changed some parameters and could not go on."""
        return self.update is not None and self.update.begun

    def roll_back(self) -> None:
        """A step has failed: weights and state are what they were before it, its gradients are gone.

        Where something else has failed, gradients are the user's.
        """
        if self._stepping and self.update is not None:
            self.update.roll_back()
            self.work.optimizer.zero_grad(set_to_none=True)
        self._stepping = False

    def backward(self, batch: Any) -> Any:
        """Gradients only, added to those that are there."""
        parameters = list(self.work.model.parameters())
        kept = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in kept:  # a failure must not leave half a sum in them, and a count must not scale them
            parameter.grad = None
        try:
            loss, scale = self._passes(batch)
        except BaseException:
            for parameter in parameters:
                parameter.grad = None
            for parameter, before in kept:
                parameter.grad = before
            raise
        if scale is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for parameter, before in kept:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self.phase("done")
        return loss

    def infer(self, batch: Any, call: Callable[[Any, Any], Any]) -> Any:
        """`call(model, slice)` without gradients, slice by slice, joined along the first axis."""
        import torch

        outs = []
        runs = self._runs(batches.count_rows(batch))
        with torch.no_grad(), self._applied():
            for start, stop in runs:
                self.phase("forward")
                outs.append(call(self.work.model, batches.take(batch, start, stop)))
        self.phase("done")
        return outs[0] if len(outs) == 1 else join(outs, [stop - start for start, stop in runs])

    def _passes(self, batch: Any) -> tuple[Any, float | None]:
        """Forward and backward of every slice: the loss, and the factor the gradients still need."""
        import torch

        work = self.work
        rows = batches.count_rows(batch)
        runs = self._runs(rows)
        weights = work.normaliser.weigh(batch, runs) if self.real and len(runs) > 1 else [1.0 / len(runs)] * len(runs)
        if not self.real:  # the first slice makes gradients, the second adds to them, the rest is like the second
            runs = runs[:2]
        total = count = None
        with self._applied(), self._listening():
            for (start, stop), weight in zip(runs, weights, strict=False):
                part = batch if stop - start == rows else batches.take(batch, start, stop)
                self.phase("forward")
                with self._autocast():
                    loss, counted = read_loss(work.loss(work.model, part))
                if counted is None:
                    if weight == 0.0 and any(weights):  # no label counts in this slice: its mean is no number
                        continue
                    weight = weight or 1.0  # nor in the batch: no number either, and gradients of zero
                    loss = loss if weight == 1.0 else loss * weight
                elif stop - start == rows:
                    loss, counted = loss / counted, None
                shown = loss.detach()
                total = shown if total is None else total + shown
                if counted is not None:
                    count = counted if count is None else count + counted
                if work.scaler is not None:
                    loss = work.scaler.scale(loss)
                self.phase("backward")
                self.store.land()  # what waits for the backward pass need not be here twice
                loss.backward()
                del loss, part, shown
                if self.streamer is not None:
                    self.streamer.leave()
        if count is None:
            return total, None
        count = count.detach() if isinstance(count, torch.Tensor) else count
        nothing = not isinstance(count, torch.Tensor) and not count  # Python would not divide by it
        return total / count, math.inf if nothing else 1.0 / count

    def _runs(self, rows: int) -> list[tuple[int, int]]:
        """The batch in slices no larger than planned; one of another size than that in equal ones."""
        choice = self.choice
        if self._rows in (0, rows):
            return batches.cut(rows, choice.slices, choice.first)
        if choice.slices == 1 and (choice.in_backward or not self.work.splits):
            return [(0, rows)]
        start, stop = batches.cut(self._rows, choice.slices, choice.first)[1 if choice.first else 0]
        return batches.cut(rows, -(-rows // (stop - start)))

    # what is changed while it runs

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        """The choice's forward functions in place of the modules' own."""
        choice, work = self.choice, self.work
        offload = Offload(self.store, ahead=work.device == "cuda", device=work.device)
        fixed = (*work.model.parameters(), *work.model.buffers()) if choice.offload else ()
        stays = {storage_key(tensor) for tensor in fixed}
        names = [*choice.checkpoint, *choice.offload, *(n for n in choice.stream if n not in choice.checkpoint)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_cache(work.model, self._configs))
            if choice.chunks:
                pieces = -(-choice.chunks // choice.slices)
                stack.enter_context(chunked_heads(work.model, work.heads, pieces, work.device))
            put = stack.enter_context(other_forwards())  # last in, first out: what it covers is put back under it
            for name in dict.fromkeys(name for name in names if not is_span(name)):
                module = self._modules[name]
                forward = module.forward
                streamed = self.streamer is not None and name in choice.stream
                if streamed:
                    assert self.streamer is not None
                    forward = self.streamer.hold(name, forward)
                if name in choice.checkpoint:
                    forward = checkpointed(module, forward, work.written, work.device, self._generators)
                if name in choice.offload:  # of a module that is computed again, its input
                    forward = offload.wrap(forward, stays)
                if streamed:
                    assert self.streamer is not None
                    forward = self.streamer.wrap(name, forward)
                put(module, forward)
            for sequence, spans in itertools.groupby(
                sorted(filter(is_span, choice.checkpoint), key=owner_of), owner_of
            ):
                module = self._modules[sequence]
                put(
                    module,
                    in_spans(
                        module, spans, lambda h, f: checkpointed(h, f, work.written, work.device, self._generators)
                    ),
                )
            stack.enter_context(self.parcels.working())
            try:
                if self.streamer is not None:
                    self.streamer.leave()
                yield
            finally:
                self.store.finish()  # before anything that a copy still reads or fills is let go
                if self.streamer is not None:
                    self.streamer.leave()
                self.store.land()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear of every gradient that is complete, where the choice wants to know."""
        choice = self.choice
        handles = []
        if self.update is not None and (choice.in_backward or choice.gradients_away or choice.stream):
            for parameter in self.work.model.parameters():
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _accumulated(self, parameter: Any) -> None:
        assert self.update is not None
        self.update.accumulated(parameter)
        if self.streamer is not None and not self.update.waits(parameter):
            self.streamer.accumulated(parameter)

    def _autocast(self) -> Any:
        import torch

        if not self.choice.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.work.device, dtype=torch.bfloat16)

    def settle(self) -> None:
        """Take over from another choice: what this one wants at home comes home."""
        streamed = self.streamer.ids if self.streamer is not None else set()
        state = {id(tensor) for tensor in self.update.state_away()} if self.update is not None else set()
        self.parcels.settle(lambda tensor: id(tensor) in streamed or id(tensor) in state, "another plan")

    def bring_weights(self) -> None:
        """Weights home; the optimizer's state stays where it is."""
        weights = {id(parameter) for parameter in self.work.model.parameters()}
        self.parcels.settle(lambda tensor: id(tensor) not in weights, "a comparison with the plain step")

    def forget_replaced(self) -> None:
        """State that is no longer the optimizer's need not be kept, unless the user holds it."""
        state = [] if self.work.optimizer is None else state_of(self.work.optimizer)
        self.parcels.prune({id(tensor) for tensor in (*self.work.model.parameters(), *state)})

    def gather(self) -> None:
        """Everything home, as without us."""
        self.parcels.gather()


def own_memory(optimizer: Any) -> None:
    """State that was loaded from a file lies in memory that torch cannot let go of: it gets some of its own, one by one."""
    import torch

    for value in state_of(optimizer):
        if isinstance(value, torch.Tensor) and value.dim() and not value.untyped_storage().resizable():
            value.data = value.detach().clone()


@contextlib.contextmanager
def other_forwards() -> Iterator[Callable[[Any, Callable[..., Any]], None]]:
    """Gives put(module, forward): the module runs that until the end of the block, then its own again."""
    changed: list[tuple[Any, Any]] = []

    def put(module: Any, forward: Callable[..., Any]) -> None:
        changed.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    try:
        yield put
    finally:
        for module, before in changed:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


def find_configs(model: Any) -> list[Any]:
    """Transformers' settings of a model and its parts."""
    found = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    return list(found.values())


@contextlib.contextmanager
def without_cache(model: Any, configs: list[Any] | None = None) -> Iterator[None]:
    """A training step of a transformers model keeps no keys and values for generation: a second run would add them again."""
    configs = find_configs(model) if configs is None else configs
    off = [c for c in configs if model.training and getattr(c, "use_cache", None) is True]
    for config in off:
        config.use_cache = False
    try:
        yield
    finally:
        for config in off:
            config.use_cache = True


def read_loss(value: Any) -> tuple[Any, Any]:
    """(loss, None) for a scalar, (total, count) for a pair; an `InputError` for anything else."""
    import torch

    pair = isinstance(value, tuple) and len(value) == 2
    loss, count = value if pair else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (pair and not _is_number(count)):
        raise InputError(
            f"loss(model, batch) gave {_describe(value)}: it must give a scalar tensor, or a pair (total, count) whose quotient "
            "is the loss"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(
            "loss(model, batch) gave a number that has no gradient: it was detached, made under no_grad, or depends on no "
            "parameter that is trained"
        )
    return loss.reshape(()), count


def _is_number(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1)
    return isinstance(value, int | float)


def _describe(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__
