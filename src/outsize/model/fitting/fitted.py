"""A training step that stays inside its budget.

In: a plan and the model it was made for. Out: `Fitted`: `step`, `backward`, `infer`, `undo`. An out-of-memory failure
in a step loses nothing: weights, optimizer and random state are put back, the plan is made tighter outside the
`except` block (where the failed frames still held their tensors), and the same batch runs again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.exhaustion import clear_up, is_out_of_memory
from outsize.model.fitting.recorder import Recorder
from outsize.model.fitting.runner import Runner
from outsize.model.fitting.update import copy_all

TIGHTER = {"cpu": 0.85, "cuda": 0.93}
"""After a failure the next plan holds at most this part of what the failed one should have held."""

ROOMY = 0.93
"""A step that holds less than this part of what was projected lets the plan be made again with the difference."""

SLOWER = 1.2
"""Another plan that spares the allocator trouble may take so much longer by prediction."""

FASTER = 0.98
"""Another plan is taken where it needs at most this part of the time."""

Replan = Callable[[int], tuple[FitPlan, Choice]]


class Fitted:
    """What `outsize.fit` returns."""

    def __init__(self, plan: FitPlan, choice: Choice, runner: Runner | None, replan: Replan, rows: int) -> None:
        self.plan = plan
        """How a step runs, with its projected peaks; replaced when the plan is made tighter."""
        self.choice = choice
        """The decisions as plain data."""
        self.measured: int | None = None
        """Peak of the first step in bytes, counted as the plan counts; None before it."""
        self._watched = 3 if runner is not None and runner.work.device == "cuda" else 1
        """Steps that are still measured: on a card three, since the first makes the optimizer's state and the cache settles."""
        self._cleared = 0
        """How often the allocator cleared its cache in the last measured step, to stay inside its limit."""
        self._runner = runner
        self._replan = replan
        self._rows = rows
        self._handles = self._hook() if runner is not None else []

    def __repr__(self) -> str:
        return str(self.plan)

    def step(self, batch: Any) -> Any:
        """One training step: gradients of the whole batch, one update. Returns the loss, detached."""
        runner = self._ready(batch)
        if runner.work.optimizer is None:
            raise InputError("this model was fitted without an optimizer: use infer(batch), or fit it with one")
        if self._watched == 0:
            return self._guarded(lambda: self._now.step(batch), batch)
        loss = self._guarded(lambda: self._measured(batch), batch)
        self._watched -= 1
        allowed = self.plan.budgets[0].bytes
        assert self.measured is not None
        if self.measured > allowed:
            self._tighten(f"the first step held {format_bytes(self.measured)} of {format_bytes(allowed)}")
        elif self._watched == 0 and self._cleared:
            self._make_room(allowed)
        elif self._watched == 0 and runner.work.device == "cuda":
            self._relax(allowed)
        return loss

    def backward(self, batch: Any) -> Any:
        """Gradients of the whole batch, added to `.grad` as `loss.backward()` does; you step the optimizer yourself."""
        self._ready(batch)
        choice = self.choice
        taken = [name for name in ("in_backward", "state_away", "gradients_away", "stream") if getattr(choice, name)]
        if taken:
            raise InputError(
                f"this plan takes over the optimizer ({', '.join(taken)}), so that gradients do not stay: call step(batch), or "
                "fit with own_step=True"
            )
        return self._guarded(lambda: self._now.backward(batch), batch)

    def infer(self, batch: Any, call: Callable[[Any, Any], Any] | None = None) -> Any:
        """The model's output for a batch, without gradients, slice by slice inside the budget.

        `call(model, slice)` runs the model; left out, a dict is passed as keywords, a tuple as arguments.
        """
        self._ready(batch)
        return self._guarded(lambda: self._now.infer(batch, call or call_model), batch)

    def gather(self) -> None:
        """Bring home what waits elsewhere; the next step sends it away again."""
        self._now.gather()

    def undo(self) -> Any:
        """The model as it was given, with the weights it has now."""
        runner = self._now
        runner.gather()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        runner.store.close()
        self._runner = None
        return runner.work.model

    # inside

    @property
    def _now(self) -> Runner:
        if self._runner is None:
            raise InputError("this fit is over (undo() or dry_run=True): call outsize.fit again")
        return self._runner

    def _ready(self, batch: Any) -> Runner:
        batches.count_rows(batch)
        return self._now

    def _hook(self) -> list[Any]:
        """Whoever saves or loads finds everything at home."""
        work = self._now.work
        handles: list[Any] = []
        for module in work.model.modules():  # a part may be saved by itself
            handles.append(module.register_state_dict_pre_hook(lambda *_: self.gather()))
            handles.append(module.register_load_state_dict_pre_hook(lambda *_: self.gather()))
        if work.optimizer is not None:
            handles.append(work.optimizer.register_state_dict_pre_hook(lambda *_: self.gather()))
            handles.append(work.optimizer.register_load_state_dict_pre_hook(lambda *_: self.gather()))
        return handles

    def _measured(self, batch: Any) -> Any:
        """A step whose peak is measured: what it held is compared with what was projected."""
        import torch

        runner = self._now
        if runner.work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            loss = runner.step(batch)
            torch.cuda.synchronize()
            self._cleared = torch.cuda.memory_stats().get("num_alloc_retries", 0) - before
            self.measured = int(torch.cuda.max_memory_reserved())
            return loss
        loss, recorder = measure(runner, batch)
        self.measured = max(recorder.peaks().values())
        return loss

    def _guarded(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run; after an out-of-memory failure put everything back, plan tighter, and run again."""
        while True:
            runner = self._now
            before = Snapshot(runner)
            failure = ""
            try:
                return run()
            except BaseException as error:  # an interrupt too leaves everything as it was
                if runner.half_updated and is_out_of_memory(error):
                    raise OutOfMemory(
                        "memory ran out in the middle of the update and again when it was tried again: some parameters are "
                        "updated, the rest is not; load the last saved state"
                    ) from error
                if runner.half_updated:
                    raise
                if not is_out_of_memory(error):
                    runner.roll_back()
                    before.restore()
                    raise
                failure = str(error).splitlines()[0] if str(error) else type(error).__name__
            clear_up()
            runner.roll_back()
            before.restore()
            self._tighten(failure)

    def _make_room(self, allowed: int) -> None:
        """The step fits only because the allocator clears its cache in every step: a little smaller may be faster."""
        said = f"the allocator cleared its cache {self._cleared} times in a step"
        try:
            plan, choice = self._replan(int(allowed * TIGHTER["cuda"]))
        except BudgetError:
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"{said}; no smaller plan exists"))
            return
        if plan.slow_down > SLOWER * self.plan.slow_down:
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"{said}; smaller plans are slower still"))
            return
        notes = (*plan.notes, f"{said}: tightened")
        self._take(replace(plan, budgets=self.plan.budgets, notes=notes), choice)

    def _relax(self, allowed: int) -> None:
        """The steps held less than projected: a faster plan may have room."""
        assert self.measured is not None
        pool = self.plan.budgets[0].pool
        projected = self.plan.peak(pool)
        if not self.plan.remedies or self.measured >= ROOMY * projected:
            return
        plan, choice = self._replan(allowed * projected // max(1, self.measured))
        said = f"the steps held {format_bytes(self.measured)} of {format_bytes(projected)} projected"
        if plan.slow_down >= FASTER * self.plan.slow_down:
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"{said}; no plan with more room is faster"))
            return
        notes = (*plan.notes, f"{said}: relaxed from {self.plan.slow_down:.2f}x to {plan.slow_down:.2f}x")
        self._take(replace(plan, budgets=self.plan.budgets, notes=notes), choice)

    def _take(self, plan: FitPlan, choice: Choice) -> None:
        """Go on with another plan."""
        runner = self._now
        self.plan, self.choice = plan, choice
        following = Runner(runner.work, choice, runner.store, rows=self._rows, parcels=runner.parcels)
        following.settle()
        self._runner = following

    def _tighten(self, failure: str) -> None:
        pool = self.plan.budgets[0].pool
        goal = int(min(self.plan.peak(pool), self.plan.budgets[0].bytes) * TIGHTER[self._now.work.device])
        try:
            plan, choice = self._replan(goal)
        except BudgetError as error:
            raise OutOfMemory(
                f"a step passed its memory ({failure}) and no tighter plan exists: {error}. Nothing was changed: weights, "
                "optimizer and random state are those before the step"
            ) from error
        warnings.warn(
            f"outsize: a step passed its memory ({failure}); nothing was lost. The plan now holds "
            f"{format_bytes(plan.peak(pool))} instead of {format_bytes(self.plan.peak(pool))}; a batch that failed runs again",
            stacklevel=4,
        )
        notes = (*plan.notes, f"tightened: {failure}")
        self._take(replace(plan, budgets=self.plan.budgets, notes=notes), choice)


class Snapshot:
    """Random state and written buffers before a step."""

    def __init__(self, runner: Runner) -> None:
        import torch

        self._random = torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if runner.work.device == "cuda" else None
        written = runner.work.written
        buffers = [module._buffers[name] for module, names in written.items() for name in names]
        self._buffers = list(zip(buffers, copy_all(buffers), strict=True))

    def restore(self) -> None:
        """Put them back."""
        import torch

        torch.random.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)


def measure(runner: Runner, batch: Any) -> tuple[Any, Recorder]:
    """One step on the CPU with every storage counted."""
    work = runner.work
    recorder = Recorder(work.device)
    state = (value for s in work.optimizer.state.values() for value in s.values())
    import torch

    recorder.hold(t for t in (*work.model.parameters(), *work.model.buffers(), *state) if isinstance(t, torch.Tensor))
    recorder.hold(batches.tensors_of(batch).values())
    runner.phase = recorder.phase
    try:
        with recorder.watching(work.model):
            loss = runner.step(batch)
    finally:
        runner.phase = lambda name: None
    return loss, recorder


def call_model(model: Any, part: Any) -> Any:
    """Run a model on a slice: keywords from a mapping, arguments from a tuple, else the slice itself."""
    from collections.abc import Mapping

    if isinstance(part, Mapping):
        return model(**part)
    return model(*part) if isinstance(part, tuple | list) else model(part)
