"""How the losses of slices add up, found on a few samples and in the program of the loss.

In: params, a loss, a batch. Out: a rule, or why there is none. Nothing is believed: value and gradient of a few samples,
spread over the batch, are compared with those of one of them and of the others. A mean that divides by a number computed
from the samples (a mask's sum) may look like a mean over those few samples, so it has to give (total, count).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from outsize.core.errors import InputError
from outsize.model.jax import private_parts as parts
from outsize.model.jax.arguments import guarded, shape_of
from outsize.model.jax.fitting.batches import Axes
from outsize.model.jax.fitting.slices import Loss, Rule, gradients_of
from outsize.model.jax.program import Operator, read

FEW = 4
"""Samples that are tried."""
TOLERANCE = 1e-4
"""How far values and gradients may differ, as a part of them; of half precision fifty times that."""


class Learnt(NamedTuple):
    """What is known of a loss."""

    rule: Rule | None
    """None where slices cannot be added up."""
    why: str
    """Why not, or how."""
    plain: Rule
    """How the loss itself is called: a pair or a scalar."""


def learn(params: Any, loss: Loss, batch: Any, axes: Axes) -> Learnt:
    plain = _form(params, loss, batch)
    if axes.rows < 2:
        return Learnt(None, "the batch has one sample", plain)
    if plain is not Rule.PAIR and _divides(params, loss, batch):
        return Learnt(
            None, "the loss divides by a number that it computes from the samples: return (total, count)", plain
        )
    count = min(FEW, axes.rows)
    rows = [number * (axes.rows - 1) // (count - 1) for number in range(count)]
    few = axes.take(batch, rows)
    jax = parts.require_jax()
    plainly = jax.jit(jax.value_and_grad(loss, has_aux=plain is Rule.PAIR))
    first, rest = (plainly(params, axes.take(few, part)) for part in ([0], list(range(1, count))))
    whole = jax.jit(gradients_of(loss, plain))(params, few)
    for rule in (Rule.PAIR,) if plain is Rule.PAIR else (Rule.MEAN, Rule.SUM):
        if same(whole, _added(rule, first, rest, count)):
            return Learnt(rule, f"the loss is {rule}", plain)
    return Learnt(
        None, "the loss of a few samples is not that of its parts, added up: samples are compared with each other or share draws",
        plain,
    )  # fmt: skip


def _form(params: Any, loss: Loss, batch: Any) -> Rule:
    """Whether the loss gives a scalar or a pair."""
    jax = parts.require_jax()
    shapes = [jax.tree_util.tree_map(shape_of, tree) for tree in (params, batch)]
    found = guarded("the loss", lambda: jax.eval_shape(loss, *shapes))
    leaves = jax.tree_util.tree_leaves(found)
    if any(leaf.shape for leaf in leaves) or len(leaves) not in (1, 2) or (len(leaves) == 2 and len(found) != 2):
        said = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        raise InputError(f"the loss gives {said}: it has to give a scalar, or (total, count)")
    return Rule.PAIR if len(leaves) == 2 else Rule.MEAN


def _added(rule: Rule, first: Any, rest: Any, count: int) -> Any:
    """(loss, gradients) of all samples from those of the first and of the others."""
    jax = parts.require_jax()
    if rule is Rule.PAIR:
        ((one, weight), grads), ((other, more), others) = first, rest
        shares = (1 / (weight + more),) * 2
        first, rest = (one, grads), (other, others)
    else:
        shares = (1 / count, 1 - 1 / count) if rule is Rule.MEAN else (1.0, 1.0)
    return jax.tree_util.tree_map(lambda a, b: a * shares[0] + b * shares[1], first, rest)


def same(one: Any, other: Any) -> bool:
    """True where two (loss, gradients) are equal up to rounding."""
    jax = parts.require_jax()
    numpy = jax.numpy
    pairs = list(zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other), strict=True))
    if not all(bool(numpy.array_equal(numpy.isfinite(a), numpy.isfinite(b))) for a, b in pairs):
        return False
    value, gradients = pairs[0], pairs[1:]
    if not bool(numpy.abs(value[0] - value[1]) <= _tolerance(value[0]) * (numpy.abs(value[0]) + 1e-6)):
        return False
    scale = max(float(numpy.max(numpy.abs(a))) if a.size else 0.0 for a, _ in gradients)
    return all(
        not a.size or float(numpy.max(numpy.abs(a - b))) <= _tolerance(a) * max(scale, 1e-30) for a, b in gradients
    )


def _tolerance(leaf: Any) -> float:
    return TOLERANCE * (50 if leaf.dtype.itemsize <= 2 else 1)


def _divides(params: Any, loss: Loss, batch: Any) -> bool:
    """True where the loss divides by one number that depends on what is in the batch."""
    jax = parts.require_jax()
    shapes = [jax.tree_util.tree_map(shape_of, tree) for tree in (params, batch)]
    program = read(jax.make_jaxpr(loss)(*shapes))
    own = len(jax.tree_util.tree_leaves(params))
    touched = {id(value) for value in program.inputs[own:]}
    for operator in program.operators:
        if _divisor_touched(operator, touched):
            return True
        if any(id(value) in touched for value in operator.inputs):
            touched.update(id(value) for value in operator.outputs)
    return False


def _divisor_touched(operator: Operator, touched: set[int]) -> bool:
    if operator.name == "div":
        return operator.shapes[1] == () and id(operator.inputs[1]) in touched
    inverse = operator.name == "integer_pow" and operator.params.get("y", 1) < 0
    return inverse and operator.shapes[0] == () and id(operator.inputs[0]) in touched
