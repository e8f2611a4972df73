"""Runs one step as a plan says: slices, forward and backward passes, the update.

In: the user's model, loss and optimizer, where its weights are (`Residence`: on the device, or visiting it), where its gradients
go (`Sink`), a batch. Out: the loss, and gradients or updated weights, or the model's output. The model is changed only while a
step runs (a few `forward` attributes, proxies for parameters), so between steps it is the user's own: copies, hooks, names and
saved files are as without us. The same code runs on tensors without contents, which is how a plan is projected.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from outsize.core.errors import InputError
from outsize.model.compiled.again import computing_again
from outsize.model.fitting.axes import Axes
from outsize.model.fitting.batch import Joined
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.out_of_memory import clear_up
from outsize.model.fitting.run.loss import Normaliser, read_loss
from outsize.model.fitting.run.replayed_draws import Replay
from outsize.model.fitting.update.gradient_sink import Rehearsing, Sink
from outsize.model.fitting.update.optimizer_subset import hold_for_closure, needs_closure
from outsize.model.fitting.update.undo_log import Interrupts
from outsize.model.torch_port.objects import hooked

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
    backwards: int = 0
    """Calls of `backward` before the user steps the optimizer; 0: fit steps it."""
    heads: tuple[str, ...] = ()
    """Linear layers whose logits go straight into a cross entropy."""
    axes: Axes = field(default_factory=Axes)
    """Which axis of each tensor of a batch counts samples."""
    replay: Replay | None = None
    """Gives slices the random numbers that the whole batch draws; None: they draw their own."""
    sources: tuple[Any, ...] = ()
    """Generators beside torch's that a step draws random numbers from."""
    compiled: bool = False
    """The model, or a part of it, is compiled."""


class Residence(Rehearsing):
    """Where a model's weights are while it runs."""

    real = True
    """False where tensors have no contents."""
    listens = False
    """Weights leave when their gradients are complete."""
    steady = False
    """Nothing moves in a forward pass."""
    keeps_pace = False
    """Peers wait for the backward pass of every slice, also of one in which no label counts."""

    generators: Sequence[Any] = ()
    """Where random numbers come from."""

    def cut(self, rows: int) -> list[tuple[int, int]]:
        """(start, stop) of the slices in which a batch runs."""
        return [(0, rows)]

    def place(self, batch: Any) -> Any:
        """A batch, or a slice of one, on the device."""
        return batch

    def applied(self, batch: Any, sink: Sink) -> contextlib.AbstractContextManager[None]:
        """The plan's forward functions in place of the modules' own; what is on its way has arrived in the end."""
        raise NotImplementedError

    def holders(self) -> Iterable[tuple[Any, Any]]:
        """Every parameter that is trained, and the tensor at which its gradient arrives."""
        raise NotImplementedError

    def forward_pass(self) -> contextlib.AbstractContextManager[None]:
        """A forward pass of a slice, the loss included."""
        return contextlib.nullcontext()

    def begin_backward(self) -> None:
        """A forward pass is over."""

    def accumulated(self, parameter: Any) -> None:
        """A parameter's gradient is complete, and it is not needed any more."""

    def end_slice(self) -> None:
        """The backward pass of a slice is over."""

    def roll_back(self) -> None:
        """Something has failed: nothing is under way."""

    def leave_home(self) -> None:
        """What the plan keeps elsewhere goes there."""

    def gather(self) -> None:
        """Everything is where the user finds it."""

    def drain(self) -> None:
        """Nothing is under way any more."""

    def leave_device(self) -> None:
        """Give the device's memory back."""

    def close(self, home: bool = True) -> None:
        """Everything is the user's own again, and home from where it waits unless told otherwise."""

    def packed(self) -> list[Any]:
        """Tensors that hold weights and state in fewer bits."""
        return []

    def check_model(self) -> None:
        """An `InputError` where the model has become another than the one that was planned for."""

    def before_saving(self, thing: Any) -> None:
        """`thing.state_dict()` begins, of a module or the optimizer."""
        self.gather()

    def after_saving(self, thing: Any, saved: Any) -> Any:
        """It is about to give `saved`; what is returned is given instead, unless it is None."""

    def before_loading(self, thing: Any, saved: Any) -> Any:
        """A state is about to be loaded into `thing`; what is returned is loaded into an optimizer instead, unless it is None."""
        self.gather()

    def after_loading(self) -> None:
        """A state was loaded into the optimizer."""

    @property
    def stays(self) -> str:
        """Why some of it stays where it is when everything else is the user's own again, empty where nothing does."""
        return ""


AnyResidence = TypeVar("AnyResidence", bound=Residence)


