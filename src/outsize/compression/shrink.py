"""`outsize.shrink`: the user's model, data and loss in; a model of the asked size with the lowest measured loss out.

Nothing is changed in the user's model. Every candidate is built from a copy that shares its tensors, so that beside the model
only what a candidate makes new is held.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outsize.compression.card import Goal, read_goal, size_for
from outsize.compression.evaluation import MOST_BATCHES, Measured, default_loss, first_call, read_batches, require_loss
from outsize.compression.healing import NO_FUNCTION, Healing, read_healing
from outsize.compression.judge import Judge, build, interleave, make_judge, take_few
from outsize.compression.method import Subject
from outsize.compression.methods import choose
from outsize.compression.overlap import separate
from outsize.compression.search import Trial, try_alone
from outsize.compression.sets import BuiltSet, choose_set, find_nearest, heal_sets, measure_sets
from outsize.compression.shrunk import Shrunk
from outsize.compression.size import read_size
from outsize.compression.skipped import close_gaps
from outsize.compression.structure import describe_difference
from outsize.compression.training_bytes import count_step
from outsize.compression.weights import share
from outsize.core.errors import BudgetError, InputError
from outsize.core.outcomes.shrinking import Shrinking, ShrinkSet
from outsize.core.units import format_bytes
from outsize.model.torch_port.parts import require_torch

TIGHTER = 4
"""Sizes that are tried for a card."""


def shrink(
    model: Any,
    data: Any = None,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    to: int | str = "50%",
    methods: str | Sequence[str] | None = None,
    within: float = 0.01,
    heal: int = 0,
    training: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
    budget: int | str | None = None,
    of: str = "weights",
    dry_run: bool = False,
) -> Any:
    """A model of the size `to` whose loss on `data` rises by at most the share `within`, or as little as can be found.

    `data` is a list or loader of batches; `loss(model, batch)` gives a scalar, or (total, count). `to` is a share such as
    `"50%"`, bytes, or `"fits rtx3060"`: a step (of training, where `optimizer` is given) then fits there. `methods` names some
    of the methods; None tries all. `dry_run` gives the plan only.

    `of`: what becomes smaller. `"weights"` are parameters and buffers; `"training"` are weights, gradients and optimizer state
    of a step with `optimizer` (AdamW), for which methods that keep optimizer state in 8 or 4 bits are tried too.

    `heal` trains the smaller model for so many steps on `training`, batches that are not those it is measured on: with
    `optimizer`, a function parameters -> optimizer (AdamW), inside `budget` bytes (`outsize.fit`).
    """
    if of not in ("weights", "training"):
        raise InputError(f"of is {of!r}: 'weights' or 'training' (weights, gradients and optimizer state)")
    subject, notes = _read_subject(model, data, loss)
    if isinstance(within, bool) or not isinstance(within, int | float) or not within >= 0:
        raise InputError(f"within is {within!r}: give the share by which the loss may rise, such as 0.01")
    healing = read_healing(heal, training, optimizer, budget)
    goal = read_goal(to, optimizer)
    trains = of == "training" or (goal is not None and optimizer is not None)
    _check_use(subject.model, healing, trains, optimizer, budget)
    chosen_methods = choose(methods, trains)
    if trains:
        subject = replace(subject, count=lambda one: count_step(one, optimizer).total)
    if healing is not None:
        subject, healing, shared = separate(subject, healing)
        notes += shared
    before = subject.count(subject.model)
    target = read_size(to, before) if goal is None else None
    plain = require_loss(subject)
    target = size_for(goal, subject, before) if goal is not None else target
    seen = None if healing is None else healing.seen
    judge, quick = make_judge(subject, seen), make_judge(take_few(subject), seen)
    candidates, unused = quick.find_candidates(chosen_methods)
    trials, failures = try_alone(quick, candidates, plain)
    plan = Shrinking(
        before=before, target=target or 0, of="training" if trains else "weights", loss=plain.loss, within=within,
        seconds=plain.seconds, batches=len(subject.batches),
        candidates=tuple(trial.noun for trial in trials), sets=(), chosen=None, notes=(*notes, *unused, *failures),
    )  # fmt: skip
    search = functools.partial(_search, judge, trials, plain, None if dry_run else healing)
    plan, taken = search(plan) if goal is None else _search_for_card(search, plan, goal, subject)
    if dry_run:
        return plan
    if taken is None:
        raise refusal(plan)
    return _finish(subject, taken, plan, model.training, optimizer)


def _search(
    judge: Judge, trials: Sequence[Trial], plain: Measured, healing: Healing | None, plan: Shrinking
) -> tuple[Shrinking, BuiltSet | None]:
    """The plan with the set that is taken, or with the nearest one that could be."""
    sets = measure_sets(judge, trials, plan.target, plain)
    if healing is not None:
        sets = heal_sets(judge.subject, sets, plan.target, plan.allowed, healing, plain)
    plan = replace(plan, sets=tuple(one.noun for one in sets))
    taken = choose_set(sets, plan.target, plan.allowed)
    if taken is not None:
        return replace(plan, chosen=taken.noun), taken
    return replace(plan, nearest=find_nearest(judge, trials, plan.target, plan.allowed, plain)), None


def _search_for_card(
    search: Callable[[Shrinking], tuple[Shrinking, BuiltSet | None]], plan: Shrinking, goal: Goal, subject: Subject
) -> tuple[Shrinking, BuiltSet | None]:
    """A set with which a step fits: where it does not, the size is made smaller by what is over."""
    for _ in range(TIGHTER):
        found, taken = search(plan)
        if taken is None:
            return found, None
        model = build(subject, taken.candidates) if taken.model is None else taken.model
        found = replace(found, peak=goal.project(model, subject), card=goal.card)
        over = (found.peak or 0) - goal.capacity
        if over <= 0:
            return found, taken
        if over >= plan.target:
            break
        plan = replace(plan, target=min(plan.target, taken.noun.bytes) - over)
    raise BudgetError(
        f"a step of the smaller model still reserves {format_bytes(found.peak)} and the {goal.card} has "
        f"{format_bytes(goal.capacity)}: make the batch smaller, or use outsize.fit",
        needed=found.peak, budget=goal.capacity, plan=found,
    )  # fmt: skip


def _finish(subject: Subject, taken: BuiltSet, plan: Shrinking, training: bool, make: Any) -> Shrunk:
    """The chosen set as a model of its own."""
    made = build(subject, taken.candidates) if taken.model is None else taken.model
    small = copy.deepcopy(close_gaps(made, subject))
    try:
        difference: Any = describe_difference(subject.model, small)
    except InputError as error:  # said when such a file is asked for
        difference = str(error)
    return Shrunk(model=small.train(training), plan=plan, difference=difference, call=first_call(subject), make=make)


def _check_use(model: Any, healing: Healing | None, trains: bool, optimizer: Any, budget: Any) -> None:
    """What would be given in vain."""
    if optimizer is not None and not callable(optimizer):
        raise InputError(NO_FUNCTION)
    if optimizer is not None and healing is None and not trains:
        raise InputError("optimizer= is for heal=, of='training' or to='fits CARD', and none of them is asked for")
    if budget is not None and healing is None:
        raise InputError("budget= is the memory of a step of heal=: say how many steps to train, such as heal=200")
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("no parameter of the model is trained, so a training step has no bytes to count")


def _check_model(model: Any) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is {type(model).__name__}: shrink takes a torch.nn.Module")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise InputError("the model is TorchScript, which cannot be changed: give the module that it was made from")
    if any(torch.nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model has lazy layers without a size yet: call it once on a batch before")
    if next(model.parameters(), None) is None:
        raise InputError("the model has no parameters: there is nothing to make smaller")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model is on the meta device: it has no weights that could be measured, load them first")


def _read_subject(model: Any, data: Any, loss: Any) -> tuple[Subject, list[str]]:
    """The user's model, data and loss, checked."""
    require_torch("outsize.shrink")
    import torch

    _check_model(model)
    if loss is not None and not callable(loss):
        raise InputError(f"loss is {type(loss).__name__}: give a function loss(model, batch)")
    if isinstance(loss, torch.nn.Module):
        name = type(loss).__name__
        raise InputError(
            f"loss is the module {name}: give a function, such as lambda model, batch: {name}()(model(batch[0]), batch[1])"
        )
    batches, more = read_batches(data, MOST_BATCHES)
    notes = [f"data has more batches: the first {len(batches)} were measured"] if more else []
    return Subject(model=share(model).eval(), batches=interleave(batches), loss=loss or default_loss), notes


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
        nothing = "; ".join(["nothing makes this model smaller", *plan.notes[:1]])
        least = nothing if smallest is None else f"the smallest is {at(smallest)}"
        message = f"{wanted} cannot be reached: {least}"
    size = None if nearest is None else nearest.bytes
    if nearest is not None:
        message += f"; the nearest within the allowed loss is to={size}: {at(nearest)}"
    return BudgetError(message, needed=size, budget=plan.target, smallest=size, plan=plan)
