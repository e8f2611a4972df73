"""What every fitted step shares: the model's hooks, and a guard that loses nothing when memory runs out.

In: a plan and a runner that can take a step back. Out: the base of `Fitted`. A failure puts everything back outside the
`except` block, where the failed frames no longer hold their tensors, makes the plan tighter, and runs the same batch again.
"""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.noun import Known
from outsize.core.plan import Peak
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.out_of_memory import clear_up, in_a_line, is_out_of_memory
from outsize.model.fitting.update.optimizer_subset import copy_all
from outsize.model.torch_port.objects import add_loading_hook, add_saving_hook, buffer_table


class Guarded(abc.ABC):
    """A plan bound to a model, until `undo`."""

    def __init__(self, plan: FitPlan, choice: Choice, runner: Any) -> None:
        self.plan = plan
        """How a step runs, with its projected peaks; replaced when another plan is taken."""
        self.choice = choice
        """The decisions as plain data."""
        self.measured: int | None = None
        """Peak on the device in bytes, counted as the plan counts; None before anything was measured."""
        self._runner = runner
        self._resting = [m for m in self._work.model.modules() if not m.training] if runner is not None else []
        """Modules in eval mode while the plan was made: it knows nothing of what they draw or write otherwise."""
        self._handles = self._hook() if runner is not None else []
        self._undone: Any = None
        """The model that was given back."""

    def __repr__(self) -> str:
        return str(self.plan)

    def undo(self) -> Any:
        """The model as it was given, with the weights it has now; nothing happens where that is done already."""
        if self._runner is None:
            return self._undone
        model = self._work.model
        self._end()
        for handle in self._handles:
            handle.remove()
        self._handles, self._runner, self._undone = [], None, model
        return model

    def gather(self) -> None:
        """Bring home what waits elsewhere; the next step sends it away again."""
        self._now.gather()

    def count_labels(self, batch: Any) -> int:
        """Labels over which the loss of a batch is a mean; 0 where it is no such mean, or nobody knows."""
        return int(self._work.normaliser.measure(batch))

    @abc.abstractmethod
    def _end(self) -> None:
        """Let go of everything but the model."""

    @abc.abstractmethod
    def _go_tighter(self, failure: str) -> None:
        """Take a plan that holds less; a `BudgetError` where there is none."""

    @abc.abstractmethod
    def _half_done(self, error: BaseException, before: Snapshot) -> None:
        """A step failed with some parameters updated and others not: say so, as an error of its own or on this one."""

    @property
    def _now(self) -> Any:
        if self._runner is None:
            raise InputError("this fit is over (undo() or dry_run=True): call outsize.fit again")
        return self._runner

    @property
    def _work(self) -> Any:
        return self._now.work

    def _ready(self, batch: Any) -> None:
        batches.count_rows(batch)
        _ = self._now

    def _ready_to_train(self, batch: Any) -> None:
        self._ready(batch)
        if self._work.optimizer is None:
            raise InputError("this model was fitted without an optimizer: use infer(batch), or fit it with one")
        self._require_loss()

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
        return handles

    def _before_saving(self, thing: Any, *_: Any) -> None:
        self._now.weights.before_saving(thing)

    def _after_saving(self, thing: Any, saved: Any, *_: Any) -> Any:
        return self._now.weights.after_saving(thing, saved)

    def _before_loading(self, thing: Any, saved: Any, *_: Any) -> Any:
        return self._now.weights.before_loading(thing, saved)

    def _after_loading(self, optimizer: Any) -> None:
        self._now.weights.after_loading()

    def _guarded(self, run: Callable[[], Any]) -> Any:
        """Run; after an out-of-memory failure put everything back, plan tighter, and run again."""
        while True:
            runner = self._now
            before = Snapshot(runner.work)
            failure = ""
            try:
                result = run()
            except BaseException as error:  # an interrupt too leaves everything as it was
                if runner.half_updated:
                    self._half_done(error, before)
                    raise
                if not is_out_of_memory(error):
                    runner.roll_back()
                    before.restore()
                    raise
                failure = in_a_line(error)
            else:
                runner.interrupts.let_go()
                return result
            clear_up()
            runner.roll_back()
            before.restore()
            self._tighten(failure)

    def _own_up(self) -> None:
        """A step held more than projected, though not more than allowed: from now on the plan says what it held."""
        pool, held = self.plan.pool, self.measured
        projected = self.plan.peak(pool)
        if held is None or held <= projected:
            return
        highest = max(self.plan.steps, key=lambda step: step.peak(pool))
        beside = (peak for peak in highest.peaks if peak.pool != pool)
        measured = replace(highest, peaks=(Peak(pool=pool, bytes=held, known=Known.EXACT), *beside))
        self.plan = replace(
            self.plan, steps=tuple(measured if step is highest else step for step in self.plan.steps),
            notes=(*self.plan.notes, f"a step held {format_bytes(held)} where {format_bytes(projected)} were projected"),
        )  # fmt: skip

    def _tighten(self, failure: str) -> None:
        pool = self.plan.pool
        held = self.plan.peak(pool)
        try:
            self._go_tighter(failure)
        except (BudgetError, OutOfMemory) as error:
            raise OutOfMemory(
                f"a step passed its memory ({failure}) and no tighter plan exists: {error}. Nothing was changed: weights, "
                "optimizer and random state are those before the step"
            ) from error
        warnings.warn(
            f"outsize: a step passed its memory ({failure}); nothing was lost. The plan now holds "
            f"{format_bytes(self.plan.peak(pool))} instead of {format_bytes(held)}; a batch that failed runs again",
            stacklevel=4,
        )


class Hook:
    """A hook that tells a fitted step; copies of the model, and files of it, get one that does nothing."""

    def __init__(self, fitted: Guarded, name: str) -> None:
        self._fitted = fitted
        self._name = name

    def __call__(self, *given: Any) -> Any:
        return getattr(self._fitted, self._name)(*given)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, and such a file needs nothing of ours


class Snapshot:
    """Random state and written buffers before a step."""

    def __init__(self, work: Any) -> None:
        import torch

        self._random = torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if work.device == "cuda" else None
        self._sources = [(source, source.get_state()) for source in work.sources]
        buffers = [buffer_table(module)[name] for module, names in work.written.items() for name in names]
        self._buffers = list(zip(buffers, copy_all(buffers), strict=True))

    def restore(self) -> None:
        """Put them back."""
        import torch

        torch.random.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for source, state in self._sources:
            source.set_state(state)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)


def call_model(model: Any, part: Any) -> Any:
    """Run a model on a slice: keywords from a mapping, arguments from a tuple, else the slice itself."""
    from collections.abc import Mapping

    if isinstance(part, Mapping):
        return model(**part)
    return model(*part) if isinstance(part, tuple | list) else model(part)