class Runner(Generic[AnyResidence]):
    """A plan bound to a model."""

    joins_counts = False
    """The count of a loss (total, count) is known only when others have told theirs, so that totals go backward."""

    def __init__(self, work: Work, choice: Choice, weights: AnyResidence, sink: Sink, own: Sink | None) -> None:
        self.work = work
        self.choice = choice
        self.weights = weights
        self.sink = sink
        """Takes the gradients of a step."""
        self.phase: Phase = lambda name: None
        self.interrupts = Interrupts()
        self.own = own
        """Takes those of a user who steps the optimizer; None: the plan updates parameters itself."""
        self._used: Sink | None = None
        """The sink of a step that has begun and is not done."""
        self._done = False
        """The step is whole."""

    @property
    def half_updated(self) -> bool:
        """True where some parameters are updated and others are not, for good."""
        return self.sink.half_updated

    @property
    def done(self) -> bool:
        """True where the step that began last is whole: it cannot be run again."""
        return self._done or (self._used is not None and self._used.done)

    def begin(self) -> None:
        """A step or an inference is about to run, and nothing of it has happened."""
        self._used, self._done, self.sink.done = None, False, False

    def end(self) -> None:
        """The step is whole, and something failed after it: what it has done stays."""
        self.weights.roll_back()
        self._used = None

    def step(self, batch: Any) -> Any:
        """Gradients and update; the loss of the batch, detached."""
        self.begin()
        self._used = self.sink
        self.sink.begin_step()
        with contextlib.ExitStack() as updating:
            loss, scale = self.passes(batch, self.sink, updating)
            self.phase("optimizer")
            if not self.sink.eager:
                updating.enter_context(self.interrupts.held())
            self.sink.finish(scale)
            self._done = True  # while interrupts still wait
        self._used = None
        self.phase("done")
        return loss

    def users_step(self, batch: Any) -> None:
        """What a user does who steps the optimizer, on tensors without contents."""
        assert self.own is not None
        parameters, optimizer = list(self.work.model.parameters()), self.work.optimizer
        kept = hold_for_closure(optimizer) if needs_closure(optimizer) else None
        for _ in range(self.work.backwards):
            self.collect(batch, self.own)
        self.phase("optimizer")
        if optimizer is not None and kept is None:
            gradients = self.own_update()
            if not gradients:
                optimizer.step()
            del gradients
        for parameter in parameters:
            parameter.grad = None
        self.phase("done")

    def own_update(self) -> list[tuple[Any, Any]]:
        """The update of a user who steps the optimizer, a few parameters at a time: they have no gradient afterwards, so that the
        optimizer passes them over. Out: parameters with their gradients, which stay; none where the optimizer has to do it."""
        gradients = [(p, p.grad) for p in self.work.model.parameters() if p.grad is not None]
        try:
            with self.interrupts.held():
                return gradients if self.sink.update_own() else []
        except BaseException:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            raise

    def leave_home(self) -> None:
        """What the plan keeps elsewhere goes there before a step begins: it is at home after `fit`, after a load, and where
        somebody has read it."""
        self.weights.leave_home()
        self.sink.leave_home()

    def rehearse(self, batch: Any) -> None:
        """A step that changes nothing: everything is computed, the update too, and nothing goes back."""
        self._used = self.sink
        with self.weights.rehearsal(), self.sink.rehearsal():
            scale = self.passes(batch, self.sink)[1]
            self.phase("optimizer")
            self.sink.finish(scale)
        self.sink.roll_back()
        self._used = None

    def backward(self, batch: Any) -> Any:
        """Gradients only, added to those that are there."""
        self.begin()
        if self.own is None:
            raise InputError("this plan updates parameters itself: call step(batch), or fit with own_step=True")
        loss = self.collect(batch, self.own)
        self.phase("done")
        return loss

    def collect(self, batch: Any, sink: Sink) -> Any:
        """Gradients go to a sink, which updates nothing; the loss of the batch."""
        self._used = sink
        sink.begin_step()
        try:
            loss, scale = self.passes(batch, sink)
            with self.interrupts.held():
                sink.finish(scale)
                self._done = True
        except BaseException:
            if not self._done:
                self.roll_back()
            raise
        self._used = None
        return loss

    def roll_back(self) -> None:
        """A step has failed: weights and state are what they were before it, its gradients are gone.

        Where something else has failed, gradients are the user's.
        """
        self.weights.roll_back()
        used, self._used = self._used, None
        if used is not None:
            used.roll_back()

    def infer(self, batch: Any, call: Callable[[Any, Any], Any]) -> Any:
        """`call(model, slice)` without gradients, slice by slice, joined along the first axis."""
        axes = self.work.axes
        rows = axes.count(batch)
        runs = self.weights.cut(rows)
        joined = Joined(rows)
        with torch.no_grad(), self.weights.applied(batch, Sink()):
            for start, stop in runs:
                self.phase("forward")
                part = batch if stop - start == rows else axes.take(batch, start, stop)
                joined.add(call(self.work.model, self.weights.place(part)), stop - start)
        self.phase("done")
        return joined.whole

    def gather(self) -> None:
        """Everything is where the user finds it."""
        self.weights.gather()

    def leave_device(self) -> None:
        """Give the device's memory back: another runner takes over what is elsewhere."""
        self.roll_back()
        self.sink.roll_back()
        self.weights.leave_device()
        self.sink.close()
        self.sink, self.own = Sink(), None
        clear_up()

    def close(self, home: bool = True) -> None:
        """Everything is the user's own again."""
        self.weights.drain()
        self.sink.close()
        self.weights.close(home)

    def passes(self, batch: Any, sink: Sink, updating: contextlib.ExitStack | None = None) -> tuple[Any, Any]:
        """Forward and backward of every slice: the loss, and the factor the gradients still need.

        `updating` closes when the step is whole: so long Ctrl-C waits.
        """
        work, weights = self.work, self.weights
        rows = work.axes.count(batch)
        runs = weights.cut(rows)
        shares = [1.0 / len(runs)] * len(runs)
        if weights.real and len(runs) > 1:
            shares = work.normaliser.weigh(batch, runs, work.axes)
        if not weights.real:
            runs = work.axes.telling(batch, runs)
        total = count = None
        replay = work.replay if len(runs) > 1 else None
        states = [(generator, generator.get_state()) for generator in weights.generators] if replay else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(weights.applied(batch, sink))
            stack.enter_context(self._listening(sink))
            if work.compiled:
                stack.enter_context(computing_again(work.model, self.choice.again, weights.real))
            drawing = stack.enter_context(contextlib.ExitStack())
            for (start, stop), share in zip(runs, shares, strict=False):
                if replay is not None:  # every slice begins where the whole batch does
                    drawing.close()
                    for generator, state in states:
                        generator.set_state(state)
                    drawing.enter_context(replay.running(start, stop, rows))
                part = batch if stop - start == rows else work.axes.take(batch, start, stop)
                self.phase("forward")
                self.interrupts.let_go()
                at_once = self.interrupts.let_through() if weights.steady else contextlib.nullcontext()
                with at_once, self._autocasting(), weights.forward_pass():
                    loss, counted = read_loss(work.loss(work.model, weights.place(part)))
                if counted is None:
                    if share == 0.0 and any(shares):  # no label counts in this slice: its mean is no number
                        if weights.keeps_pace:
                            (loss * 0.0).backward()
                        continue
                    share = share or 1.0  # nor in the batch: no number either, and gradients of zero
                    loss = loss if share == 1.0 else loss * share
                elif stop - start == rows and not self.joins_counts:
                    loss, counted = loss / counted, None
                shown = loss.detach()
                total = shown if total is None else total + shown
                if counted is not None:
                    count = counted if count is None else count + counted
                loss = sink.scale(loss)
                self.phase("backward")
                self.interrupts.let_go()
                weights.begin_backward()
                if updating is not None and sink.eager:
                    updating.enter_context(self.interrupts.held())
                sink.begin()
                loss.backward()
                del loss, part, shown
                weights.end_slice()
        torch.clear_autocast_cache()  # where autocast goes on, its lower copies of weights would stay until it ends
        if count is None:
            return total, None
        count = count.detach() if isinstance(count, torch.Tensor) else count
        nothing = not isinstance(count, torch.Tensor) and not count  # Python would not divide by it
        return total / count, math.inf if nothing else 1.0 / count

    def _listening(self, sink: Sink) -> contextlib.AbstractContextManager[None]:
        """Hear of every gradient that is complete, where somebody wants to know."""
        heard = self.weights.holders() if sink.listens or self.weights.listens else ()
        return hooked(*(h.register_post_accumulate_grad_hook(self._hear(p, sink)) for p, h in heard))

    def _hear(self, parameter: Any, sink: Sink) -> Callable[[Any], None]:
        def hear(holder: Any) -> None:
            sink.accumulated(parameter, holder)
            if not sink.waits(parameter):
                self.weights.accumulated(parameter)

        return hear

    def _autocasting(self) -> Any:
        if not self.choice.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.work.device, dtype=torch.bfloat16)
