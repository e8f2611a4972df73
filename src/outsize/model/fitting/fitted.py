"""A step that stays inside its budget, as the user holds it.

In: a plan, a choice, and a runner that obeys it and can take a step back. Out: `Fitted`: `step`, `backward`, `infer`, `undo`. The
first steps are measured: a plan that held more than its budget is made tighter, one that held much less is made faster. When
memory runs out, everything is put back outside the `except` block, where the failed frames no longer hold their tensors, the
plan is made tighter, and the same batch runs again. A hosted step that updates parameters in the backward pass has no way back
in the memory there is, which is why it was rehearsed before.
"""

from __future__ import annotations

import array
import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.faster_plans import FasterPlans
from outsize.model.fitting.move.out_of_memory import clear_up, in_a_line, is_out_of_memory
from outsize.model.fitting.plan_in_use import PlanInUse, Planned
from outsize.model.fitting.run.meter import Meter
from outsize.model.fitting.update.gradient_sink import Deferred, loss_of
from outsize.model.fitting.update.optimizer_subset import needs_closure, state_of
from outsize.model.fitting.update.undo_log import Snapshot
from outsize.model.torch_port.objects import add_loading_hook, add_saving_hook

WORLD = ("autocast", "model.forward", "gradients of an earlier backward pass")
"""What a plan depends on and a user may change later."""

WORLDS = 6
"""Changes of it that a fitted step follows; after so many it only measures."""

Renew = Callable[[int], Planned]
"""(calls of `backward` before the user steps) -> a plan by somebody who has looked at everything anew."""


