"""Weights that visit the device while their module runs.

In: modules whose parameters live in a store. Out: the same forward and backward pass: a module's weights come before
its forward pass and leave after it; they come again when the gradient of its output is known, and each one leaves
when its own gradient is complete, because autograd completes it only after every use of the weight. The module that
will run next is fetched meanwhile where copies run beside kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.fitting.move.evicted import EvictedStorages
from outsize.model.fitting.run.recompute import is_second_run
from outsize.model.torch_port.dispatch import leaves_of


class Streamer:
    """Brings and sends the weights of units, which are modules."""

    def __init__(self, units: dict[str, Any], evicted: EvictedStorages, ahead: bool) -> None:
        self._evicted = evicted
        self._ahead = ahead
        self.parameters: dict[str, list[Any]] = {name: list(unit.parameters()) for name, unit in units.items()}
        self.ids = {id(parameter) for parameters in self.parameters.values() for parameter in parameters}
        self._order: list[str] = list(units)
        """Units as the last forward pass met them; before that as the model has them, so that a dry run's only step is like
        those that follow."""
        self._met: list[str] = []

    def wrap(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with its weights at home for as long as it runs."""
        parameters = self.parameters[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._evicted.fetch(parameters)
            if is_second_run():  # of a module that this one is in: as in `hold`
                return forward(*args, **kwargs)
            self._meet(name)
            try:
                out = forward(*args, **kwargs)
            finally:
                self._evicted.send(parameters, dirty=False)
            # they come again with the first gradient of any of it
            for leaf in leaves_of(out) if torch.is_grad_enabled() else ():
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._evicted.fetch(parameters))
            return out

        return run

    def hold(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` for the second run of a checkpoint: weights come and stay for the backward pass that follows."""
        parameters = self.parameters[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._evicted.fetch(parameters)
            return forward(*args, **kwargs)

        return run

    def _meet(self, name: str) -> None:
        """Start to bring the unit that came after this one last time."""
        self._met.append(name)
        if not self._ahead or name not in self._order:
            return
        following = self._order.index(name) + 1
        if following < len(self._order):
            self._evicted.begin(self.parameters[self._order[following]])

    def accumulated(self, parameter: Any) -> None:
        """The parameter's gradient is complete: it is needed no more in this backward pass."""
        if id(parameter) in self.ids:
            self._evicted.send([parameter], dirty=False)

    def leave(self) -> None:
        """The pass is over: everything that is still here goes."""
        for parameters in self.parameters.values():
            self._evicted.send(parameters, dirty=False)
        if self._met:
            self._order, self._met = self._met, []
