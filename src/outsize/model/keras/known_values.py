"""Sizes, counters and conditions that are known before anything runs.

Loops end by them, and shapes that the graph leaves open are made of them. Only arrays of a few elements are followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.model.keras.graph import KNOWN, Node

Rule = Callable[[Node, list[Any]], Any]


def _strided(node: Node, values: list[Any]) -> Any:
    """`x[begin:end:stride]` of one axis, as shapes are taken apart."""
    data, begin, end, stride = values
    shrink = node.op.get_attr("shrink_axis_mask")
    if np.ndim(data) != 1 or len(begin) != 1:
        return None
    if shrink & 1:
        return data[int(begin[0])]
    low = None if node.op.get_attr("begin_mask") & 1 else int(begin[0])
    high = None if node.op.get_attr("end_mask") & 1 else int(end[0])
    return data[low : high : int(stride[0])]


RULES: dict[str, Rule] = {
    "AddV2": lambda _, v: v[0] + v[1], "Add": lambda _, v: v[0] + v[1], "Sub": lambda _, v: v[0] - v[1],
    "Mul": lambda _, v: v[0] * v[1], "FloorDiv": lambda _, v: v[0] // v[1], "FloorMod": lambda _, v: v[0] % v[1],
    "Minimum": lambda _, v: np.minimum(v[0], v[1]), "Maximum": lambda _, v: np.maximum(v[0], v[1]),
    "Neg": lambda _, v: -v[0],
    "Less": lambda _, v: v[0] < v[1], "LessEqual": lambda _, v: v[0] <= v[1], "Greater": lambda _, v: v[0] > v[1],
    "GreaterEqual": lambda _, v: v[0] >= v[1], "Equal": lambda _, v: v[0] == v[1], "NotEqual": lambda _, v: v[0] != v[1],
    "LogicalAnd": lambda _, v: np.logical_and(v[0], v[1]), "LogicalOr": lambda _, v: np.logical_or(v[0], v[1]),
    "LogicalNot": lambda _, v: np.logical_not(v[0]),
    "Max": lambda _, v: np.max(v[0]), "Min": lambda _, v: np.min(v[0]), "Prod": lambda _, v: np.prod(v[0]),
    "Range": lambda _, v: np.arange(*[int(each) for each in v]) if all(np.ndim(each) == 0 for each in v) else None,
    "Pack": lambda _, v: np.stack(v), "ConcatV2": lambda _, v: np.concatenate(v[:-1], axis=int(v[-1])),
    "Cast": lambda node, v: np.asarray(v[0]).astype(node.op.get_attr("DstT").as_numpy_dtype),
    "StridedSlice": _strided, "GatherV2": lambda _, v: np.take(v[0], v[1], axis=int(v[2])),
    "InvertPermutation": lambda _, v: np.argsort(v[0]),
}  # fmt: skip
"""Operator -> its value, given those of its inputs."""


def value_of(node: Node, values: list[Any]) -> Any:
    """The elements of a node's first result, None where they are not known or too many."""
    rule = RULES.get(node.type)
    if rule is None or not values or any(each is None for each in values):
        return None
    try:
        found = rule(node, values)
    except (TypeError, ValueError, IndexError):
        return None
    return found if found is not None and np.size(found) <= KNOWN else None
