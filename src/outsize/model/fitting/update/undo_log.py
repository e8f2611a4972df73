"""What an update changes, as it was.

In: parameters, their optimizer, and a way to copy tensors. Out: an `UndoRecord` of each, from which a step that fails is taken
back: values go into the same tensors, state that was not there is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UndoRecord:
    """A parameter and its optimizer state as they are now."""

    __slots__ = ("_state", "_value")

    def __init__(self, value: Any, state: dict[str, tuple[Any, Any]]) -> None:
        self._value = value
        self._state = state

    @classmethod
    def of(cls, parameters: list[Any], optimizer: Any, keep: Callable[[list[Any]], list[Any]]) -> list[UndoRecord]:
        """Of each parameter; `keep` copies a list of tensors."""
        import torch

        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        wanted = [*parameters, *(v for s in states for v in s.values() if isinstance(v, torch.Tensor))]
        with torch.no_grad():
            copies = iter(keep(wanted))
        values = [next(copies) for _ in parameters]
        return [
            cls(value, {n: (v, next(copies) if isinstance(v, torch.Tensor) else None) for n, v in state.items()})
            for value, state in zip(values, states, strict=True)
        ]

    def restore(self, parameter: Any, optimizer: Any, bring: Callable[[Any], Any]) -> None:
        """Write it back, into the same tensors."""
        import torch

        with torch.no_grad():
            parameter.data.copy_(bring(self._value))
            for value, kept in self._state.values():
                if kept is not None:
                    value.copy_(bring(kept))
        if self._state:
            optimizer.state[parameter] = {name: value for name, (value, _) in self._state.items()}
        else:
            optimizer.state.pop(parameter, None)
