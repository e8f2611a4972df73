"""Optimizer state in 8 or 4 bits. The model stays as it is and says which: `Shrunk.optimizer` makes the optimizer.

Offered where bytes of training count. What it costs is seen in training alone (`heal=`): a loss before that cannot show it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from outsize.compression.method import Candidate, Stage, Subject
from outsize.compression.training_bytes import BITS
from outsize.compression.weights import own_parameters
from outsize.core.failure import Exactness


@dataclass(frozen=True)
class State:
    """Optimizer state in so many bits."""

    name: str
    bits: int
    exactness = Exactness.APPROXIMATE
    fitted = False
    trains = True
    costs = "updates differ from those of the whole state, which only a training shows (heal=)"
    needs = "an optimizer that treats parameters one by one"
    loads = "nothing"

    @property
    def saves(self) -> str:
        return f"optimizer state at {self.bits} bits"

    def candidates(self, subject: Subject) -> list[Candidate]:
        touched = frozenset(name for name, module in subject.model.named_modules() if own_parameters(module))
        return [
            Candidate(
                method=self.name, site="", level=f"{self.bits} bits", stage=Stage.STATE, touches=touched,
                apply=functools.partial(set_bits, bits=self.bits),
            )
        ]  # fmt: skip


def set_bits(model: Any, bits: int) -> Any:
    """The model, which says in how many bits its optimizer's state is kept."""
    model.__dict__[BITS] = bits
    return model
