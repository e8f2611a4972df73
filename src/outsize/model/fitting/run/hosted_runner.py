"""Runs a step or an inference on a device that the model does not fit on.

In: the user's model, loss and optimizer in host memory (or weights in a file) and a `Choice`. Out: the loss and
updated weights, or the model's output. The model is changed only while a step runs. The same code runs on tensors
without contents, which is how a choice is projected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from outsize.core.errors import InputError, StoreError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.learn.random_sources import GLOBAL
from outsize.model.fitting.move.kept_inputs import Keeper
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import State, Weights
from outsize.model.fitting.move.scratch_file import ScratchFile
from outsize.model.fitting.move.units import Cut
from outsize.model.fitting.move.visits import Source, Visits
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.run.chunked_loss import chunked_heads
from outsize.model.fitting.run.clip_and_scale import Judge
from outsize.model.fitting.run.hosted_optimizer_step import Collected, Dropped, Kept, OnCard, OnHost, Sink
from outsize.model.fitting.run.interrupts import Interrupts
from outsize.model.fitting.run.later_update import Later
from outsize.model.fitting.run.out_of_memory import clear_up
from outsize.model.fitting.run.row_pieces import MixesRows, in_pieces, mixes_rows
from outsize.model.fitting.run.runner import Phase, Work, other_forwards, read_loss, without_cache
from outsize.model.fitting.run.second_run import generators_of
from outsize.model.fitting.run.unit_recompute import run_again


class HostedRunner:
    """A hosted choice bound to a model."""

    def __init__(
        self, work: Work, choice: Choice, cut: Cut, mover: Mover, source: Source, order: list[str], *,
        weights: Weights | None = None, state: State | None = None, rows: int = 0, scratch: ScratchFile | None = None,
    ) -> None:  # fmt: skip
        self.work = work
        self.choice = choice
        self.mover = mover
        self.real = mover.real
        self.weights = weights
        self.state = state
        self.scratch = scratch
        """Where that lies which the host has no room for, None where there is nothing."""
        self.interrupts = Interrupts()
        self.phase: Phase = lambda name: None
        self.visits = Visits(work.model, cut, source, mover, choice.ring, order)
        self.keeper = Keeper(mover) if choice.inputs_away else None
        self._rows = rows
        self._generators = [*generators_of(mover.device), *work.sources] if self.real else [*GLOBAL]
        """What a unit draws again in its second run; a trace, of which others are learned, draws from no other."""
        self.judge: Judge | None = None
        if choice.update == "kept" and self.real:
            self.judge = Judge(work.model, work.optimizer, work.clip, work.scaler)
        self.later: Later | None = None
        """Updates on the device what waits on the host, None where the optimizer steps there."""
        self.sink = self._open_sink(cut)
        self.visits.before_finish = self.sink.flush
        self._source = source
        self._heads: Any = None
        self.rehearsing = False
        self.checked: dict[str, bool] = {}
        """Units that a rehearsal has looked at: do they mix rows?"""
        self.autocast = False
        """The loss runs under autocast."""

    @property
    def heads_taken(self) -> bool:
        """True where head and loss ran in pieces and nobody looked at the logits."""
        return self._heads is not None and bool(self._heads.taken) and not self._heads.made

    def _open_sink(self, cut: Cut) -> Sink:
        choice, optimizer = self.choice, self.work.optimizer
        if choice.update == "card":
            assert self.state is not None
            return OnCard(
                optimizer, self.visits, self.weights, self.state, self.mover, choice.state_ring, choice.small_bytes
            )
        if choice.update == "host" and self.real:
            return OnHost(optimizer, self.mover, choice.state_ring)
        if choice.update == "kept":
            if choice.state_ring and self.state is not None:
                args = (self.weights, self.state, self.mover, choice.state_ring, choice.small_bytes)
                self.later = Later(OnCard(optimizer, self.visits, *args), self.visits, self.weights, self.mover)
            filed = {id(place.parameter) for place in cut.places() if place.name in choice.disk.get("gradients", ())}
            return Kept(cut, self.mover, filed, self.scratch, self.judge)
        return Dropped(self.mover)

    # what a `Fitted` asks

    @property
    def half_updated(self) -> bool:
        """True where some parameters are updated and others are not."""
        return self.sink.changed or (self.later is not None and self.later.update.changed)

    def step(self, batch: Any) -> Any:
        """Gradients and update; the loss of the batch, detached."""
        optimizer = self.work.optimizer
        optimizer.zero_grad(set_to_none=True)
        if self.state is not None and self.real:
            self.state.move_in(optimizer)
        with contextlib.ExitStack() as updating:
            loss = self._pass(batch, updating)
            self.phase("optimizer")
            if isinstance(self.sink, Kept):
                updating.enter_context(self.interrupts.held())
                self._update_kept(self.sink)
            self.sink.end()
            if self.real and (self.later is not None or isinstance(self.sink, OnCard)):
                self.visits.remember_held()
        self.phase("done")
        return loss

    def _update_kept(self, sink: Kept) -> None:
        """All gradients are there: skip, or clip and update."""
        optimizer = self.work.optimizer
        rows = sink.hand_over()
        factor = None
        if self.judge is not None and not self.rehearsing:
            factor = self.judge.factor()
            rows = self._leave_others(sink, rows, factor)
            if self.judge.skips():
                return
        if self.later is not None:
            self.later.run(rows, factor)
            return
        for parameter, _ in rows:
            parameter.grad = sink.tensor(parameter)
            if factor is not None:
                parameter.grad.mul_(factor.cpu())
        sink.changed = True
        optimizer.step()
        sink.changed = False
        optimizer.zero_grad(set_to_none=True)

    def _leave_others(self, sink: Kept, rows: list[tuple[Any, Any]], factor: Any) -> list[tuple[Any, Any]]:
        """Gradients of parameters that are not the optimizer's add up as without us; the other rows."""
        assert self.judge is not None
        mine = []
        for row in rows:
            if id(row[0]) in self.judge.mine:
                mine.append(row)
            else:
                _add(row[0], sink.tensor(row[0]) if factor is None else sink.tensor(row[0]).mul_(factor.cpu()))
        return mine

    def backward(self, batch: Any) -> Any:
        """Gradients only, added to those that are there, in host memory."""
        if not isinstance(self.sink, Kept):
            raise InputError("this plan updates parameters itself: call step(batch), or fit with own_step=True")
        assert self.judge is not None
        with self.judge.only("backward"):
            loss = self._pass(batch)
        for parameter, _ in self.sink.hand_over():
            _add(parameter, self.sink.tensor(parameter))
        self.phase("done")
        return loss

    def rehearse_inference(self, batch: Any, call: Callable[[Any, Any], Any]) -> None:
        """An inference whose output nobody wants."""
        self.rehearsing = True
        try:
            self.infer(batch, call)
        finally:
            self.rehearsing = False

    def infer(self, batch: Any, call: Callable[[Any, Any], Any]) -> Any:
        """`call(model, batch)` without gradients."""
        import torch

        with torch.no_grad(), self._applied(batch):
            self.phase("forward")
            out = call(self.work.model, self.place(batch))
            self.visits.end_pass()
        self.phase("done")
        return out

    def rehearse(self, batch: Any) -> None:
        """A step that changes nothing: everything is computed, the update too, and nothing goes back."""
        sink = self.sink
        update = sink if self.later is None else self.later.update
        self.rehearsing = self.real
        if isinstance(update, OnCard | OnHost):
            update.rehearsing = True
        try:
            with self.judge.only("rehearsal") if self.judge is not None else contextlib.nullcontext():
                self._pass(batch)
            self.phase("optimizer")
            if not isinstance(sink, Kept):
                sink.end()
            elif self.later is not None:
                self._update_kept(sink)
            sink.reset()
        finally:
            self.rehearsing = False
            self.visits.forget_held()  # it was updated, and nothing of that stays
            if isinstance(update, OnCard | OnHost):
                update.rehearsing = False

    def roll_back(self) -> None:
        """A step has failed: nothing of it stays."""
        with contextlib.suppress(StoreError):  # of what nobody wants any more
            self.mover.drain()
        self.visits.reset()
        self.sink.reset()
        if self.later is not None:
            self.later.update.reset()
        if self.keeper is not None:
            self.keeper.end_pass()
        for proxy in self.visits.proxies.values():
            proxy.grad = None

    def leave_device(self) -> None:
        """Give the device's memory back: another runner takes over what is on the host."""
        self.roll_back()
        self.visits.leave_device()
        self.sink.close()
        self.sink, self.later = Dropped(), None
        if self.keeper is not None:
            self.keeper.close()
        clear_up()

    def gather(self) -> None:
        """The user's own parameters never left the host, or have windows to where they are."""
        self.mover.drain()
        if self.scratch is not None:
            self.scratch.looked = True

    def close(self, home: bool = True) -> None:
        """Everything is the user's own again, in ordinary memory; without `home` the scratch file keeps what it has."""
        self.mover.drain()
        self.sink.close()
        if self.weights is not None:
            self.weights.close(home)
        if self.state is not None:
            self.state.close(self.work.optimizer, home)
        for thing in (self.keeper, self._source, self.scratch):
            close = getattr(thing, "close", None)
            if close is not None:
                close()

    # passes

    def place(self, batch: Any) -> Any:
        """The batch on the device."""
        if not self.real:
            return batch
        return batches.transform(batch, lambda _, tensor: tensor.to(self.mover.device, non_blocking=True))

    def _pass(self, batch: Any, updating: contextlib.ExitStack | None = None) -> Any:
        """Forward and backward pass: the loss. `updating` closes when the step is whole: so long Ctrl-C waits."""
        work = self.work
        with self._applied(batch), self._listening():
            self.phase("forward")
            loss, counted = read_loss(work.loss(work.model, self.place(batch)))
            loss = loss if counted is None else loss / counted
            shown = loss.detach()
            self.autocast = self.visits.autocast
            if self.judge is not None and isinstance(self.sink, Kept):
                loss = self.judge.scale(loss)
            self.phase("backward")
            if updating is not None and not isinstance(self.sink, Kept):
                updating.enter_context(self.interrupts.held())
            self.sink.begin()
            loss.backward()
            del loss
            self._end_pass()
        return shown

    def collect(self, batch: Any) -> dict[int, Any]:
        """Gradients by id of their parameter, on the device; nothing is updated."""
        kept, self.sink = self.sink, Collected()
        self.visits.before_finish = self.sink.flush
        try:
            self._pass(batch)
            return self.sink.gradients
        finally:
            self.sink = kept
            self.visits.before_finish = kept.flush

    def _end_pass(self) -> None:
        self.visits.end_pass()
        if self.keeper is not None:
            self.keeper.end_pass()

    @contextlib.contextmanager
    def _applied(self, batch: Any) -> Iterator[None]:
        """Proxies in place of parameters, and forward functions that bring them."""
        visits, choice = self.visits, self.choice
        if self.scratch is not None:
            self.scratch.settle()
        pieces = choice.pieces
        if self._rows and (pieces > 1 or choice.more_pieces):  # a larger batch runs in more pieces
            pieces = -(-pieces * batches.count_rows(batch) // self._rows)
        keep = self.keeper.keep if self.keeper is not None else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(visits.standing_in())
            stack.enter_context(_children_called())
            if choice.update != "none":
                stack.enter_context(without_cache(self.work.model))
            if choice.chunks:
                work, kind = self.work, self.mover.device.type
                self._heads = stack.enter_context(chunked_heads(work.model, work.heads, choice.chunks, kind))
            put = stack.enter_context(other_forwards())  # last in, first out: what it covers is put back under it
            for unit in visits.cut.units.values():
                module = unit.module
                forward = module.forward
                twice = run_again(
                    module,
                    forward,
                    visits.hold(unit, forward),
                    self.work.written,
                    self.mover.device,
                    self._generators,
                    keep,
                )
                if pieces > 1:
                    twice = self._checking(unit.name, forward, in_pieces(twice, pieces))
                put(module, visits.wrap(unit, twice))
            yield

    def _checking(self, name: str, forward: Callable[..., Any], twice: Callable[..., Any]) -> Callable[..., Any]:
        """The first time: does the unit treat its rows one by one?"""
        if self.checked.get(name) is False or (not self.real and self.choice.update != "none"):
            return twice

        def run(*args: Any, **kwargs: Any) -> Any:
            if name not in self.checked:
                self.checked[name] = mixes_rows(forward, args, kwargs, self.real)
            if self.checked[name] and (self.rehearsing or not self.real):
                raise MixesRows(name)
            if self.checked[name]:
                raise InputError(
                    f"the batch is larger than the one that was planned with, and {name} cannot run on a few rows at a time: fit "
                    "with the larger batch"
                )
            return twice(*args, **kwargs)

        return run

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


def _add(parameter: Any, gradient: Any) -> None:
    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)


@contextlib.contextmanager
def _children_called() -> Iterator[None]:
    """Torch's attention and encoder layers call their children, instead of taking their weights to one fused operator."""
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
