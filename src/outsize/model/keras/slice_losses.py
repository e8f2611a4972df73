"""The losses of one slice as parts of the whole batch's loss.

Keras divides a loss by a count: elements, elements that a mask leaves, or the sum of sample weights. A slice gives its sum and
its count instead. The sum is divided by what the whole batch's count is without masks and weights, so that values and gradients
have the size of the whole's; where the true count is another one, the whole's gradient is scaled by that in the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outsize.model.keras import port

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass(slots=True)
class Term:
    """One loss of a slice."""

    value: Any
    """Its sum over the slice, divided by the whole's count as assumed: what is differentiated."""
    total: Any
    """Its sum over the slice."""
    count: Any
    """What the slice adds to the true count; None where the assumed count is the true one."""
    assumed: Any
    """The whole's count as assumed."""
    weight: Any = 1.0
    """Its weight in the model's loss."""


@dataclass(slots=True)
class Slice:
    """Sizes of a slice and the terms found in it."""

    rows: Any
    """Samples of the slice."""
    all_rows: Any
    """Samples of the batch."""
    terms: list[Term] = field(default_factory=list)


class SumOfLoss:
    """Stands for a loss of Keras while a slice is computed, and notes its sum and its count."""

    def __init__(self, loss: Any, weight: Any, noted: Slice) -> None:
        self.loss, self.weight, self.noted = loss, 1.0 if weight is None else weight, noted

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        tf = port.tensorflow()
        reduction = getattr(self.loss, "reduction", None)
        share = tf.cast(self.noted.rows, tf.float32) / tf.cast(self.noted.all_rows, tf.float32)
        total, values = self._sum(y_true, y_pred, sample_weight)
        total = tf.cast(total, tf.float32)
        if values is None or values.shape.rank == 0:  # a loss that reduces by itself: a mean over samples
            term = Term(total * share, total * share, None, 1.0)
        elif reduction not in MEANS:
            term = Term(total, total, None, 1.0)
        else:
            size = tf.cast(tf.size(values), tf.float32)
            count = _count(reduction, size, _mask(y_pred, values), sample_weight)
            assumed = size / share
            term = Term(total / assumed, total, count, assumed)
        term.weight = self.weight
        self.noted.terms.append(term)
        return term.value

    def _sum(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        """(sum over the slice, elements before they were summed)."""
        tf, loss, seen = port.tensorflow(), self.loss, []
        if type(loss).__call__ is not port.keras().losses.Loss.__call__:
            return loss(y_true, y_pred, sample_weight), None
        call, reduction = loss.call, loss.reduction

        def noting(*given: Any, **named: Any) -> Any:
            seen.append(call(*given, **named))
            return seen[-1]

        loss.call, loss.reduction = noting, "sum"
        try:
            found = loss(y_true, y_pred, sample_weight)
        finally:
            del loss.call
            loss.reduction = reduction
        return tf.reduce_sum(found) if seen[0].shape.rank != 0 else found, seen[0]


def _mask(y_pred: Any, values: Any) -> Any:
    masks = [mask for mask in (getattr(each, "_keras_mask", None) for each in (y_pred, values)) if mask is not None]
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _count(reduction: str, size: Any, mask: Any, sample_weight: Any) -> Any:
    """What a slice adds to the divisor of the whole; None where that is `size`."""
    tf = port.tensorflow()
    weighted = reduction == "mean_with_sample_weight"
    if mask is None and (sample_weight is None or not weighted):
        return None
    if not weighted:
        mask = tf.cast(mask, tf.float32)
        return tf.reduce_sum(mask) * size / tf.cast(tf.size(mask), tf.float32)
    parts = [tf.cast(each, tf.float32) for each in (mask, sample_weight) if each is not None]
    if len(parts) == 2:
        few, many = sorted(parts, key=lambda each: each.shape.rank)
        while few.shape.rank < many.shape.rank:
            few = few[..., None]
        parts = [few * many]
    return tf.reduce_sum(parts[0])


class _Silent:
    """Takes the place of a metric of a loss while slices are computed."""

    def update_state(self, *given: Any, **named: Any) -> None:
        pass


@contextlib.contextmanager
def sums_noted(model: Any, noted: Slice) -> Iterator[None]:
    """The losses that the model was compiled with note sums and counts inside."""
    compiled = model._compile_loss
    if compiled is None:
        yield
        return
    flat, metrics = compiled._flat_losses, compiled._metrics
    compiled._flat_losses = [each._replace(loss=SumOfLoss(each.loss, each.loss_weights, noted)) for each in flat]
    compiled._metrics = [_Silent() for _ in metrics]
    try:
        yield
    finally:
        compiled._flat_losses, compiled._metrics = flat, metrics
