"""What is true of an operator for all arguments, looked up once.

In: an operator as the dispatcher names it. Out: its name, what it writes, whether torch's rules for its results look at more
than shapes. A trace needs this for every call, and torch would compute it each time.
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.torch_port.dispatch import arguments_of, has_kernel, is_mutable
from outsize.model.torch_port.flops import flop_rule
from outsize.model.tracing.rules.known_values import UNWRITTEN
from outsize.model.tracing.rules.rewrites import SHAPES, WHOLE


class Operator:
    def __init__(self, func: Any) -> None:
        self.func = func  # held, so that no other gets its number
        self.name = str(func)
        self.base = self.name.split(".")[1]
        composite = has_kernel(func.name(), "CompositeImplicitAutograd")
        self.decomposes = bool(composite) and self.name not in WHOLE and self.name not in SHAPES
        """Made of other operators; reaches the dispatcher as one call only if autograd is off."""
        self.known = torch.Tag.nondeterministic_seeded not in func.tags and not self.base.startswith(UNWRITTEN)
        """False if its result is unwritten memory or random: the next step would find other values there."""
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        """Draws numbers at random."""
        self.mutable = is_mutable(func)
        self.view = bool(func.is_view)
        self.pointwise = torch.Tag.pointwise in func.tags
        self.flops = flop_rule(func)
        """Counts its operations; None if they are few."""
        self.by_shapes = self._by_shapes(func)
        """True for torch's own that make new tensors or write into their first arguments, and change no shape."""

    def _by_shapes(self, func: Any) -> bool:
        looks = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(
            func.tags
        )
        resizes = self.base.startswith(("resize", "_resize", "set_", "_efficientzerotensor"))
        out = any(a.kwarg_only and a.alias_info is not None for a in arguments_of(func))
        return func.namespace == "aten" and not (self.view or looks or resizes or out)


_FOUND: dict[int, Operator] = {}


def look_up(func: Any) -> Operator:
    found = _FOUND.get(id(func))
    if found is None:
        found = _FOUND[id(func)] = Operator(func)
    return found