class Fitted:
    """What `outsize.fit` returns: a plan bound to a model, until `undo`."""

    def __init__(
        self, used: PlanInUse, rows: int, *, seconds: float | None = None, renew: Renew | None = None,
        call: Callable[[Any, Any], Any] | None = None, given: Any = None, end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.peaks: array.array[int] = array.array("q")
        """Peak of every step that was measured so far."""
        self.seconds = seconds
        """Seconds of the rehearsal of a hosted step; None where there was none."""
        self._used = used
        runs, hosted = used.runner is not None, used.choice.hosted
        self._resting = [m for m in self._work.model.modules() if not m.training] if runs else []
        """Modules in eval mode while the plan was made: it knows nothing of what they draw or write otherwise."""
        self._given, self._end = given, end
        """The model as the user gave it, and what makes it that again."""
        self._undone: Any = None
        """The model that was given back."""
        kind = self._work.device if runs else ""
        steps = 0 if (hosted and kind == "cpu") or call is not None else 3 if kind == "cuda" else 1
        # on a card three: the first makes the optimizer's state and the cache settles
        self._faster = FasterPlans(steps)
        self._meter = Meter("" if hosted and kind == "cpu" else kind)
        self._windows: list[int] = []
        """Peaks of the parts of a step that is not over."""
        self._over = ""
        """Why a tighter plan is wanted before the next step."""
        self._world = self._look_at_world() if runs else ()
        """What of the user's surroundings the plan was made for."""
        self._plans: dict[tuple[Any, ...], Planned] = {}
        """Surroundings -> the plan for them."""
        self._stepping = False
        """The user's own `optimizer.step()` runs."""
        self._running = False
        """A step of ours runs: what it does to the optimizer is not the user's."""
        self._aside: list[tuple[Any, Any]] = []
        """Gradients of parameters that are updated while it runs."""
        self._renew = renew
        self._call = call or batches.call_model
        self._rows = rows
        self._handles = self._hook() if runs else []

    @property
    def plan(self) -> FitPlan:
        """How a step runs, with its projected peaks; another one when another plan is taken."""
        return self._used.plan

    @property
    def choice(self) -> Choice:
        return self._used.choice

    @property
    def measured(self) -> int | None:
        """Highest peak of this plan's steps by the allocator's own account, in bytes on the device; None: not measured yet."""
        return self._used.measured

    def __repr__(self) -> str:
        return str(self.plan)

    def step(self, batch: Any) -> Any:
        """One training step: gradients of the whole batch, one update. Returns the loss, detached, on the device."""
        self._ready(batch)
        if self._work.optimizer is None:
            raise InputError("this model was fitted without an optimizer: use infer(batch), or fit it with one")
        self._require_loss()
        self._follow_world()
        timed = self._faster.watched and self._work.device == "cuda" and not self.choice.hosted
        run = (lambda: self._faster.time(self._now, batch)) if timed else (lambda: self._now.step(batch))
        loss = self._guarded(run, batch)
        self._judge()
        if self._faster.watched:
            self._faster.watched -= 1
            if self._faster.watched == 0 and not self.choice.hosted:
                whole = self._work.axes.count(batch) == self._rows
                self._faster.look(self._used, batch, whole=whole, on_card=self._work.device == "cuda")
        return loss

    def backward(self, batch: Any) -> Any:
        """Gradients of the whole batch, added to `.grad` as `loss.backward()` does; you step the optimizer yourself.

        Those of a hosted model are in host memory.
        """
        self._ready_for_own_step(batch)
        self._follow_world()
        loss = self._guarded(lambda: self._now.backward(batch), batch)
        self._end_backward()
        return loss

    def loss(self, batch: Any) -> Any:
        """The loss of the whole batch; its `backward()` adds the gradients to `.grad`, as with any other loss.

        So it may be divided, scaled, or given to whoever calls `backward()`: accelerate, Lightning. The passes run in this call.
        """
        self._ready_for_own_step(batch)
        if self.choice.hosted:
            raise InputError("gradients of a model on the host go there as they come: call backward(batch), then step")
        self._follow_world()
        sink = Deferred(self._work.model, self._work.scaler)
        value = self._guarded(lambda: self._now.collect(batch, sink), batch)
        self._end_backward()
        return loss_of(value, sink)

    def infer(self, batch: Any, call: Callable[[Any, Any], Any] | None = None) -> Any:
        """The model's output for a batch, without gradients, inside the budget.

        `call(model, batch)` runs the model, also on slices; left out, as planned: a dict is passed as keywords, a tuple as
        arguments.
        """
        self._ready(batch)
        out = self._guarded(lambda: self._now.infer(batch, call or self._call), batch)
        if self._work.loss is None:
            self._judge()
        return out

    def keep_plan(self) -> None:
        """The plan has served before: no faster one is looked for."""
        self._faster.looked = True

    def undo(self) -> Any:
        """The model as it was given, with the weights it has now; nothing happens where that is done already."""
        if self._used.runner is None:
            return self._undone
        runner, model = self._now, self._work.model
        stays = runner.weights.stays
        with self._whole():
            runner.close(home=not stays)
            self._used.end()
        if stays:
            warnings.warn(f"outsize: {stays}", stacklevel=2)
        for handle in self._handles:
            handle.remove()
        if self._end is not None:
            self._end()
        self._handles, self._undone = [], model if self._given is None else self._given
        return self._undone

    def gather(self) -> None:
        """Bring home what waits elsewhere; the next step sends it away again."""
        with self._whole():
            self._now.gather()

    def count_labels(self, batch: Any) -> int:
        """Labels over which the loss of a batch is a mean; 0 where it is no such mean, or nobody knows."""
        return int(self._work.normaliser.measure(batch))

    # inside

    @property
    def _now(self) -> Any:
        if self._used.runner is None:
            raise InputError("this fit is over (undo() or dry_run=True): call outsize.fit again")
        return self._used.runner

    @property
    def _work(self) -> Any:
        return self._now.work

    def _ready(self, batch: Any) -> None:
        self._work.axes.count(batch)
        self._now.weights.check_model()

    def _ready_for_own_step(self, batch: Any) -> None:
        self._ready(batch)
        self._require_loss()
        taken = self.choice.elsewhere
        if taken and not self.choice.hosted:
            raise InputError(
                f"this plan takes over the optimizer ({', '.join(taken)}), so that gradients do not stay: call step(batch), or "
                "fit with own_step=True"
            )

    def _end_backward(self) -> None:
        # nobody tells of the step's end
        if not self._stepping and (self._work.optimizer is None or not self._work.backwards):
            self._judge()

    def _require_loss(self) -> None:
        if any(module.training for module in self._resting):
            raise InputError(
                "modules that were in eval mode when the model was fitted are in train mode now, and may draw random numbers or "
                "take statistics that the plan does not know: call model.train(), then outsize.fit"
            )
        if self._work.loss is None:
            raise InputError(
                "this model was fitted for inference: use infer(batch), or fit it with a loss and own_step=True"
            )

    def _hook(self) -> list[Any]:
        """Whoever saves or loads finds what that takes at home; a part may be saved by itself."""
        work = self._work
        names = ("_before_saving", "_after_saving", "_before_loading", "_after_loading")
        before, after, loading, loaded = (Hook(self, name) for name in names)
        handles = []
        for module in work.model.modules():  # under private names, which every torch has
            handles += [
                module.register_state_dict_pre_hook(before),
                add_saving_hook(module, after),
                add_loading_hook(module, loading),
            ]
        if work.optimizer is not None:
            handles += [
                work.optimizer.register_state_dict_pre_hook(before),
                work.optimizer.register_state_dict_post_hook(after, prepend=True),  # the user's find contents
                work.optimizer.register_load_state_dict_pre_hook(loading),
                work.optimizer.register_load_state_dict_post_hook(loaded, prepend=True),
            ]
        if work.optimizer is not None and work.backwards and not self.choice.hosted:
            handles += [
                work.optimizer.register_step_pre_hook(Hook(self, "_before_own_step")),
                work.optimizer.register_step_post_hook(Hook(self, "_after_own_step")),
            ]
        return handles

    def _before_saving(self, thing: Any, *_: Any) -> None:
        self._now.weights.before_saving(thing)

    def _after_saving(self, thing: Any, saved: Any, *_: Any) -> Any:
        return self._now.weights.after_saving(thing, saved)

    def _before_loading(self, thing: Any, saved: Any, *_: Any) -> Any:
        return self._now.weights.before_loading(thing, saved)

    def _after_loading(self, optimizer: Any) -> None:
        self._now.weights.after_loading()

    def _guarded(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run; after an out-of-memory failure put everything back, plan tighter, and run again."""
        torch.clear_autocast_cache()  # of another step: these copies would be there, and not in the plan
        with self._whole():
            return self._run(run, batch)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """An interrupt waits until what is moved has arrived."""
        interrupts = self._now.interrupts
        with interrupts.held():
            yield
        interrupts.let_go()

    def _run(self, run: Callable[[], Any], batch: Any) -> Any:
        while True:
            runner = self._now
            before = Snapshot(runner.work)
            failure, mine = "", False
            self._running, runner.phase = True, self._meter.flush
            runner.begin()
            try:
                runner.leave_home()
                if self.measured is None and not self._windows and self._work.device == "cuda":
                    torch.cuda.empty_cache()  # what was let go of since the plan was made would count as held
                reset = self._faster.watched > 0 and not self.choice.hosted
                mine = self._meter.begin(lambda: self._held(batch), reset=reset)
                result = run()
            except BaseException as error:  # an interrupt too leaves everything as it was
                if runner.half_updated:
                    self._half_done(error, before)
                    raise
                if runner.done:
                    runner.end()
                    error.add_note("the step was whole before this error: its update, or its gradients, stay")
                    raise
                if not is_out_of_memory(error):
                    runner.roll_back()
                    before.restore()
                    raise
                failure = in_a_line(error)
            else:
                if mine:
                    self._close_window()
                return result
            finally:
                self._running, runner.phase = False, ignore
                if mine:
                    self._meter.end()
            clear_up()
            runner.roll_back()
            before.restore()
            self._tighten(failure)

    def _tighten(self, failure: str, level: int = 5) -> None:
        """Take a tighter plan; `level`: how far up the user's line is."""
        pool = self.plan.pool
        held = self.plan.peak(pool)
        try:
            if not self._faster.take_back(self._used, failure):
                self._used.tighten(failure)
        except (BudgetError, OutOfMemory) as error:
            raise OutOfMemory(
                f"a step passed its memory ({failure}) and no tighter plan exists: {error}. Nothing was changed: weights, "
                "optimizer and random state are those before the step"
            ) from error
        warnings.warn(
            f"outsize: a step passed its memory ({failure}); nothing was lost. The plan now holds "
            f"{format_bytes(self.plan.peak(pool))} instead of {format_bytes(held)}; a batch that failed runs again",
            stacklevel=level,
        )

    def _held(self, batch: Any) -> list[Any]:
        work = self._work
        weights = list(work.model.parameters())
        gradients = [weight.grad for weight in weights if weight.grad is not None] if work.backwards else []
        found = (
            *weights,
            *work.model.buffers(),
            *gradients,
            *state_of(work.optimizer),
            *self._now.weights.packed(),
            *batches.tensors_of(batch).values(),
        )
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]

    def _close_window(self) -> None:
        peak = self._meter.end()
        if peak is not None:
            self._windows.append(peak)

    def _judge(self) -> None:
        """A step is over: what it held is compared with what was projected and with what is allowed."""
        if not self._windows:
            return
        held, allowed = max(self._windows), self.plan.budgets[0].bytes
        self._windows = []
        self.peaks.append(held)
        self._used.measured = max(self.measured or 0, held)
        if held <= allowed or self.choice.hosted:
            self._used.own_up()
            return
        self._over = f"a step held {format_bytes(held)} of {format_bytes(allowed)}"
        if not self._work.backwards:  # the step of a user who steps is not over before the optimizer has returned
            self._keep_inside()

    def _keep_inside(self) -> None:
        """A tighter plan, where a step has held too much."""
        over, self._over = self._over, ""
        if over:
            with self._whole():
                self._tighten(over)

    # a user who steps the optimizer

    def _before_own_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """The update runs here, a few parameters at a time, as it was planned; what follows finds nothing to do."""
        if self._running:
            return None
        self._close_window()  # of a step that has failed
        self._stepping = True
        self._meter.begin(lambda: self._held(()), reset=False)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if needs_closure(optimizer):
            return None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {"closure": lambda: loss}
        self._running = True
        try:
            self._aside = self._now.own_update()
        finally:
            self._running = False
        return args, kwargs

    def _after_own_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._running:
            return
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside, self._stepping = [], False
        self._faster.watched = max(0, self._faster.watched - 1)
        self._close_window()
        self._now.interrupts.let_go()
        self._judge()

    # what changes around the step

    def _look_at_world(self) -> tuple[Any, ...]:
        """What a user may change between steps and a plan depends on: `WORLD`, in this order. Gradients that were there once may
        be there again."""
        work = self._work
        lower = torch.get_autocast_dtype(work.device) if torch.is_autocast_enabled(work.device) else None
        backwards = work.backwards
        if backwards == 1 and any(parameter.grad is not None for parameter in work.model.parameters()):
            backwards = 2
        return lower, work.model.__dict__.get("forward"), backwards

    def _follow_world(self) -> None:
        """Take another plan where the step is another than the one that was planned: the one it had before, or a new one."""
        self._keep_inside()
        world = self._look_at_world()
        late = [name for name, now, then in zip(WORLD, world, self._world, strict=True) if now != then]
        if not late or self._renew is None or len(self._plans) == WORLDS:
            return
        held = self.plan.peak(self.plan.pool)
        with contextlib.suppress(OutOfMemory):  # weights without room at home cannot be compared, and are not
            self._now.gather()
        self._plans[self._world] = self._used.planned
        known = self._plans.get(world)
        if known is None:
            replan, reopen, plan, choice = self._renew(world[-1])
            said = f"planned again for {' and '.join(late)}, which came after the first plan"
            known = replan, reopen, replace(plan, notes=(*plan.notes, said)), choice
            allowed, new = self.plan.budgets[0].bytes, plan.peak(plan.pool)
            warnings.warn(
                f"outsize: {said}: a step holds {format_bytes(new)} of {format_bytes(allowed)}, and not {format_bytes(held)}",
                stacklevel=3,
            )
        self._world = world
        self._used.take_planned(known)

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


def ignore(phase: str) -> None:
    """Nobody wants to know of phases."""


class Hook:
    """A hook that tells a fitted step; copies of the model, and files of it, get one that does nothing."""

    ours = True

    def __init__(self, fitted: Fitted, name: str) -> None:
        self._fitted = fitted
        self._name = name

    def __call__(self, *given: Any) -> Any:
        return getattr(self._fitted, self._name)(*given)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, and such a file needs nothing of ours
