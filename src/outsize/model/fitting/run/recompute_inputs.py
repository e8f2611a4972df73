"""How the arguments of a call wait for its second run.

In: the arguments. Out: the same for the first run, and `Inputs`, which gives them again: saved as autograd saves tensors, or
brought by whoever keeps them, on the device or on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from outsize.core.errors import InputError
from outsize.model.fitting.move.stored_tensor import without_gaps
from outsize.model.torch_port.dispatch import flatten_value, map_leaves, nest_value
from outsize.model.torch_port.objects import version_of

Keep = Callable[[Any], Callable[[], Any]]
"""Takes a tensor, gives a function that brings it back."""


class Inputs(Protocol):
    """Arguments of a first run that wait for the second."""

    def check(self, module: Any) -> None:
        """An `InputError` where the first run has changed what it was given: it could not run a second time."""

    def bring(self) -> tuple[Any, Any]:
        """(args, kwargs) for the second run."""


KeepInputs = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any, Inputs]]
"""(args, kwargs) -> those of the first run, and those that wait."""


def save_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Inputs]:
    """Arguments wait among what autograd saves."""
    return args, kwargs, SavedInputs(args, kwargs)


def keep_inputs(keep: Keep | None) -> KeepInputs:
    """They wait where `keep` puts them, or on the device."""

    def wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Inputs]:
        if keep is not None:
            args, kwargs = _packed((args, kwargs))
        return args, kwargs, WaitingInputs(args, kwargs, keep)

    return wait


class SavedInputs:
    """Positional arguments, saved as autograd saves tensors: whoever keeps those elsewhere keeps these too."""

    __slots__ = ("_kwargs", "_saver", "_values")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        tensors = {id(value): value for value in args if isinstance(value, torch.Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        self._values: list[Any] = [places.get(id(value), (value,)) for value in args]
        """Numbers of tensors, other values in a tuple."""
        self._saver = _saver().apply(torch.empty(0, requires_grad=True), *tensors.values())
        """Its node alone would not keep what it saves."""
        self._kwargs = kwargs

    def check(self, module: Any) -> None:
        """Autograd finds what was changed."""

    def bring(self) -> tuple[Any, Any]:
        """What was given twice is one object again: attention looks whether keys are queries."""
        tensors = self._saver.grad_fn.saved_tensors
        return [value[0] if isinstance(value, tuple) else tensors[value] for value in self._values], self._kwargs


@functools.cache
def _saver() -> Any:
    import torch

    class Saver(torch.autograd.Function):  # type: ignore[misc]
        """A node that saves what it is given and is part of no graph."""

        @staticmethod
        def forward(ctx: Any, nothing: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return nothing.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise AssertionError("nobody goes back through it")

    return Saver


class WaitingInputs:
    """All arguments; `keep(tensor)` gives a function that brings it back, None: they stay where they are."""

    def __init__(self, args: Any, kwargs: Any, keep: Keep | None) -> None:
        import torch

        leaves, self._spec = flatten_value((args, kwargs))
        self._given = [(leaf, version_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves: list[Any] = []
        """Numbers of tensors, values in a tuple for the rest."""
        self._tensors: list[tuple[Callable[[], Any], bool]] = []
        """(function that gives a tensor, does it need a gradient), each once: modules ask whether two inputs are the same."""
        numbers: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append((leaf,))
                continue
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(self._tensors)
                away = keep is not None and leaf.requires_grad and not leaf.is_leaf
                give = keep(leaf.detach()) if away and keep is not None else _same(leaf.detach())
                self._tensors.append((give, leaf.requires_grad))
            self._leaves.append(numbers[id(leaf)])

    def check(self, module: Any) -> None:
        """An `InputError` where the call has changed what it was given: it could not run a second time."""
        given, self._given = self._given, []
        if any(version_of(leaf) != version for leaf, version in given):
            raise InputError(
                f"{type(module).__name__} changes its input in place, so it cannot run twice: let it work on a copy"
            )

    def bring(self) -> Any:
        """(args, kwargs) with tensors that are the beginning of a new graph."""

        tensors = [give().detach().requires_grad_(needs) for give, needs in self._tensors]
        values = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self._leaves]
        return nest_value(values, self._spec)


def _same(tensor: Any) -> Callable[[], Any]:
    return lambda: tensor


def _packed(value: Any) -> Any:
    """Tensors without gaps: both runs have to see the same strides, and what waits elsewhere has no gaps."""
    import torch

    made: dict[int, Any] = {}

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        return made.setdefault(id(leaf), without_gaps(leaf))

    return map_leaves(pack, value)
