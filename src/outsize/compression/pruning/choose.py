"""Which indices leave: those that matter least for the bytes they free, until the model is small enough.

In: axes of all tensors with their bytes, scores, a target. Out: which indices of each dim stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.compression.pruning.axes import Dim, dims_of, left_of
from outsize.compression.pruning.call import Axes
from outsize.compression.pruning.scores import Scores

STEPS = 64
"""A dim loses at least one of so many parts of its indices at a time."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor, as far as its size counts."""

    axes: Axes
    itemsize: int

    def bytes(self, counts: Mapping[Dim, int]) -> int:
        """With so many indices of each dim."""
        return self.itemsize * math.prod(left_of(axis, counts) for axis in self.axes)


class Shrinking:
    """Takes indices out, step by step."""

    def __init__(self, weights: Sequence[Weight], scores: Scores, dims: Sequence[Dim], least: float) -> None:
        self.weights = weights
        self.counts = {dim: dim.size for dim in dims}
        self.least = {dim: max(1, math.ceil(dim.size * least)) for dim in dims}
        self.scores = {dim: np.nan_to_num(np.asarray(scores.get(dim, np.zeros(dim.size))), nan=np.inf) for dim in dims}
        self.order = {dim: np.argsort(self.scores[dim], kind="stable") for dim in dims}
        self.within: dict[Dim, list[Weight]] = {dim: [] for dim in dims}
        for weight in weights:
            for dim in {dim for axis in weight.axes for dim in dims_of(axis)} & self.counts.keys():
                self.within[dim].append(weight)
        self.bytes = sum(weight.bytes(self.counts) for weight in weights)

    def _price(self, dim: Dim) -> tuple[float, int, int] | None:
        """(score for a byte, indices, bytes) of the next step in a dim; None where no more may leave."""
        left = self.counts[dim]
        some = min(max(1, dim.size // STEPS), left - self.least[dim])
        if some <= 0:
            return None
        fewer = {**self.counts, dim: left - some}
        freed = sum(weight.bytes(self.counts) - weight.bytes(fewer) for weight in self.within[dim])
        gone = dim.size - left
        score = float(self.scores[dim][self.order[dim][gone : gone + some]].sum())
        return score / max(1, freed), some, freed

    def run(self, target: int) -> None:
        """Down to the target, or as far as it goes. A zero costs nothing, so zeros leave first of all."""
        while self.bytes > target:
            prices = {dim: price for dim in self.counts if (price := self._price(dim)) is not None}
            if not prices:
                return
            dim = min(prices, key=lambda one: prices[one][:1])
            self.counts[dim] -= prices[dim][1]
            self.bytes -= prices[dim][2]

    def kept(self) -> dict[Dim, Any]:
        """Which indices stay, of the dims that lose some."""
        found = {}
        for dim, left in self.counts.items():
            if left < dim.size:
                stays = np.ones(dim.size, bool)
                stays[self.order[dim][: dim.size - left]] = False
                found[dim] = stays
        return found
