"""A step or an inference on a device that the model does not fit on, as the user holds it.

In: a plan and a runner. Out: `HostedFitted`: `step`, `backward`, `infer`, `undo`, like any fitted step. Memory that runs
out before the first parameter is updated loses nothing: the plan is made tighter and the same batch runs again. Once
parameters are updated in the backward pass there is no way back in the memory there is, which is why a step is
rehearsed before the first one is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from outsize.core.errors import InputError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.model.fitting.guarded import Guarded, Snapshot, call_model
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.run.hosted import HostedRunner
from outsize.model.fitting.run.out_of_memory import is_out_of_memory

TIGHTER = 0.85
"""After a failure the next plan holds at most this part of what the failed one should have held."""

Open = Callable[[int, HostedRunner], tuple[FitPlan, Choice, HostedRunner]]
"""(bytes of the device, the runner so far) -> a tighter one."""


class HostedFitted(Guarded[HostedRunner]):
    """What `outsize.fit(..., device=...)` returns."""

    def __init__(
        self, plan: FitPlan, choice: Choice, runner: HostedRunner | None, tighter: Open,
        call: Callable[[Any, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, choice, runner)
        self.choice: Choice
        self.seconds: float | None = None
        """Seconds of the rehearsal."""
        self._watched = 3
        """Steps after which the plan is compared with what the card has reserved."""
        self._tighter = tighter
        self._call = call or call_model

    def step(self, batch: Any) -> Any:
        """One training step: gradients of the whole batch, one update. Returns the loss, detached, on the device."""
        self._ready_to_train(batch)
        loss = self._guarded(lambda: self._now.step(batch))
        if self._watched and self.measured is not None:
            import torch

            self._watched -= 1
            self.measured = max(self.measured, int(torch.cuda.max_memory_reserved()))
            self._own_up()
        return loss

    def backward(self, batch: Any) -> Any:
        """Gradients of the whole batch, added to `.grad` in host memory; you step the optimizer yourself."""
        self._ready(batch)
        self._require_loss()
        return self._guarded(lambda: self._now.backward(batch))

    def infer(self, batch: Any, call: Callable[[Any, Any], Any] | None = None) -> Any:
        """The model's output for a batch, without gradients, on the device.

        `call(model, batch)` runs the model; left out, as planned: a dict is passed as keywords, a tuple as arguments.
        """
        self._ready(batch)
        return self._guarded(lambda: self._now.infer(batch, call or self._call))

    # inside

    def _ready(self, batch: Any) -> None:
        super()._ready(batch)
        visits = self._now.weights.visits
        for name, parameter in self._work.model.named_parameters():
            if id(parameter) not in visits.proxies:
                raise InputError(
                    f"{name} is a parameter that the model had not when it was fitted: undo() and fit it again"
                )
            if parameter.requires_grad and id(parameter) in visits.frozen and self._work.loss is not None:
                raise InputError(
                    f"{name} was frozen when the model was fitted and is to be trained now: undo() and fit it again"
                )

    def _end(self) -> None:
        stays = self._now.weights.scratch.stays if self._now.weights.scratch is not None else ""
        self._now.close(home=not stays)
        if stays:
            warnings.warn(f"outsize: {stays}", stacklevel=3)

    def _half_done(self, error: BaseException, before: Snapshot) -> None:
        self._now.roll_back()
        before.restore()
        if is_out_of_memory(error):
            raise OutOfMemory(
                "memory ran out in the backward pass after some parameters had been updated: load the last saved state"
            ) from error
        error.add_note("some parameters were updated before this error: load the last saved state")

    def _go_tighter(self, failure: str) -> None:
        self.gather()
        goal = int(self.plan.peak(self.plan.budgets[0].pool) * TIGHTER)
        self.plan, self.choice, self._runner = self._tighter(goal, self._now)
