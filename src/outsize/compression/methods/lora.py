"""Adapters beside frozen weights, for fine-tuning: what is trained is small, what is frozen is kept in 16, 8 or 4 bits.

Used only where the user names it: it trains something else. At first it costs what the rounding of the frozen weights costs.
"""

from __future__ import annotations

from typing import Any

from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.methods import adapters
from outsize.compression.weights import holders_of


class Lora(Method):
    """Frozen weights in fewer bits and adapters that are trained."""

    name = "lora"
    stage = Stage.ADAPTERS
    needs = "Linear layers whose weights are not shared"

    def candidates(self, subject: Subject) -> list[Candidate]:
        names = tuple(adapters.find_adapted(subject.model))
        touched, level = holders_of(subject.model), f"rank {adapters.RANK}, frozen weights in {{}} bits"
        widths = (16, 8, 4) if names else ()
        return [self.candidate("", level.format(bits), touched, add, names=names, bits=bits) for bits in widths]


def add(model: Any, names: tuple[str, ...], bits: int) -> Any:
    """Plain adapters, so that files can say what they are."""
    return adapters.add_adapters(model, list(names), adapters.RANK, bits, adapters.SCALE, peft=False)
