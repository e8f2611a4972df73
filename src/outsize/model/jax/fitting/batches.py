"""Which axis of a batch's arrays counts samples, and slices along it.

In: a batch, what the user says of its axes. Out: `Axes`. Arrays whose first axis is as long as that of the largest array are
cut there; all others (random keys, class weights, numbers) are shared by all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outsize.core.errors import InputError
from outsize.model.jax.private_parts import bytes_of, require_jax


@dataclass(frozen=True)
class Axes:
    """An axis for each array of a batch, None for those that all samples share."""

    axes: tuple[int | None, ...]
    rows: int
    """Samples."""

    def cut(self, batch: Any, start: Any, count: int) -> Any:
        """`count` samples from `start` on, which may be a traced number."""
        jax = require_jax()
        leaves, tree = jax.tree_util.tree_flatten(batch)
        cut = [
            leaf if axis is None else jax.lax.dynamic_slice_in_dim(jax.numpy.asarray(leaf), start, count, axis)
            for leaf, axis in zip(leaves, self.axes, strict=True)
        ]
        return jax.tree_util.tree_unflatten(tree, cut)

    def take(self, batch: Any, rows: list[int]) -> Any:
        jax = require_jax()
        leaves, tree = jax.tree_util.tree_flatten(batch)
        places = jax.numpy.asarray(rows)
        found = [
            leaf if axis is None else jax.numpy.take(jax.numpy.asarray(leaf), places, axis)
            for leaf, axis in zip(leaves, self.axes, strict=True)
        ]
        return jax.tree_util.tree_unflatten(tree, found)


def read_axes(batch: Any, said: Any = None) -> Axes:
    """The axes that the user said, or the first ones of equal length."""
    jax = require_jax()
    named = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not named:
        raise InputError("the batch has no arrays")
    shapes = [tuple(getattr(leaf, "shape", ())) for _, leaf in named]
    if said is None:
        largest = max(range(len(named)), key=lambda number: (len(shapes[number]) > 0, _size(named[number][1])))
        rows = shapes[largest][0] if shapes[largest] else 1
        axes: list[int | None] = [0 if shape and shape[0] == rows else None for shape in shapes]
    else:
        axes = [_said(path, shape, said) for (path, _), shape in zip(named, shapes, strict=True)]
    lengths = {shape[axis] for shape, axis in zip(shapes, axes, strict=True) if axis is not None}
    if len(lengths) > 1:
        raise InputError(f"batch_axis={said!r} counts {sorted(lengths)} samples in different arrays of the batch")
    return Axes(tuple(axes), lengths.pop() if lengths else 1)


def _size(leaf: Any) -> int:
    aval = leaf if hasattr(leaf, "dtype") else None
    return 0 if aval is None or "key" in str(aval.dtype) else bytes_of(aval) or 0


def _said(path: Any, shape: tuple[int, ...], said: Any) -> int | None:
    jax = require_jax()
    axis = said
    if isinstance(said, dict):
        words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        whole = f"batch{jax.tree_util.keystr(path)}"
        axis = next((said[name] for name in (whole, *words[::-1]) if name in said), 0 if shape else None)
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise InputError(
            f"batch_axis={axis!r} is no axis of an array of JAX: a number, or None for one that all samples share"
        )
    if not -len(shape) <= axis < len(shape):
        if isinstance(said, dict):
            raise InputError(f"batch{jax.tree_util.keystr(path)} of shape {shape} has no axis {axis}")
        return None
    return axis % len(shape)
