"""`outsize.shrink`: the user's model, data and loss in; a model of the asked size with the lowest measured loss out.

Nothing is changed in the user's model. Every candidate is built from a copy that shares its tensors, so that beside the model
only what a candidate makes new is held.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outsize.compression.evaluation import default_loss, read_batches, require_loss
from outsize.compression.method import Candidate, Method, Subject
from outsize.compression.methods import choose
from outsize.compression.search import build, try_alone
from outsize.compression.sets import find_nearest, measure_sets
from outsize.compression.shrunk import Shrunk
from outsize.compression.size import read_size
from outsize.compression.weights import count_bytes, share
from outsize.core.errors import BudgetError, InputError
from outsize.core.shrinking import Shrinking, ShrinkSet
from outsize.core.units import format_bytes
from outsize.model.torch_port.parts import require_torch


def shrink(
    model: Any,
    data: Any = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    to: int | str = "50%",
    methods: str | Sequence[str] | None = None,
    within: float = 0.01,
    dry_run: bool = False,
) -> Any:
    """A model of the size `to` whose loss on `data` rises by at most the share `within`, or as little as can be found.

    `data` is a list or loader of batches; `loss(model, batch)` gives a scalar, or (total, count). `to` is a share such as
    `"50%"`, or bytes. `methods` names some of the methods; None tries all. `dry_run` gives the plan only.
    """
    chosen_methods = choose(methods)
    subject, notes = _read_subject(model, data, loss)
    if not within >= 0:
        raise InputError(f"within is {within}: give the share by which the loss may rise, such as 0.01")
    before = count_bytes(subject.model)
    target = read_size(to, before)
    plain = require_loss(subject)
    candidates, unused = _find_candidates(subject, chosen_methods)
    trials, failures = try_alone(subject, candidates, plain)
    sets = measure_sets(subject, trials, target)
    plan = Shrinking(
        before=before, target=target, loss=plain.loss, within=within, seconds=plain.seconds, batches=len(subject.batches),
        candidates=tuple(trial.noun for trial in trials), sets=tuple(one.noun for one in sets),
        chosen=None, notes=(*notes, *unused, *failures),
    )  # fmt: skip
    taken = next((one for one in sets if one.noun.bytes <= target and one.noun.best_loss <= plan.allowed), None)
    if taken is None:
        plan = replace(plan, nearest=find_nearest(subject, trials, target, plan.allowed))
    else:
        plan = replace(plan, chosen=taken.noun)
    if dry_run:
        return plan
    if taken is None:
        raise refusal(plan)
    return Shrunk(model=copy.deepcopy(build(subject, taken.candidates)), plan=plan)


def _read_subject(model: Any, data: Any, loss: Any) -> tuple[Subject, list[str]]:
    """The user's model, data and loss, checked."""
    require_torch("outsize.shrink")
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is {type(model).__name__}: shrink takes a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise InputError(f"loss is {type(loss).__name__}: give a function loss(model, batch)")
    if next(model.parameters(), None) is None:
        raise InputError("the model has no parameters: there is nothing to make smaller")
    batches, more = read_batches(data)
    notes = [f"data has more batches: the first {len(batches)} were measured"] if more else []
    return Subject(model=share(model).eval(), batches=batches, loss=loss or default_loss), notes


def _find_candidates(subject: Subject, methods: Sequence[Method]) -> tuple[list[Candidate], list[str]]:
    """What the methods offer, and which of them find nothing."""
    offered = {method: method.candidates(subject) for method in methods}
    unused = [
        f"{method.name} finds nothing in this model: it needs {method.needs}"
        for method in methods
        if not offered[method]
    ]
    return [one for found in offered.values() for one in found], unused


def refusal(plan: Shrinking) -> BudgetError:
    """Why no set will do, and the nearest one that does."""

    def at(one: ShrinkSet) -> str:
        share = one.bytes / plan.before
        return f"{format_bytes(one.bytes)} ({share:.0%}) with a loss of {one.best_loss:.4g} (was {plan.loss:.4g})"

    wanted = f"{format_bytes(plan.target)} ({plan.target / plan.before:.0%})"
    cheapest, nearest = plan.cheapest, plan.nearest
    if cheapest is not None:
        rise = (cheapest.best_loss - plan.loss) / abs(plan.loss) if plan.loss else math.inf
        message = (
            f"at {wanted} the loss rises by {rise:.2%} and within allows {plan.within:.2%}: the best is {at(cheapest)}"
        )
        if math.isfinite(rise):
            message += f", which within={math.ceil(rise * 1000) / 1000:g} takes"
    else:
        smallest = min(plan.sets, key=lambda one: one.bytes, default=None)
        least = "nothing makes this model smaller" if smallest is None else f"the smallest is {at(smallest)}"
        message = f"{wanted} cannot be reached: {least}"
    size = None if nearest is None else nearest.bytes
    if nearest is not None:
        message += f"; the nearest within the allowed loss is to={size}: {at(nearest)}"
    return BudgetError(message, needed=size, budget=plan.target, smallest=size, plan=plan)
