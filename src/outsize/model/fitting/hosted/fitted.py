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

from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.exhaustion import clear_up, is_out_of_memory
from outsize.model.fitting.fitted import Snapshot, call_model
from outsize.model.fitting.hosted.choice import HostedChoice
from outsize.model.fitting.hosted.runner import HostedRunner

TIGHTER = 0.85
"""After a failure the next plan holds at most this part of what the failed one should have held."""

Open = Callable[[int, HostedRunner], tuple[FitPlan, HostedChoice, HostedRunner]]
"""(bytes of the device, the runner so far) -> a tighter one."""


class HostedFitted:
    """What `outsize.fit(..., device=...)` returns."""

    def __init__(
        self, plan: FitPlan, choice: HostedChoice, runner: HostedRunner | None, tighter: Open,
        call: Callable[[Any, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        """How a step runs, with its projected peaks on device and host."""
        self.choice = choice
        """The decisions as plain data."""
        self.measured: int | None = None
        """Peak of the rehearsal on the device in bytes, counted as the plan counts; None before it."""
        self.seconds: float | None = None
        """Seconds of the rehearsal."""
        self._runner = runner
        self._tighter = tighter
        self._call = call or call_model
        self._handles = self._hook() if runner is not None else []

    def __repr__(self) -> str:
        return str(self.plan)

    def step(self, batch: Any) -> Any:
        """One training step: gradients of the whole batch, one update. Returns the loss, detached, on the device."""
        runner = self._ready(batch)
        if runner.work.optimizer is None:
            raise InputError("this model was fitted without an optimizer: use infer(batch), or fit it with one")
        return self._guarded(lambda: self._now.step(batch))

    def backward(self, batch: Any) -> Any:
        """Gradients of the whole batch, added to `.grad` in host memory; you step the optimizer yourself."""
        self._ready(batch)
        return self._guarded(lambda: self._now.backward(batch))

    def infer(self, batch: Any, call: Callable[[Any, Any], Any] | None = None) -> Any:
        """The model's output for a batch, without gradients, on the device.

        `call(model, batch)` runs the model; left out, as planned: a dict is passed as keywords, a tuple as arguments.
        """
        self._ready(batch)
        return self._guarded(lambda: self._now.infer(batch, call or self._call))

    def gather(self) -> None:
        """Wait for what is on its way; weights are in host memory always."""
        self._now.gather()

    def undo(self) -> Any:
        """The model as it was given, with the weights it has now."""
        runner = self._now
        for handle in self._handles:
            handle.remove()
        self._handles = []
        runner.close()
        self._runner = None
        return runner.work.model

    # inside

    @property
    def _now(self) -> HostedRunner:
        if self._runner is None:
            raise InputError("this fit is over (undo() or dry_run=True): call outsize.fit again")
        return self._runner

    def _ready(self, batch: Any) -> HostedRunner:
        batches.count_rows(batch)
        return self._now

    def _hook(self) -> list[Any]:
        """Whoever saves or loads finds everything in place."""
        work = self._now.work
        things = [work.model] if work.optimizer is None else [work.model, work.optimizer]
        return [
            register(lambda *_: self.gather())
            for thing in things
            for register in (thing.register_state_dict_pre_hook, thing.register_load_state_dict_pre_hook)
        ]

    def _guarded(self, run: Callable[[], Any]) -> Any:
        while True:
            runner: Any = self._now
            before = Snapshot(runner)
            failure = ""
            try:
                return run()
            except BaseException as error:  # an interrupt too leaves nothing under way
                half = runner.half_updated
                if half and is_out_of_memory(error):
                    runner.roll_back()
                    before.restore()
                    raise OutOfMemory(
                        "memory ran out in the backward pass after some parameters had been updated: load the last saved state"
                    ) from error
                if not is_out_of_memory(error):
                    runner.roll_back()
                    before.restore()
                    if half:
                        error.add_note("some parameters were updated before this error: load the last saved state")
                    raise
                failure = str(error).splitlines()[0] if str(error) else type(error).__name__
            clear_up()
            runner.roll_back()
            before.restore()
            self._tighten(failure)

    def _tighten(self, failure: str) -> None:
        pool = self.plan.budgets[0].pool
        try:
            plan, choice, runner = self._tighter(int(self.plan.peak(pool) * TIGHTER), self._now)
        except BudgetError as error:
            raise OutOfMemory(
                f"a step passed its memory ({failure}) and no tighter plan exists: {error}. Weights and optimizer are those "
                "before the step"
            ) from error
        warnings.warn(
            f"outsize: a step passed its memory ({failure}); nothing was lost. The plan now holds "
            f"{format_bytes(plan.peak(pool))} instead of {format_bytes(self.plan.peak(pool))}; the batch runs again",
            stacklevel=4,
        )
        self.plan, self.choice, self._runner = plan, choice, runner
