"""A forward pass that forgets what it saves and runs again when the backward pass asks for it.

In: a module's forward function, and how its inputs wait. Out: another with the same result and gradient. At the first tensor that
is asked for the module runs again, and stops as soon as all is there; it finds random numbers, buffers and autocast as the first
run did. Torch's own checkpoint takes twice the processor's time for the same (1 ms a module on the machine of an H200, where
launches bind small steps), and holds on to inputs that should wait elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.run.recompute_inputs import KeepInputs, save_inputs
from outsize.model.fitting.run.second_run import TwoRuns, written_in
from outsize.model.torch_port.dispatch import leave_uncompiled

Forward = Callable[..., Any]


def recomputed(
    module: Any, first: Forward, second: Forward, keep: KeepInputs, written: dict[Any, tuple[str, ...]], device: str,
    generators: list[Any], once: str = "",
) -> Forward:  # fmt: skip
    """`first` now, `second` when the backward pass needs what it saved.

    `keep` says how inputs wait, `written` which buffers forward passes write, by module, `generators` where random numbers come
    from, `once` what to say where the backward pass comes a second time; empty: it may.
    """
    import torch

    mine = written_in(module, written)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return first(*args, **kwargs)
        args, kwargs, inputs = keep(args, kwargs)
        runs, settings = TwoRuns(mine, generators), Settings(device)

        def again() -> None:
            args, kwargs = inputs.bring()
            with settings.restored(), runs.second():
                second(*args, **kwargs)

        call = Call(again, once)
        with torch.autograd.graph.saved_tensors_hooks(call.forget, call.recall):
            out = first(*args, **kwargs)
        inputs.check(module)
        return out

    return run


def checkpointed(
    module: Any, forward: Forward, written: dict[Any, tuple[str, ...]], device: str, generators: list[Any]
) -> Forward:
    """`forward` that keeps its inputs only, saved as autograd saves tensors."""
    import torch

    def uncached(*args: Any, **kwargs: Any) -> Any:
        """Autocast keeps lower copies of weights until it ends; here each is used once, so they may go at once."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(before)

    return recomputed(module, uncached, uncached, save_inputs, written, device, generators)


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
        """Autocast as it was in the first run."""
        import torch

        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cached))
            yield
