"""What a fitted step of JAX does differently from the plain one."""

from __future__ import annotations

from dataclasses import dataclass

KEYS = ("slices", "checkpoint", "order")
"""Remedies that a user may leave out."""


@dataclass(frozen=True, order=True)
class Choice:
    """The decisions as plain data. The plain step is `Choice()`."""

    slices: int = 1
    """Parts of the batch that are computed one after the other."""
    segments: int = 0
    """Parts of the loss that are computed again in the backward pass; 0: none is."""
    keep_products: bool = False
    """Results of matrix products are kept, and only the rest is computed again."""
    ordered: bool = False
    """XLA orders the operators for memory."""

    def __str__(self) -> str:
        words = []
        if self.slices > 1:
            words.append(f"{self.slices} slices")
        if self.segments:
            words.append(f"{self.segments} segments again" + (", products kept" if self.keep_products else ""))
        if self.ordered:
            words.append("ordered for memory")
        return ", ".join(words) or "plain"


def slow_down(choice: Choice) -> float:
    """Predicted time over that of the plain step: an estimate. A forward pass is a third of a step; products are most of it."""
    again = 0.0 if not choice.segments else 0.06 if choice.keep_products else 0.33
    return 1 + again + 0.02 * (choice.slices.bit_length() - 1) + (0.02 if choice.ordered else 0.0)
