"""Random numbers that a step draws on the host.

In: an operator that draws, and its result without contents. Out: whole numbers, drawn as the step would draw them, because they
are indices and lengths. Fractions are drawn and forgotten, so that the whole numbers after them are those of a real run: a
randomly skipped layer or path counts as present. Generators get their state back when the trace ends.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from outsize.model.torch_port.dispatch import map_tensors, torch_off
from outsize.model.torch_port.objects import storage_key
from outsize.model.tracing.rules import known_values as values
from outsize.model.tracing.rules.operators import Operator
from outsize.model.tracing.trace import Trace


class Draws:
    """The generators of one trace."""

    def __init__(self, tracer: Trace) -> None:
        self._tracer = tracer
        self._states: dict[Any, Any] = {}
        """Generator of random numbers on the host -> its state before the trace."""
        self._left = values.ADVANCED_ELEMENTS
        """How many fractions are still drawn for the sake of what is drawn after them."""

    def restore(self) -> None:
        """Give the generators the state that they had before the trace."""
        for generator, state in self._states.items():
            generator.set_state(state)

    def draw(self, operator: Operator, args: Any, kwargs: Any, out: Any, generator: Any, known: bool) -> bool:
        """Draw whole numbers; True if numbers were drawn. `known`: they are drawn on the host, from known operands."""
        tracer = self._tracer
        if out.is_floating_point() or out.numel() > values.DRAWN_ELEMENTS:
            return False
        if operator.base == "random_":  # a seed: an empty tensor that is filled
            if out.nbytes != out.untyped_storage().nbytes() or tracer.ledger.label_of(out) != "cpu":
                return False
            with torch_off():
                args = (torch.empty(out.shape, dtype=out.dtype), *args[1:])
        elif operator.mutable or not known:
            return False
        with torch_off():
            real = values.run_on_contents(tracer, operator.func, args, self._given(kwargs, generator))
        tracer.ledger.values[storage_key(out)] = real.untyped_storage()
        if tracer.ledger.step >= 0:
            tracer.drew = True
            tracer.ledger.drawn.add(storage_key(out))
        return True

    def advance(self, operator: Operator, args: Any, kwargs: Any, out: Any, generator: Any) -> None:
        """Draw fractions and forget them; after one draw that would be too many, no more."""
        if not out.is_floating_point():
            return
        self._left = self._left - out.numel() if out.numel() <= self._left else -1
        if self._left >= 0:
            with torch_off(), contextlib.suppress(RuntimeError):
                operator.func(*map_tensors(_unwritten, args), **values.on_cpu(self._given(kwargs, generator)))

    def _given(self, kwargs: dict[str, Any], generator: Any) -> dict[str, Any]:
        """The arguments of the real call; the state of its generator is kept."""
        used = torch.default_generator if generator is None else generator
        if used not in self._states:
            self._states[used] = used.get_state()
        return {**kwargs, "generator": generator} if "generator" in kwargs else kwargs


def _unwritten(tensor: Any) -> Any:
    """A real tensor with the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
