"""Where gradients go as they become complete, and when the parameters they belong to are updated.

In: a gradient, at the tensor at which autograd leaves it: the parameter itself, or the proxy that stands in for it on a device.
Out: `Sink`, what a runner asks of all of them, and the sinks that update nothing. Those that update: `resident_update`
(the model is on its device), `update_on_card` and `update_on_host` (it visits).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from outsize.model.fitting.move.mover import Mover


class Rehearsing:
    """What takes part in a step that changes nothing."""

    rehearsing = False
    """Do everything and keep nothing."""

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Keep nothing of the steps inside the block."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False


class Sink(Rehearsing):
    """Takes the gradients of one step after the other; this one leaves them where they are."""

    listens = True
    """Wants to hear of every gradient."""
    eager = False
    """Updates parameters in the backward pass for good: from its beginning on, an interrupt waits for the step's end."""
    scaler: Any = None
    """The user's GradScaler."""
    safe = False
    """An update that fails half way is taken back."""
    _changed = False
    """Some parameters are updated in this step, and there is no way back."""
    done = False
    """The update of this step is whole: what fails from now on does not take it back."""

    @property
    def half_updated(self) -> bool:
        """True where some parameters are updated and others are not, for good."""
        return self._changed

    def leave_home(self) -> None:
        """State that the plan keeps elsewhere goes there."""

    def begin_step(self) -> None:
        """A step begins."""

    def scale(self, loss: Any) -> Any:
        """The loss whose gradients are wanted: as the user's scaler does."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def begin(self) -> None:
        """A backward pass begins."""

    def accumulated(self, parameter: Any, holder: Any) -> None:
        """A parameter's gradient of this backward pass is complete, in `holder.grad`."""

    def waits(self, parameter: Any) -> bool:
        """True where a parameter's gradient is complete, and its update comes with that of others."""
        return False

    def flush(self) -> None:
        """What was put off is done now: the parameters leave the device."""

    def update_own(self) -> bool:
        """A user steps the optimizer: update a few parameters at a time; False: leave it to the optimizer."""
        return False

    def finish(self, scale: Any) -> None:
        """All backward passes of the step are over. Gradients still need the factor `scale`; None: they do not."""

    def roll_back(self) -> None:
        """The step has failed: nothing of it stays."""

    def close(self) -> None:
        """Give everything back."""


class InPlace(Sink):
    """Gradients stay at their parameters, added to those that were there, as `loss.backward()` does."""

    listens = False

    def __init__(self, model: Any, scaler: Any) -> None:
        self._parameters = list(model.parameters())
        self.scaler = scaler
        self._before: list[tuple[Any, Any]] = []

    def begin_step(self) -> None:
        """Gradients from before are put aside: a failure must not leave half a sum in them, and a count must not scale them."""
        self._before = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._before:
            parameter.grad = None

    def finish(self, scale: Any) -> None:
        if scale is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        sums = [(p, before) for p, before in self._before if p.grad is not None]
        for parameter, before in sums:  # apart from those before, which a failure has to find as they were
            parameter.grad.add_(before)
        for parameter, before in sums:
            before.copy_(parameter.grad)
        for parameter, before in self._before:
            parameter.grad = before
        self._before = []

    def roll_back(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, before in self._before:
            parameter.grad = before
        self._before = []


class Deferred(InPlace):
    """Gradients wait until `backward()` of the loss asks for them; those at the parameters stay as they are meanwhile."""

    def __init__(self, model: Any, scaler: Any) -> None:
        super().__init__(model, scaler)
        self._rows: list[tuple[Any, Any]] = []
        self._scale = 1.0

    def finish(self, scale: Any) -> None:
        self._scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        self._rows = [
            (p, p.grad if scale is None else p.grad.mul_(scale)) for p in self._parameters if p.grad is not None
        ]
        self.roll_back()

    def deliver(self, factor: Any) -> None:
        """Add them, times a factor, to those at the parameters."""
        rows, self._rows = self._rows, []
        for parameter, gradient in rows:
            gradient.mul_(factor / self._scale)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def loss_of(value: Any, sink: Deferred) -> Any:
    """A loss of this value whose `backward()` lets a sink deliver its gradients."""

    class Delivery(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, given: Any) -> Any:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, factor: Any) -> Any:
            sink.deliver(factor)

    return Delivery.apply(value.detach().requires_grad_())


class Dropped(Sink):
    """Gradients go nowhere; a dry run of a plan that updates on the host."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def accumulated(self, parameter: Any, holder: Any) -> None:
        """Nobody wants it; it is held for as long as its copy out would hold it."""
        if not self._mover.real:
            self._mover.send(None, holder.grad, hold=True)
        holder.grad = None


class Collected(Sink):
    """Copies of all gradients, on the device: to compare a small model's with the plain ones."""

    def __init__(self) -> None:
        self.gradients: dict[int, Any] = {}
        """By id of the parameter."""

    def accumulated(self, parameter: Any, holder: Any) -> None:
        self.gradients[id(parameter)] = holder.grad.detach().clone()
        holder.grad = None


def add_gradient(parameter: Any, gradient: Any) -> None:
    """As autograd adds to what is there."""
    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)


def flat_bytes(tensor: Any, mover: Mover) -> Any:
    """A dense tensor's elements as flat bytes."""
    return tensor.reshape(-1).view(torch.uint8) if mover.real else tensor
