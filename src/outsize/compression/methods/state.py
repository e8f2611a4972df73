"""Optimizer state in 8 or 4 bits. The model stays as it is and says which: `Shrunk.optimizer` makes the optimizer.

Offered where bytes of training count. What it costs is seen in training alone (`heal=`): a loss before that cannot show it.
"""

from __future__ import annotations

from typing import Any

from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.training_bytes import BITS
from outsize.compression.weights import holders_of


class State(Method):
    """Optimizer state in so many bits."""

    stage = Stage.STATE
    needs = "an optimizer that treats parameters one by one"

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"state{bits}"

    def candidates(self, subject: Subject) -> list[Candidate]:
        return [self.candidate("", f"{self.bits} bits", holders_of(subject.model), set_bits, bits=self.bits)]


def set_bits(model: Any, bits: int) -> Any:
    """The model, which says in how many bits its optimizer's state is kept."""
    model.__dict__[BITS] = bits
    return model
