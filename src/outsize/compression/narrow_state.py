"""An optimizer whose state waits in 8 or 4 bits between its steps.

In: the user's optimizer. Out: one with the same `step`, `zero_grad` and `param_groups`. Any optimizer that treats parameters one
by one keeps its class: the state of a few parameters is made whole, they are updated by its own code, and it is packed
again. On a card an Adam without steps taken becomes torchao's, where that is installed: it does the same in one kernel. On a CPU
that took 77 seconds to compile before its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.core.errors import InputError
from outsize.core.extras import has
from outsize.model.fitting.move.codes import SMALL, Codes, decode, encode
from outsize.model.fitting.update.optimizer_subset import parameters_of, step_only, why_not_one_by_one


class NarrowState:
    """The user's optimizer, with its state packed."""

    def __init__(self, optimizer: Any, bits: int) -> None:
        if bits not in (8, 4):
            raise InputError(f"bits is {bits!r}: optimizer state is kept in 8 or 4 bits")
        why = why_not_one_by_one(optimizer)
        if why is not None:
            raise InputError(f"its state cannot be kept in fewer bits: {why}")
        self.optimizer, self.bits = optimizer, bits
        self._packed: dict[Any, dict[str, tuple[Codes, Any]]] = {}

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state_bytes(self) -> int:
        """Bytes of the state as it is kept."""
        whole = [
            value for values in self.optimizer.state.values() for value in values.values() if hasattr(value, "nbytes")
        ]
        packed = [codes for values in self._packed.values() for codes, _ in values.values()]
        found: int = sum(value.nbytes for value in whole)
        found += sum(one.codes.nbytes + one.scales.nbytes for one in packed)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """One update, parameter by parameter."""
        for parameter in parameters_of(self.optimizer):
            if parameter.grad is None:
                continue
            self._unpack(parameter)
            step_only(self.optimizer, [(parameter, parameter)])
            self._pack(parameter)

    def whole(self) -> Any:
        """The optimizer with all of its state, such as for its `state_dict`."""
        for parameter in list(self._packed):
            self._unpack(parameter)
        return self.optimizer

    def _unpack(self, parameter: Any) -> None:
        import torch

        for name, (codes, like) in self._packed.pop(parameter, {}).items():
            value = torch.empty(like.shape, dtype=like.dtype, device=codes.codes.device)
            decode(codes, value.view(-1))
            self.optimizer.state[parameter][name] = value

    def _pack(self, parameter: Any) -> None:
        import torch

        state = self.optimizer.state.get(parameter, {})
        packed = {}
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() >= SMALL:
                with torch.no_grad():
                    packed[name] = (
                        encode(value.reshape(-1), self.bits, steps=False),
                        torch.empty_like(value, device="meta"),
                    )
                del state[name]
        if packed:
            self._packed[parameter] = packed


def make_narrow(make: Callable[[Any], Any], parameters: list[Any], bits: int) -> Any:
    """An optimizer for these parameters, with its state in so many bits."""
    optimizer = make(parameters)
    taken = _of_torchao(optimizer, bits) if all(p.is_cuda for p in parameters) and has("torchao") else None
    return NarrowState(optimizer, bits) if taken is None else taken


def _of_torchao(optimizer: Any, bits: int) -> Any:
    """torchao's, None where it has none of this kind."""
    import torch
    from torchao import optim

    kinds = {torch.optim.Adam: f"Adam{bits}bit", torch.optim.AdamW: f"AdamW{bits}bit"}
    kind = getattr(optim, kinds.get(type(optimizer), ""), None)
    known = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad")
    if kind is None or any(group.get("maximize") for group in optimizer.param_groups):
        return None
    return kind([{key: group[key] for key in known if key in group} for group in optimizer.param_groups])
