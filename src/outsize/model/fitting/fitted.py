"""A step that stays inside its budget, as the user holds it.

In: a plan, a choice, and a runner that obeys it. Out: `Fitted`: `step`, `backward`, `infer`, `undo`. The first steps are
measured: a plan that held more than its budget is made tighter, one that held much less is made faster. A hosted step that
updates parameters in the backward pass has no way back in the memory there is, which is why it was rehearsed before.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.guarded import Guarded, Snapshot, call_model
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory
from outsize.model.fitting.run.expandable_segments import let_grow
from outsize.model.fitting.run.recorder import Recorder
from outsize.model.fitting.run.resident import ResidentRunner, open_resident
from outsize.model.fitting.update.optimizer_subset import state_of

TIGHTER = {"cpu": 0.85, "cuda": 0.93, "hosted": 0.85}
"""After a failure the next plan holds at most this part of what the failed one should have held."""

ROOMY = 0.93
"""A step that holds less than this part of what was projected lets the plan be made again with the difference."""

SLOWER = 1.2
"""Another plan that spares the allocator trouble may take so much longer by prediction."""

FASTER = 0.98
"""Another plan is taken where it needs at most this part of the time."""

Replan = Callable[[int, Any], tuple[FitPlan, Choice]]
"""(bytes of the device, batch to run plans on or None) -> another plan."""

Reopen = Callable[[Choice, Any], Any]
"""(another choice, the runner so far) -> the runner of that choice."""


class Fitted(Guarded):
    """What `outsize.fit` returns."""

    def __init__(
        self, plan: FitPlan, choice: Choice, runner: Any, replan: Replan | None, rows: int = 0, *,
        reopen: Reopen | None = None, call: Callable[[Any, Any], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, choice, runner)
        self.seconds: float | None = None
        """Seconds of the rehearsal of a hosted step; None where there was none."""
        card = runner is not None and runner.work.device == "cuda"
        self._watched = 3 if card else 0 if choice.hosted else 1
        """Steps that are still measured: on a card three, since the first makes the optimizer's state and the cache settles."""
        self._cleared = 0
        """How often the allocator cleared its cache in the last measured step, to stay inside its limit."""
        self._took = 0.0
        """Seconds of the last measured step on a card."""
        self._left: tuple[FitPlan, Choice, float] | None = None
        """The plan that was left for one that should be faster, with the seconds of its step."""
        self._looked = False
        """A faster plan was looked for: that is done once."""
        self._replan = replan
        self._reopen = reopen or (lambda choice, old: reopen_resident(choice, old, rows))
        self._call = call or call_model
        self._rows = rows
        if runner is not None:
            let_grow(self, choice.expandable)

    def step(self, batch: Any) -> Any:
        """One training step: gradients of the whole batch, one update. Returns the loss, detached, on the device."""
        self._ready_to_train(batch)
        if self._watched == 0:
            return self._guarded(lambda: self._now.step(batch))
        loss = self._guarded(lambda: self._measured(batch))
        self._watched -= 1
        allowed = self.plan.budgets[0].bytes
        assert self.measured is not None
        if self.measured > allowed and not self.choice.hosted:
            self._tighten(f"the first step held {format_bytes(self.measured)} of {format_bytes(allowed)}")
            return loss
        self._own_up()
        if self._watched == 0 and not self.choice.hosted:
            self._look_around(allowed, batch)
        return loss

    def backward(self, batch: Any) -> Any:
        """Gradients of the whole batch, added to `.grad` as `loss.backward()` does; you step the optimizer yourself.

        Those of a hosted model are in host memory.
        """
        self._ready(batch)
        self._require_loss()
        taken = self.choice.elsewhere
        if taken and not self.choice.hosted:
            raise InputError(
                f"this plan takes over the optimizer ({', '.join(taken)}), so that gradients do not stay: call step(batch), or "
                "fit with own_step=True"
            )
        return self._guarded(lambda: self._now.backward(batch))

    def infer(self, batch: Any, call: Callable[[Any, Any], Any] | None = None) -> Any:
        """The model's output for a batch, without gradients, inside the budget.

        `call(model, batch)` runs the model, also on slices; left out, as planned: a dict is passed as keywords, a tuple as
        arguments.
        """
        self._ready(batch)
        return self._guarded(lambda: self._now.infer(batch, call or self._call))

    # inside

    def _ready(self, batch: Any) -> None:
        super()._ready(batch)
        self._now.weights.check_model()

    def _end(self) -> None:
        runner = self._now
        stays = runner.weights.stays
        runner.close(home=not stays)
        let_grow(self, False)
        if stays:
            warnings.warn(f"outsize: {stays}", stacklevel=3)

    def _measured(self, batch: Any) -> Any:
        """A step whose peak is measured: what it held is compared with what was projected."""
        import torch

        runner = self._now
        if self.choice.hosted:
            loss = runner.step(batch)
            self.measured = max(self.measured or 0, int(torch.cuda.max_memory_reserved()))
            return loss
        if runner.work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = runner.step(batch)
            torch.cuda.synchronize()
            self._took = time.perf_counter() - start
            self._cleared = torch.cuda.memory_stats().get("num_alloc_retries", 0) - before
            self.measured = int(torch.cuda.max_memory_reserved())
            return loss
        loss, recorder = measure(runner, batch)
        self.measured = max(recorder.peaks().values())
        return loss

    def _half_done(self, error: BaseException, before: Snapshot) -> None:
        if self.choice.hosted:
            self._now.roll_back()
            before.restore()
        if not is_out_of_memory(error):
            error.add_note("some parameters were updated before this error: load the last saved state")
            return
        raise OutOfMemory(
            "memory ran out after some parameters had been updated and others not, and a second try failed too: load the last "
            "saved state"
        ) from error

    def _look_around(self, allowed: int, batch: Any) -> None:
        """Look for a faster plan, or whether the one that was found is; steps of other sizes tell nothing about either."""
        whole = batches.count_rows(batch) == self._rows
        if self._left is not None and not whole:
            self._watched = 1
            return
        failure = ""
        try:
            if self._left is not None:
                self._keep_faster(*self._left)
            elif whole and not self._looked and (self._cleared or self._work.device == "cuda"):
                self._looked = True
                (self._make_room if self._cleared else self._relax)(allowed, batch)
        except Exception as error:  # the step is done: what only might be faster must not fail it
            if not is_out_of_memory(error):
                raise
            failure = "memory ran out while a faster plan was looked for: this one stays"
        if failure:
            let_grow(self, self.choice.expandable)
            clear_up()
            self.plan = replace(self.plan, notes=(*self.plan.notes, failure))

    def _make_room(self, allowed: int, batch: Any) -> None:
        """The step fits only because the allocator clears its cache in every step: a little smaller may be faster."""
        said = f"the allocator cleared its cache {self._cleared} times in a step"
        try:
            plan, choice = self._plan_again(int(allowed * TIGHTER["cuda"]), batch)
        except BudgetError:
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"{said}; no smaller plan exists"))
            return
        if plan.slow_down > SLOWER * self.plan.slow_down:
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"{said}; smaller plans are slower still"))
            return
        self._try(plan, choice, f"{said}: tightened")

    def _relax(self, allowed: int, batch: Any) -> None:
        """The steps held less than projected: a faster plan may have room."""
        assert self.measured is not None
        pool = self.plan.budgets[0].pool
        projected = self.plan.peak(pool)
        if not self.plan.remedies or self.measured >= ROOMY * projected:
            return
        plan, choice = self._plan_again(allowed * projected // max(1, self.measured), batch)
        said = f"the steps held {format_bytes(self.measured)} of {format_bytes(projected)} projected"
        if plan.slow_down >= FASTER * self.plan.slow_down:
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"{said}; no plan with more room is faster"))
            return
        self._try(plan, choice, f"{said}: relaxed from {self.plan.slow_down:.2f}x to {plan.slow_down:.2f}x")

    def _try(self, plan: FitPlan, choice: Choice, said: str) -> None:
        """Go on with a plan that should be faster, and look whether it is."""
        left = self.plan, self.choice, self._took
        self._take(replace(plan, budgets=self.plan.budgets, notes=(*plan.notes, said)), choice)
        self._left, self._watched = left, 2

    def _keep_faster(self, plan: FitPlan, choice: Choice, took: float) -> None:
        """Back to the plan that was left, where its step took less."""
        self._left = None
        if self._took > took:
            said = f"another plan took {1e3 * self._took:.1f} ms a step and not {1e3 * took:.1f} ms: taken back"
            self._take(replace(plan, notes=(*plan.notes, said)), choice)

    def _plan_again(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        """Another plan, compared with the plain step: weights are at home for that, the optimizer's state may have no room."""
        assert self._replan is not None
        self._now.weights.bring_weights()
        return self._replan(limit, batch)

    def _take(self, plan: FitPlan, choice: Choice) -> None:
        """Go on with another plan."""
        let_grow(self, choice.expandable)
        try:
            following = self._reopen(choice, self._now)
        except OutOfMemory:
            let_grow(self, self.choice.expandable)
            raise
        self.plan, self.choice, self._runner = plan, choice, following

    def _go_tighter(self, failure: str) -> None:
        if self._left is not None:  # what was tried holds too much, and what was left does not
            (plan, choice, _), self._left = self._left, None
            said = f"another plan held too much ({failure}): taken back"
            with contextlib.suppress(OutOfMemory):  # what it has at home may have no room now
                self._take(replace(plan, notes=(*plan.notes, said)), choice)
                return
        most = min(self.plan.peak(self.plan.budgets[0].pool), self.plan.budgets[0].bytes)
        if self.choice.hosted:
            self.gather()
        else:
            with contextlib.suppress(OutOfMemory):  # weights without room at home cannot be compared, and are not
                self._now.weights.bring_weights()
        assert self._replan is not None
        part = TIGHTER["hosted" if self.choice.hosted else self._work.device]
        plan, choice = self._replan(int(most * part), None)
        self._take(replace(plan, budgets=self.plan.budgets, notes=(*plan.notes, f"tightened: {failure}")), choice)


def reopen_resident(choice: Choice, old: ResidentRunner, rows: int) -> ResidentRunner:
    """The runner of another choice for a model on its device: what this one wants at home comes home."""
    following = open_resident(old.work, choice, old.weights.store, rows=rows, evicted=old.weights.evicted)
    following.weights.settle(following.sink)
    return following


def measure(runner: ResidentRunner, batch: Any) -> tuple[Any, Recorder]:
    """One step on the CPU with every storage counted."""
    work = runner.work
    recorder = Recorder(work.device)
    import torch

    held = (*work.model.parameters(), *work.model.buffers(), *state_of(work.optimizer))
    recorder.hold(t for t in held if isinstance(t, torch.Tensor))
    recorder.hold(batches.tensors_of(batch).values())
    runner.phase = recorder.phase
    try:
        with recorder.watching(work.model):
            loss = runner.step(batch)
    finally:
        runner.phase = lambda name: None
    return loss, recorder
