"""Plans a step of JAX for one batch: learn, search, check, describe.

In: a frozen request. Out: `Planned`: a plan, a choice and its compilation. A plan whose gradients differ from the plain ones
on a few samples is not used: the remedy at fault is left out, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outsize.core.errors import BudgetError, OutsizeError
from outsize.core.fitting import FitPlan
from outsize.core.memory import Allowance
from outsize.core.units import format_bytes
from outsize.model.jax.compiled import find_device
from outsize.model.jax.fitting.batches import Axes, read_axes
from outsize.model.jax.fitting.choice import Choice
from outsize.model.jax.fitting.describe import describe
from outsize.model.jax.fitting.learn import Learnt, learn, same
from outsize.model.jax.fitting.search import Candidate, Search
from outsize.model.jax.fitting.slices import Loss
from outsize.model.jax.fitting.step import Work, gradients_for, shapes_of
from outsize.model.jax.private_parts import require_jax


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    params: Any
    loss: Loss
    optimizer: Any
    """None where the user updates the parameters."""
    device: Any
    allowance: Allowance
    host: int | None
    """Bytes of page-locked memory of the host; None where they are not counted."""
    without: frozenset[str]
    batch_axis: Any
    real: bool
    """Arrays have contents, so that gradients can be compared."""
    timed: bool = False
    """First steps may be timed to find the fastest plan."""


class Planned(NamedTuple):
    """A plan that was settled."""

    plan: FitPlan
    choice: Choice
    candidate: Candidate
    axes: Axes
    work: Work


def plan(request: Request, params: Any, batch: Any) -> list[Planned]:
    """The plan for a batch, and those that are to be timed beside it; a `BudgetError` with the smallest budget that works where
    none fits."""
    axes = read_axes(batch, request.batch_axis)
    learnt = _learn(request, params, batch, axes)
    notes = [learnt.why if learnt.rule is not None else f"not used: slices: {learnt.why}"]
    forbidden = request.without | (frozenset() if learnt.rule is not None else frozenset({"slices"}))
    while True:
        work = Work(request.loss, request.optimizer, learnt.rule or learnt.plain, request.device)
        search = Search(work, shapes_of(work, params, batch, axes), forbidden, request.host, request.timed)
        found = search.find(request.allowance.bytes)
        if found is None:
            raise _refused(search, request.allowance, notes)
        others = search.others(found, request.allowance.bytes)
        equal = _equal(request, work, params, batch, axes, {one.choice.kind for one in (found, *others)})
        if found.choice.kind in equal:
            return [
                Planned(describe(search, one, request.allowance, notes), one.choice, one, axes, work)
                for one in (found, *others)
                if one.choice.kind in equal
            ]
        notes.append("not used: checkpoint: its gradients are not the plain ones on a few samples")
        forbidden |= {"checkpoint"}


def _learn(request: Request, params: Any, batch: Any, axes: Axes) -> Learnt:
    if "slices" in request.without or not request.real:
        few = learn(params, request.loss, batch, replace(axes, rows=1))
        why = "you left them out" if "slices" in request.without else "the arrays have no contents to try them on"
        return Learnt(None, why, few.plain)
    return _tried(request, params, batch, lambda params, batch: learn(params, request.loss, batch, axes))  # type: ignore[no-any-return]


def _tried(request: Request, params: Any, batch: Any, trial: Callable[[Any, Any], Any]) -> Any:
    """Run a trial of a few samples on the host, whose gradients take nothing of a card then; there, if it only runs there."""
    host = None if request.device.platform == "cpu" else find_device("cpu")
    if host is None:
        return trial(params, batch)
    jax = require_jax()
    try:
        with jax.default_device(host):
            return trial(*jax.device_put((params, batch), host))
    except OutsizeError:
        raise
    except Exception:  # a kernel of the card alone
        return trial(params, batch)


def _equal(
    request: Request, work: Work, params: Any, batch: Any, axes: Axes, kinds: set[tuple[int, str]]
) -> set[tuple[int, str]]:
    """The kinds whose gradients are the plain ones on two samples; slices were compared when they were learnt."""
    again = {kind for kind in kinds if kind != Choice().kind}
    if not request.real or not again:
        return kinds
    jax = require_jax()
    small = replace(axes, rows=min(2, axes.rows))

    def compare(params: Any, batch: Any) -> set[tuple[int, str]]:
        few = axes.take(batch, [0, axes.rows - 1][: axes.rows])

        def gradients(segments: int = 0, kept: str = "") -> Any:
            return jax.jit(gradients_for(work, small, Choice(segments=segments, kept=kept)))(params, few)

        plain = gradients()
        return {kind for kind in again if same(plain, gradients(*kind))}

    return kinds - again | _tried(request, params, batch, compare)  # type: ignore[no-any-return]


def _refused(search: Search, allowance: Allowance, notes: list[str]) -> OutsizeError:
    least = search.least()
    shown = describe(search, least, allowance, notes)
    return BudgetError(
        f"{shown.name}: no plan holds less than {format_bytes(least.peak)} of {allowance.pool}, the budget is "
        f"{format_bytes(allowance.bytes)}; the smallest budget that works is {format_bytes(least.peak)} ({least.peak} bytes: "
        f"{least.choice})",
        needed=least.peak, budget=allowance.bytes, smallest=least.peak, culprit=shown.steps[0].name,
        plan=replace(shown, smallest=least.peak),
    )  # fmt: skip
