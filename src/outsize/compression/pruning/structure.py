"""The parts of a model that may leave: traced once, tried once, then removed as often as one likes.

In: a model, a batch and what runs it. Out: a `Structure`: its free dims, what stays whole and why, and `prune`, which gives
a copy of the model without some of their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.compression.pruning.attention import open_attention
from outsize.compression.pruning.axes import Dim, Kept, dims_of, size_of
from outsize.compression.pruning.choose import Weight
from outsize.compression.pruning.removal import Fix, fits, removable, remove
from outsize.compression.pruning.trace import Trace, trace
from outsize.compression.pruning.verify import settle, stirred
from outsize.compression.weights import share

TRIED = (0.5, 0.25, 0.375)
"""Parts of dims that leave in the trial, one after another, so that equal sizes become unequal."""


@dataclass(slots=True, kw_only=True)
class Structure:
    """What may leave a model."""

    trace: Trace
    fixes: list[Fix]
    dims: list[Dim]
    """Those of which indices may leave."""

    def name(self, dim: Dim) -> str:
        """The tensor that makes these indices, or the first that has them."""
        has = [
            (len(axes) == 1, place, name)
            for name, axes in self.trace.tensors.items()
            for place, axis in enumerate(axes)
            if dim in dims_of(axis)
        ]
        return min(has, key=lambda one: one[:2])[2]

    def modules(self, dim: Dim) -> frozenset[str]:
        return frozenset(
            name.rpartition(".")[0]
            for name, axes in self.trace.tensors.items()
            if any(dim in dims_of(axis) for axis in axes)
        )

    def whole(self) -> dict[str, str]:
        """Parameter -> why no axis of it may become shorter."""
        found = {}
        for name, axes in self.trace.tensors.items():
            reasons = [dim.why for axis in axes for dim in dims_of(axis) if size_of(axis) > 1]
            if reasons and all(reasons):
                found[name] = "; ".join(dict.fromkeys(reason for reason in reasons))
        return found

    def weights(self, model: Any) -> list[Weight]:
        """Parameters and buffers, each tensor once."""
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = {
            id(t): Weight(self.trace.tensors[name], t.element_size())
            for name, t in held.items()
            if name in self.trace.tensors
        }
        return list(found.values())

    @staticmethod
    def opened(model: Any) -> Any:
        """A copy in which the names of the trace are found."""
        return open_attention(share(model))[0]

    def prune(self, model: Any, kept: Kept, fixes: Sequence[Fix]) -> Any:
        """A model without what is not kept. One that no longer has what the trace saw is given back as it is."""
        opened, close = open_attention(share(model))
        if not fits(opened, self.trace.tensors, kept):
            return model
        remove(opened, self.trace.tensors, kept, fixes)
        return close(opened)


def find_structure(model: Any, run: Callable[[Any], Any], through_norms: bool = False) -> Structure:
    """Traces a model in evaluation mode and tries to take a part of each free dim away."""
    opened, _ = open_attention(share(model))
    opened.eval()
    seen = trace(opened, lambda: run(opened), through_norms)
    fixes: list[Fix] = []
    noisy = stirred(opened)
    for step in (
        slice(None),
        slice(0, None, 2),
        slice(1, None, 2),
    ):  # all, then every other one: which number is whose size
        kept = {}
        for number, dim in list(enumerate(removable(seen.tensors)))[step]:
            gone = max(1, round(dim.size * TRIED[number % len(TRIED)]))
            kept[dim] = np.arange(dim.size) >= gone
        settle(noisy, seen, kept, fixes, run, not through_norms)
    return Structure(trace=seen, fixes=fixes, dims=removable(seen.tensors))
