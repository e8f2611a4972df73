"""One call of an operator, as rules read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from outsize.compression.pruning.axes import Axis, Dim, unify

Axes = tuple[Axis, ...]


class Known(Protocol):
    """What is known of tensors so far."""

    def axes(self, tensor: Any) -> Axes:
        """Those of a tensor; of one that nobody made, new ones that stay whole."""

    def is_weight(self, tensor: Any) -> bool:
        """True for parameters and buffers, and what is made of them only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an operator."""

    name: str
    values: Mapping[str, Any]
    """Arguments by their names in the schema, with the defaults."""
    tensors: tuple[Any, ...]
    """All tensors among the arguments, in order."""
    outs: tuple[Any, ...]
    """The tensors that it gave."""
    known: Known
    through_norms: bool
    """Axes that are normalised may be made shorter, although that changes what is left."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def axes(self, tensor: Any) -> Axes:
        return self.known.axes(tensor)

    def is_weight(self, tensor: Any) -> bool:
        """True for parameters and buffers, and what is made of them only."""
        return self.known.is_weight(tensor)

    @staticmethod
    def tie(some: Axes, others: Axes) -> None:
        """Axes that are the same one by one."""
        for one, other in zip(some, others, strict=True):
            unify(one, other)


def fresh(tensor: Any, why: str = "") -> Axes:
    return tuple(Dim(int(size), why) for size in tensor.shape)
