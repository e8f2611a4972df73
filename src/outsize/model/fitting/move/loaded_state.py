"""State on its way from a checkpoint to an optimizer whose state lives elsewhere.

In: the dict that the optimizer's `load_state_dict` was given. Out: one like it for torch's own code, which moves each tensor to
its parameter's device with `.to(...)`: there a tensor is made by that very call and goes to the store before the next one
comes, so that the device holds one of them. What the optimizer has is replaced at the end, by torch, in one assignment: a load
that fails before that has changed nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from outsize.core.errors import OutOfMemory
from outsize.core.units import format_bytes
from outsize.model.fitting.move.evicted import EvictedStorages
from outsize.model.fitting.move.out_of_memory import in_a_line, is_out_of_memory
from outsize.model.torch_port.dispatch import no_subclass_functions
from outsize.model.torch_port.objects import sizeof


class LoadingTensor:
    """First base of the class of a tensor that is to be loaded; to everybody but torch's loading it is what was given."""

    given: Any
    """The checkpoint's own tensor."""
    evicted: EvictedStorages
    """Who takes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:

        if getattr(func, "__name__", "") == "to" and kwargs and "device" in kwargs:
            return cls._arrive(args[0].given, kwargs)
        with no_subclass_functions():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        return _dress(copy.deepcopy(self.given, memo), type(self))

    @classmethod
    def _arrive(cls, given: Any, where: dict[str, Any]) -> Any:
        """As `.to`, and away at once; what is there already stays the checkpoint's tensor, until a step sends it."""
        failure = ""
        try:
            made = given.to(**where)
            if made is given and made.untyped_storage().resizable():
                return made
            made = made.clone() if made is given else made  # a file's memory cannot be let go of
            cls.evicted.take_in(made)
            return made
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            failure = in_a_line(error)
        raise OutOfMemory(
            f"load_state_dict() found no room for {format_bytes(sizeof(given))} of optimizer state on their way to where they "
            f"wait ({cls.evicted.store.name}): {failure}. Nothing is lost: the optimizer has the state that it had"
        )


def load_elsewhere(saved: Any, evicted: EvictedStorages) -> Any:
    """The dict with tensors that arrive one by one; step counters, and what is no plain tensor, are as they were."""
    kind = type("LoadingTensor", (LoadingTensor, torch.Tensor), {"evicted": evicted})

    def dressed(name: Any, value: Any) -> Any:
        plain = type(value) is torch.Tensor and not value.requires_grad and value.layout is torch.strided
        return _dress(value, kind) if plain and name != "step" and value.dim() and value.numel() > 1 else value

    made = copy.copy(saved)
    made["state"] = {
        key: {n: dressed(n, value) for n, value in values.items()} if isinstance(values, dict) else values
        for key, values in saved["state"].items()
    }
    return made


def _dress(value: Any, kind: type) -> Any:
    made = value.as_subclass(kind)
    made.given = value
    return made
