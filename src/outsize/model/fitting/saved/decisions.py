"""A choice as plain data, and back: every field checked against the model that it is for.

In: what a file says. Out: a `Choice`, or an `Unfit` error that names the first thing that cannot be. A field that this version
does not know is a remedy that it does not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from outsize.core.noun import from_plain, to_plain
from outsize.model.fitting.choice import PLAIN, Choice
from outsize.model.fitting.run.sequential_runs import is_span

LARGEST = 2**50
"""Bytes of anything that a plan may name."""

MOST = 2**20
"""Pieces into which anything is cut."""


class Unfit(ValueError):
    """Plain data that are no choice for this model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Names of the model that a choice may use."""

    modules: frozenset[str]
    parameters: frozenset[str]
    rows: int
    """Samples of the batch."""

    @classmethod
    def of(cls, model: Any, rows: int) -> Known:
        names = frozenset(name for name, _ in model.named_modules())
        return cls(names, frozenset(name for name, _ in model.named_parameters()), rows)

    def has_span(self, name: str) -> bool:
        """True for a module, or a run of children of a sequence."""
        if not is_span(name):
            return name in self.modules
        first, _, last = name.partition(":")
        owner = first.rpartition(".")[0]
        return first in self.modules and f"{owner}.{last}".lstrip(".") in self.modules

    def has_call(self, site: str) -> bool:
        """True for `module:operator:number`."""
        module, *rest = site.rsplit(":", 2)
        return module in self.modules and len(rest) == 2 and rest[1].isdigit()


Check = Callable[[Any, Known], bool]


def _between(least: float, most: float) -> Check:
    return lambda value, known: least <= value <= most and not math.isnan(value)


def _one_of(*values: int) -> Check:
    return lambda value, known: value in values


def _all(check: Callable[[Known, str], bool]) -> Check:
    return lambda value, known: all(check(known, name) for name in value)


def _on_disk(value: Mapping[str, tuple[str, ...]], known: Known) -> bool:
    return set(value) <= {"state", "weights", "gradients"} and all(
        known.parameters.issuperset(v) for v in value.values()
    )


_any: Check = lambda value, known: True  # noqa: E731
_bytes = _between(0, LARGEST)
_part = _between(0.0, 1.0)
_modules = _all(lambda known, name: name in known.modules)

CHECKS: dict[str, Check] = {
    "unit_bytes": _bytes, "ring": _bytes, "state_ring": _bytes, "small_bytes": _bytes, "transfer_bytes": _bytes,
    "held": _all(lambda known, name: name in known.modules or name in known.parameters),
    "stream": _modules, "offload": _modules, "disk": _on_disk,
    "checkpoint": _all(Known.has_span), "recipes": _all(Known.has_call),
    "tensors_away": _all(lambda known, site: site == "*" or known.has_call(site)),
    "in_backward": _any, "gradients_away": _any, "on_host": _any, "inputs_away": _any, "more_pieces": _any,
    "autocast": _any, "expandable": _any,
    "state_away": _part, "again": _part,
    "state_bits": _one_of(0, 4, 8), "frozen_bits": _one_of(0, 8), "kept_bits": _one_of(0, 8),
    "slices": lambda value, known: 1 <= value <= known.rows, "first": lambda value, known: 0 <= value <= known.rows,
    "pieces": _between(1, MOST), "chunks": _between(0, MOST),
}  # fmt: skip
"""Field of a choice -> what its value has to be, beside its type."""


def to_data(choice: Choice) -> dict[str, Any]:
    """The fields that differ from the plain step's."""
    values = {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}
    return {name: to_plain(value) for name, value in values.items() if value != getattr(PLAIN, name)}


def from_data(data: Mapping[str, Any], known: Known) -> Choice:
    unknown = next((name for name in data if name not in CHECKS), None)
    if unknown is not None:
        raise Unfit(f"it uses {unknown!r:.60}, a remedy that this version does not know")
    try:
        choice = from_plain(Choice, data)
    except (TypeError, ValueError) as error:
        raise Unfit(str(error)) from None
    for name, check in CHECKS.items():
        if not check(getattr(choice, name), known):
            raise Unfit(f"its {name} cannot be {getattr(choice, name)!r:.80}")
    return choice
