"""Gradients of a batch, computed slice by slice with one normaliser.

In: a loss, how its slices add up, a number of slices. Out: a function (params, batch) -> (loss, gradients). The slices run
in a `lax.scan`, so only one of them is in memory; a last, smaller slice follows where the samples do not divide.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from outsize.model.jax.fitting.batches import Axes
from outsize.model.jax.private_parts import require_jax

Loss = Callable[[Any, Any], Any]
Gradients = Callable[[Any, Any], tuple[Any, Any]]


class Rule(enum.StrEnum):
    """How the losses of slices add up to the loss of the batch."""

    MEAN = "a mean over samples"
    SUM = "a sum over samples"
    PAIR = "a total over a count"


def gradients_of(loss: Loss, rule: Rule) -> Gradients:
    """(params, batch) -> (loss, gradients), the plain way."""
    jax = require_jax()

    def quotient(params: Any, batch: Any) -> Any:
        total, count = loss(params, batch)
        return total / count

    return jax.value_and_grad(quotient if rule is Rule.PAIR else loss)  # type: ignore[no-any-return]


def sliced(loss: Loss, rule: Rule, axes: Axes, slices: int) -> Gradients:
    """The same, slice by slice."""
    if slices <= 1:
        return gradients_of(loss, rule)
    jax = require_jax()
    tree = jax.tree_util
    size = -(-axes.rows // slices)
    whole, rest = divmod(axes.rows, size)

    def part(params: Any, batch: Any, start: Any, count: int) -> tuple[Any, Any, Any]:
        """Total, normaliser and gradients of one slice."""
        cut = axes.cut(batch, start, count)
        if rule is Rule.PAIR:
            (total, weight), grads = jax.value_and_grad(loss, has_aux=True)(params, cut)
            return total, weight, grads
        weight = count / axes.rows if rule is Rule.MEAN else 1.0
        total, grads = jax.value_and_grad(lambda params: loss(params, cut) * weight)(params)
        return total, 1.0, grads

    def run(params: Any, batch: Any) -> tuple[Any, Any]:
        def body(carry: Any, number: Any) -> tuple[Any, None]:
            added = part(params, batch, number * size, size)
            return tree.tree_map(lambda held, new: held + new.astype(held.dtype), carry, _arrays(added)), None

        shapes = jax.eval_shape(lambda: _arrays(part(params, batch, 0, size)))
        zeros = tree.tree_map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
        carry, _ = jax.lax.scan(body, zeros, jax.numpy.arange(whole))
        if rest:
            last = _arrays(part(params, batch, whole * size, rest))
            carry = tree.tree_map(lambda held, new: held + new.astype(held.dtype), carry, last)
        total, weight, grads = carry
        if rule is not Rule.PAIR:
            return total, grads
        return total / weight, tree.tree_map(lambda leaf: (leaf / weight).astype(leaf.dtype), grads)

    return run


def _arrays(values: Any) -> Any:
    jax = require_jax()
    return jax.tree_util.tree_map(jax.numpy.asarray, values)
