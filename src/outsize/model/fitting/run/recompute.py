"""A forward pass that forgets what it saves and runs again when the backward pass asks for it.

In: a function that runs a module a second time. Out: `Call`, whose two methods are the hooks of autograd's saved tensors,
`Given`, its arguments, and `Settings`, autocast as it was. At the first tensor that is asked for the module runs again,
and stops as soon as all is there. Torch's own checkpoint takes twice the processor's time for the same (1 ms a module on
the machine of an H200, where launches bind small steps), and holds on to inputs that should wait elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.torch_port.dispatch import leave_uncompiled


class _Enough(Exception):
    """All that is needed has been computed again."""


class Call:
    """One call of a module: what it saved, forgotten and found again."""

    def __init__(self, again: Callable[[], Any], once: str = "") -> None:
        self._again = again
        self._once = once
        """What to say where a tensor is asked for twice; empty: it is made once more."""
        self._count = 0
        self._found: dict[int, Any] | None = None
        _leave_as_it_is(Call.forget.__code__)

    def forget(self, tensor: Any) -> int:
        """Only the number of the saved tensor stays."""
        self._count += 1
        return self._count - 1

    def recall(self, number: int) -> Any:
        """The tensor of this number; the first to be asked for makes all of them."""
        if self._found is None or (number not in self._found and not self._once):
            self._run()
        assert self._found is not None
        if number not in self._found:
            raise InputError(self._once)
        return self._found.pop(number)

    def _run(self) -> None:
        import torch

        found: dict[int, Any] = {}

        def keep(tensor: Any) -> Any:
            if len(found) < self._count:  # else a module has caught what said that it is enough
                found[len(found)] = tensor.detach()
            if len(found) == self._count:
                raise _Enough
            return tensor.detach()

        _leave_as_it_is(keep.__code__)
        with (
            contextlib.suppress(_Enough),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            self._again()
        if len(found) != self._count:
            raise RuntimeError(
                f"a second forward pass saved {len(found)} tensors and the first {self._count}: the module does not do the "
                "same twice"
            )
        self._found = found


@functools.cache
def _leave_as_it_is(code: Any) -> None:
    """What is compiled inside a module calls the hooks: the compiler would compile those too, once for every number."""

    leave_uncompiled(code)


class Given:
    """Positional arguments of a call that wait for its second run, saved as autograd saves tensors: whoever keeps those
    elsewhere keeps these too."""

    __slots__ = ("_saver", "_values")

    def __init__(self, args: tuple[Any, ...]) -> None:
        import torch

        tensors = {id(value): value for value in args if isinstance(value, torch.Tensor)}
        places = {key: place for place, key in enumerate(tensors)}
        self._values: list[Any] = [places.get(id(value), (value,)) for value in args]
        """Numbers of tensors, other values in a tuple."""
        self._saver = _saver().apply(torch.empty(0, requires_grad=True), *tensors.values())
        """Its node alone would not keep what it saves."""

    def bring(self) -> list[Any]:
        """The arguments; what was given twice is one object again: attention looks whether keys are queries."""
        tensors = self._saver.grad_fn.saved_tensors
        return [value[0] if isinstance(value, tuple) else tensors[value] for value in self._values]


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


class Settings:
    """Autocast at the moment of a call."""

    __slots__ = ("_autocast", "_cached")

    def __init__(self, device: str) -> None:
        import torch

        self._cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device, "cpu"))
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """As it was."""
        import torch

        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cached))
            yield
