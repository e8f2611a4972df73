"""What the indices of an axis stand for: an algebra of axes in which equal things become one.

In: axes of tensors that an operator ties together. Out: which indices of which axes can only leave together.

An axis is a `Dim` (so many indices, each of which may leave by itself), a `Sum` (axes one after another, as `cat` makes them) or
a `Product` (an axis for each index of another, as `view` makes them: 64 channels are 4 heads of 16). `unify` says that two axes
are the same. It binds dims to what they turn out to be, and cuts and splits them where that is needed, so that in the end a few
free dims say everything about all axes. What fits no such form, or may not leave, is frozen with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class Dim:
    """Indices of which each may leave by itself; `why` says why none may, where that is so."""

    __slots__ = ("bound", "size", "why")

    def __init__(self, size: int, why: str = "") -> None:
        self.size = size
        self.why = why or ("it has one index" if size == 1 else "")
        self.bound: Axis | None = None


class Sum:
    """Axes one after another."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Axis, ...]) -> None:
        self.parts = parts


class Product:
    """An axis for each index of another, the last one fastest."""

    __slots__ = ("factors",)

    def __init__(self, factors: tuple[Axis, ...]) -> None:
        self.factors = factors


Axis = Dim | Sum | Product
Kept = Mapping[Dim, Any]
"""Dim -> an array of truths: which indices stay. A dim that is not there is whole."""


def size_of(axis: Axis) -> int:
    if isinstance(axis, Dim):
        return axis.size
    if isinstance(axis, Sum):
        return sum(map(size_of, axis.parts))
    return math.prod(map(size_of, axis.factors))


def look(axis: Axis) -> Axis:
    """The axis as it is known by now: a free dim, a sum of no sums, or a product of no products."""
    while isinstance(axis, Dim):
        if axis.bound is None:
            return axis
        axis = axis.bound
    if isinstance(axis, Sum):
        parts = [look(part) for part in axis.parts if size_of(part)]
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Sum) else (part,))]
        return flat[0] if len(flat) == 1 else Sum(tuple(flat))
    found = [look(factor) for factor in axis.factors if size_of(factor) != 1]
    flat = [inner for factor in found for inner in (factor.factors if isinstance(factor, Product) else (factor,))]
    return Dim(1) if not flat else flat[0] if len(flat) == 1 else Product(tuple(flat))


def dims_of(axis: Axis) -> Iterator[Dim]:
    """The free dims inside."""
    axis = look(axis)
    if isinstance(axis, Dim):
        yield axis
        return
    for inner in axis.parts if isinstance(axis, Sum) else axis.factors:
        yield from dims_of(inner)


def freeze(axis: Axis, why: str) -> None:
    """None of these indices may leave."""
    for dim in dims_of(axis):
        dim.why = dim.why or why


def unify(one: Axis, other: Axis) -> None:
    """The two axes are the same, index by index."""
    one, other = look(one), look(other)
    if one is other:
        return
    if isinstance(one, Dim) or isinstance(other, Dim):
        dim, axis = (one, other) if isinstance(one, Dim) else (other, one)
        assert isinstance(dim, Dim)
        dim.bound = axis
        if dim.why:
            freeze(axis, dim.why)
    elif isinstance(one, Sum) and isinstance(other, Sum):
        _unify_sums(list(one.parts), list(other.parts))
    elif isinstance(one, Product) and isinstance(other, Product):
        _unify_products(list(one.factors), list(other.factors))
    elif isinstance(one, Sum) and isinstance(other, Product):
        _unify_mixed(one, other)
    elif isinstance(one, Product) and isinstance(other, Sum):
        _unify_mixed(other, one)


def _unify_sums(ones: list[Axis], others: list[Axis]) -> None:
    """From the left, cutting the longer part."""
    while ones and others:
        one, other = ones.pop(0), others.pop(0)
        if size_of(one) > size_of(other):
            left, right = cut(one, size_of(other))
            ones.insert(0, right)
            unify(left, other)
        elif size_of(one) < size_of(other):
            left, right = cut(other, size_of(one))
            others.insert(0, right)
            unify(one, left)
        else:
            unify(one, other)


def _unify_products(ones: list[Axis], others: list[Axis]) -> None:
    """From the right, splitting the larger factor."""
    while ones and others:
        one, other = ones.pop(), others.pop()
        if size_of(one) < size_of(other):
            ones, others, one, other = others, ones, other, one
        if size_of(one) == size_of(other):
            unify(one, other)
        elif size_of(one) % size_of(other) == 0:
            left, right = Dim(size_of(one) // size_of(other)), Dim(size_of(other))
            unify(one, Product((left, right)))
            ones.append(left)
            unify(right, other)
        else:
            for axis in (one, other, *ones, *others):
                freeze(axis, "it is cut in two ways that do not fit")
            return


def _unify_mixed(one: Sum, other: Product) -> None:
    """A sum whose parts are multiples of the inner factors is a product with a sum as its first factor."""
    first, rest = other.factors[0], Product(other.factors[1:])
    inner = size_of(rest)
    if any(size_of(part) % inner for part in one.parts):
        for axis in (one, other):
            freeze(axis, "it is cut in two ways that do not fit")
        return
    outer = tuple(Dim(size_of(part) // inner) for part in one.parts)
    for part, dim in zip(one.parts, outer, strict=True):
        unify(part, Product((dim, rest)))
    unify(first, Sum(outer))


def cut(axis: Axis, count: int) -> tuple[Axis, Axis]:
    """The first indices and the others."""
    left, right = Dim(count), Dim(size_of(axis) - count)
    if not left.size or not right.size:
        return (axis, right) if left.size else (left, axis)
    unify(axis, Sum((left, right)))
    return left, right


def split(axis: Axis, sizes: list[int]) -> list[Axis]:
    """The axis as a product of axes of these sizes."""
    if len(sizes) == 1:
        return [axis]
    dims: list[Axis] = [Dim(size) for size in sizes]
    unify(axis, Product(tuple(dims)))
    return dims


def kept_of(axis: Axis, kept: Kept) -> Any:
    """Which indices of an axis stay, as an array of truths."""
    axis = look(axis)
    if isinstance(axis, Dim):
        return kept[axis] if axis in kept else np.ones(axis.size, bool)
    if isinstance(axis, Sum):
        return np.concatenate([kept_of(part, kept) for part in axis.parts])
    found = np.ones(1, bool)
    for factor in axis.factors:
        found = np.logical_and.outer(found, kept_of(factor, kept)).reshape(-1)
    return found


def left_of(axis: Axis, counts: Mapping[Dim, int]) -> int:
    """How many indices stay, from how many of each dim stay."""
    axis = look(axis)
    if isinstance(axis, Dim):
        return counts.get(axis, axis.size)
    if isinstance(axis, Sum):
        return sum(left_of(part, counts) for part in axis.parts)
    return math.prod(left_of(factor, counts) for factor in axis.factors)


def spread(axis: Axis, values: Any, into: dict[Dim, Any]) -> None:
    """Adds a value of each index of an axis to the indices of dims it stands for."""
    axis = look(axis)
    if isinstance(axis, Dim):
        into[axis] = into.get(axis, 0.0) + values
    elif isinstance(axis, Sum):
        ends = np.cumsum([size_of(part) for part in axis.parts])[:-1]
        for part, some in zip(axis.parts, np.split(values, ends), strict=True):
            spread(part, some, into)
    else:
        table = values.reshape([size_of(factor) for factor in axis.factors])
        for place, factor in enumerate(axis.factors):
            others = tuple(other for other in range(table.ndim) if other != place)
            spread(factor, table.sum(others), into)
