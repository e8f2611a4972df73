"""A step of JAX that stays inside its budget, as the user holds it.

In: a plan and its compilation. Out: `Fitted`: `init`, `step`, `gradients`. Parameters and state are donated: a step writes
its results where they were. A batch of another size gets a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outsize.core.errors import InputError
from outsize.core.fitting import FitPlan
from outsize.model.jax.arguments import shape_of
from outsize.model.jax.fitting.choice import Choice
from outsize.model.jax.fitting.planner import Planned
from outsize.model.jax.fitting.step import is_sent, placed
from outsize.model.jax.fitting.trial import Trial
from outsize.model.jax.private_parts import require_jax

Plan = Callable[[Any, Any], Planned]
"""(params, batch) -> a plan."""


class Fitted:
    """What `outsize.fit` returns for a loss of JAX."""

    def __init__(self, planned: Sequence[Planned], optimizer: Any, shapes: Any, plan: Plan, runs: bool) -> None:
        self._optimizer, self._plan, self._runs = optimizer, plan, runs
        self._plans: dict[Any, Planned] = {shapes: planned[0]}
        """Shapes of params and batch -> the plan for them."""
        self._trials: dict[Any, Trial] = {shapes: Trial(planned)} if len(planned) > 1 else {}
        """Shapes -> plans that are being timed."""
        self._now = self._trials[shapes].now if self._trials else planned[0]

    @property
    def plan(self) -> FitPlan:
        """How a step runs, with its exact peak; that of the batch that ran last."""
        return self._now.plan

    @property
    def choice(self) -> Choice:
        return self._now.choice

    @property
    def settled(self) -> bool:
        """True when no more steps are timed to find the fastest plan."""
        return not self._trials

    @property
    def measured(self) -> int | None:
        """Most bytes in use on the device since the program began, where its backend counts them (cards do, CPUs do not)."""
        stats = self._now.work.device.memory_stats()
        return None if not stats else int(stats["peak_bytes_in_use"])

    def __repr__(self) -> str:
        return str(self.plan)

    def init(self, params: Any) -> Any:
        """The optimizer's first state."""
        if self._optimizer is None:
            raise InputError("this was fitted without an optimizer: give one to outsize.fit, or keep your own state")
        state = self._optimizer.init(params)
        return self._placed(state) if self._now.choice.state_away else state

    def step(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One training step: (params, state, loss). What was given for params and state is donated, so use the new ones."""
        if self._now.work.optimizer is None:
            raise InputError("this was fitted with own_step=True: call gradients(params, batch) and update yourself")
        key = self._planned(params, batch)
        made: tuple[Any, Any, Any] = self._run(key, (params, self._placed(state), batch))
        return made

    def _placed(self, state: Any) -> Any:
        """Optimizer state where the plan in use has it."""
        jax = require_jax()
        leaves = [leaf for leaf in jax.tree_util.tree_leaves(state) if is_sent(leaf)]
        on_host = [getattr(getattr(leaf, "sharding", None), "memory_kind", None) == "pinned_host" for leaf in leaves]
        away = self._now.choice.state_away
        if all(one == away for one in on_host):
            return state
        return placed(state, self._now.work.device, "pinned_host" if away else "device")

    def gradients(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """(loss, gradients) of the whole batch; you update the parameters yourself."""
        if self._now.work.optimizer is not None:
            raise InputError(
                "this plan updates the parameters itself: call step(params, state, batch), or fit with own_step=True"
            )
        made: tuple[Any, Any] = self._run(self._planned(params, batch), (params, batch))
        return made

    def _planned(self, params: Any, batch: Any) -> Any:
        """The shapes of what is given, for which there is a plan now."""
        if not self._runs:
            raise InputError(
                "this was only planned (dry_run=True, or shapes without contents): call outsize.fit with arrays"
            )
        key = key_of(params, batch)
        if key not in self._plans:
            self._plans[key] = self._plan(params, batch)
        self._now = self._trials[key].now if key in self._trials else self._plans[key]
        return key

    def _run(self, key: Any, arguments: tuple[Any, ...]) -> Any:
        """The plan in use on its arguments, timed where others are beside it."""
        trial = self._trials.get(key)
        if trial is None:
            return self._now.candidate.compiled.program(*arguments)
        made = trial.run(arguments)
        if trial.over:
            self._now = self._plans[key] = trial.fastest()
            del self._trials[key]
        return made


def key_of(params: Any, batch: Any) -> Any:
    jax = require_jax()
    leaves, tree = jax.tree_util.tree_flatten((params, batch))
    return tree, tuple((tuple(shape.shape), str(shape.dtype)) for shape in map(shape_of, leaves))
