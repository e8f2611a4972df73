"""Runs a step or an inference on a device that the model does not fit on.

In: the user's model, loss and optimizer in host memory (or weights in a file) and a `HostedChoice`. Out: the loss and
updated weights, or the model's output. The model is changed only while a step runs. The same code runs on tensors
without contents, which is how a choice is projected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.head import chunked_heads
from outsize.model.fitting.hosted.again import run_again
from outsize.model.fitting.hosted.choice import HostedChoice
from outsize.model.fitting.hosted.keeping import Keeper
from outsize.model.fitting.hosted.lanes import Lane
from outsize.model.fitting.hosted.slabs import State, Weights
from outsize.model.fitting.hosted.units import Cut
from outsize.model.fitting.hosted.update import Dropped, Kept, OnCard, OnHost, Sink
from outsize.model.fitting.hosted.visits import Source, Visits
from outsize.model.fitting.runner import Phase, Work, join, read_loss, without_cache


class HostedRunner:
    """A hosted choice bound to a model."""

    def __init__(
        self, work: Work, choice: HostedChoice, cut: Cut, lane: Lane, source: Source, order: list[str], *,
        weights: Weights | None = None, state: State | None = None, rows: int = 0,
    ) -> None:  # fmt: skip
        self.work = work
        self.choice = choice
        self.lane = lane
        self.real = lane.real
        self.weights = weights
        self.state = state
        self.phase: Phase = lambda name: None
        self.visits = Visits(work.model, cut, source, lane, choice.ring, order)
        self.keeper = Keeper(lane) if choice.inputs else None
        self._rows = -(-rows // choice.slices) if rows else 0
        self.sink = self._open_sink(cut)
        self.visits.before_finish = self.sink.flush
        self._source = source
        self._heads: Any = None

    @property
    def heads_taken(self) -> bool:
        """True where head and loss ran in pieces and nobody looked at the logits."""
        return self._heads is not None and bool(self._heads.taken) and not self._heads.made

    def _open_sink(self, cut: Cut) -> Sink:
        choice, optimizer = self.choice, self.work.optimizer
        if choice.update == "card":
            assert self.state is not None
            return OnCard(optimizer, self.visits, self.weights, self.state, self.lane, choice.state, self.real)
        if choice.update == "host" and self.real:
            return OnHost(optimizer, self.lane, choice.state)
        if choice.update == "kept":
            return Kept(cut, self.lane)
        return Dropped()

    # what a `Fitted` asks

    @property
    def half_updated(self) -> bool:
        """True where some parameters are updated and others are not."""
        return self.sink.changed

    def step(self, batch: Any) -> Any:
        """Gradients and update; the loss of the batch, detached."""
        optimizer = self.work.optimizer
        optimizer.zero_grad(set_to_none=True)
        if self.state is not None and self.real:
            self.state.move_in(optimizer)
        loss, scale = self._passes(batch)
        self.phase("optimizer")
        if isinstance(self.sink, Kept):
            self._update_kept(self.sink, scale)
        self.sink.end()
        self.phase("done")
        return loss

    def _update_kept(self, sink: Kept, scale: float | None) -> None:
        import torch

        optimizer = self.work.optimizer
        if not self.real:
            return

        def give(parameter: Any, gradient: Any) -> None:
            parameter.grad = gradient if scale is None else gradient.mul_(scale)

        sink.hand_over(give)
        if self.work.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.work.model.parameters()), self.work.clip)
        sink.changed = True
        optimizer.step()
        sink.changed = False
        optimizer.zero_grad(set_to_none=True)

    def backward(self, batch: Any) -> Any:
        """Gradients only, added to those that are there, in host memory."""
        if not isinstance(self.sink, Kept):
            raise InputError("this plan updates parameters itself: call step(batch), or fit with own_step=True")
        loss, scale = self._passes(batch)

        def give(parameter: Any, gradient: Any) -> None:
            gradient = gradient if scale is None else gradient * scale
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)

        self.sink.hand_over(give)
        self.phase("done")
        return loss

    def infer(self, batch: Any, call: Callable[[Any, Any], Any]) -> Any:
        """`call(model, slice)` without gradients, slice by slice, joined along the first axis."""
        import torch

        outs = []
        with torch.no_grad(), self._applied():
            for start, stop in self._runs(batches.count_rows(batch)):
                self.phase("forward")
                outs.append(call(self.work.model, self.place(batches.take(batch, start, stop))))
                self.visits.end_pass()
        self.phase("done")
        return outs[0] if len(outs) == 1 else join(outs)

    def rehearse(self, batch: Any) -> None:
        """A step that changes nothing: everything is computed, the update too, and nothing goes back."""
        sink = self.sink
        if isinstance(sink, OnCard | OnHost):
            sink.rehearsing = True
        try:
            self._passes(batch)
            self.phase("optimizer")
            sink.flush()
            sink.end() if not isinstance(sink, Kept) else sink.reset()
        finally:
            if isinstance(sink, OnCard | OnHost):
                sink.rehearsing = False

    def roll_back(self) -> None:
        """A step has failed: nothing of it stays."""
        self.lane.drain()
        self.visits.reset()
        self.sink.reset()
        if self.keeper is not None:
            self.keeper.end_pass()
        for proxy in self.visits.proxies.values():
            proxy.grad = None

    def gather(self) -> None:
        """The user's own parameters never left the host."""
        self.lane.drain()

    def close(self) -> None:
        """Everything is the user's own again, in ordinary memory."""
        self.lane.drain()
        self.sink.close()
        for thing in (self.weights, self.state, self.keeper, self._source):
            close = getattr(thing, "close", None)
            if close is not None:
                close()

    # passes

    def place(self, batch: Any) -> Any:
        """The batch on the device."""
        if not self.real:
            return batch
        return batches.transform(batch, lambda _, tensor: tensor.to(self.lane.device, non_blocking=True))

    def _runs(self, rows: int) -> list[tuple[int, int]]:
        slices = self.choice.slices
        if self._rows and self.choice.update not in ("card", "host"):
            slices = -(-rows // self._rows)
        return batches.cut(rows, slices)

    def _passes(self, batch: Any) -> tuple[Any, Any]:
        """Forward and backward of every slice: the loss, and the factor that gradients still need."""
        work = self.work
        rows = batches.count_rows(batch)
        runs = self._runs(rows)
        whole = work.normaliser.measure(batch)
        total = count = None
        with self._applied(), self._listening():
            for start, stop in runs:
                part = self.place(batch if len(runs) == 1 else batches.take(batch, start, stop))
                self.phase("forward")
                loss, counted = read_loss(work.loss(work.model, part))
                if counted is None:
                    weight = work.normaliser.weigh(part, stop - start, rows, whole) if len(runs) > 1 else 1.0
                    if weight == 0.0:
                        self._end_pass()
                        continue
                    loss = loss if weight == 1.0 else loss * weight
                elif len(runs) == 1:
                    loss, counted = loss / counted, None
                shown = loss.detach()
                total = shown if total is None else total + shown
                if counted is not None:
                    count = counted if count is None else count + counted
                self.phase("backward")
                self.sink.begin()
                loss.backward()
                del loss, part, shown
                self._end_pass()
        if count is None:
            return total, None
        return total / count, 1.0 / float(count)

    def _end_pass(self) -> None:
        self.visits.end_pass()
        if self.keeper is not None:
            self.keeper.end_pass()

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        """Proxies in place of parameters, and forward functions that bring them."""
        visits, choice = self.visits, self.choice
        keep = self.keeper.keep if self.keeper is not None else None
        changed: list[tuple[Any, Any]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(visits.standing_in())
            if choice.update != "none":
                stack.enter_context(without_cache(self.work.model))
            if choice.chunks:
                work, kind = self.work, self.lane.device.type
                self._heads = stack.enter_context(chunked_heads(work.model, work.heads, choice.chunks, kind))
            for unit in visits.cut.units.values():
                module = unit.module
                forward = module.forward
                changed.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = run_again(
                    module, visits.wrap(unit, forward), visits.hold(unit, forward), self.work.written,
                    self.lane.device, self.real, keep,
                )  # fmt: skip
            try:
                yield
            finally:
                for module, before in changed:
                    if before is None:
                        module.__dict__.pop("forward", None)
                    else:
                        module.__dict__["forward"] = before

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear of every gradient that is complete."""
        handles = []
        for place in self.visits.cut.places():
            parameter = place.parameter
            if parameter.requires_grad:
                proxy = self.visits.proxies[id(parameter)]
                handles.append(proxy.register_post_accumulate_grad_hook(self._hear(parameter)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hear(self, parameter: Any) -> Callable[[Any], None]:
        def hear(proxy: Any) -> None:
            self.sink.accumulated(parameter, proxy)

        return hear
