"""`to="fits rtx3060"`: how large the parameters may be, so that a step fits on a card.

What the step holds beside the parameters is found by `estimate`, which needs no card. It changes when the parameters do (weights
are decoded, factors add activations), so the chosen set is projected again, and the size is made smaller where that does
not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.compression.method import Subject
from outsize.compression.training_bytes import BITS, count_step
from outsize.core.cards import find_card
from outsize.core.errors import BudgetError, InputError
from outsize.core.units import format_bytes
from outsize.model.estimation.estimate import estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A card on which a step must fit."""

    card: str
    capacity: int
    """Bytes that the step may reserve there."""
    optimizer: Callable[[Any], Any] | None
    """parameters -> optimizer, of a training step; None: the loss without gradients."""

    def project(self, model: Any, subject: Subject) -> int:
        """Bytes that a step with this model reserves at most."""
        optimizer = None
        if self.optimizer is not None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if not trained:
                raise InputError("no parameter of the model is trained, so there is no training step to fit on a card")
            optimizer = self.optimizer(trained)
        step = _infer if optimizer is None else _train
        found = estimate(step, model, optimizer, subject.loss, subject.batches[0], device="cuda", card=self.card)
        return found.peak_reserved.bound - self._packed(model)

    def _packed(self, model: Any) -> int:
        """Bytes of optimizer state that are not there where it is kept in fewer bits."""
        if self.optimizer is None or not model.__dict__.get(BITS):
            return 0
        whole, kept = (count_step(model, self.optimizer, bits) for bits in (0, None))
        return max(0, whole.total - kept.total)


def _infer(model: Any, optimizer: Any, loss: Any, batch: Any) -> Any:
    import torch

    with torch.no_grad():
        return loss(model, batch)


def _train(model: Any, optimizer: Any, loss: Any, batch: Any) -> None:
    found = loss(model, batch)
    (found[0] / found[1] if isinstance(found, tuple) else found).backward()
    optimizer.step()
    optimizer.zero_grad()


def read_goal(to: Any, optimizer: Callable[[Any], Any] | None) -> Goal | None:
    """The card that `to` names, None where it names a size."""
    if not isinstance(to, str) or not to.strip().lower().startswith("fits"):
        return None
    name = to.strip()[4:].strip()
    if not name:
        raise InputError('to is "fits": name the card, such as "fits rtx3060"')
    card = find_card(name)
    return Goal(card=card.name, capacity=card.usable, optimizer=optimizer)


def size_for(goal: Goal, subject: Subject, before: int) -> int:
    """Bytes of parameters (and of their gradients and state, in training) with which a step should fit."""
    reserved = goal.project(subject.model, subject)
    target = before if reserved <= goal.capacity else before - (reserved - goal.capacity)
    if target <= 0:
        raise BudgetError(
            f"a step reserves {format_bytes(reserved - before)} beside the parameters and the {goal.card} has "
            f"{format_bytes(goal.capacity)}: smaller parameters do not help, make the batch smaller or use outsize.fit",
            needed=reserved, budget=goal.capacity, culprit="activations",
        )  # fmt: skip
    return target
