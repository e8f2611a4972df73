"""A forward pass that keeps its inputs only and runs again when the backward pass comes to it.

In: a unit's forward function. Out: another with the same result and gradient. What operators save for the backward pass
is forgotten at once; at the first that is asked for, the unit runs again (random numbers, autocast and written buffers as
the first time) and stops as soon as all is there again. Inputs can wait in host memory meanwhile. Torch's own checkpoint
would do but for that: it holds on to the inputs itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.activations import _dense
from outsize.model.fitting.twice import Twice, generators_of, written_in

Forward = Callable[..., Any]


class _Enough(Exception):
    """All that is needed has been computed again."""


class Inputs:
    """Arguments of a call that wait for its second run; `keep(tensor)` gives a function that brings it back."""

    def __init__(self, args: Any, kwargs: Any, keep: Callable[[Any], Callable[[], Any]] | None) -> None:
        import torch
        from torch.utils._pytree import tree_flatten

        leaves, self._spec = tree_flatten((args, kwargs))
        self._given = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor)]
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
        if any(leaf._version != version for leaf, version in given):
            raise InputError(
                f"{type(module).__name__} changes its input in place, so it cannot run twice: let it work on a copy"
            )

    def bring(self) -> Any:
        """(args, kwargs) with tensors that are the beginning of a new graph."""
        from torch.utils._pytree import tree_unflatten

        tensors = [give().detach().requires_grad_(needs) for give, needs in self._tensors]
        values = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self._leaves]
        return tree_unflatten(values, self._spec)


def _same(tensor: Any) -> Callable[[], Any]:
    return lambda: tensor


class Call:
    """One call of a unit: what it saved, forgotten and found again."""

    def __init__(self, again: Callable[[], Any]) -> None:
        self._again = again
        self._count = 0
        self._found: dict[int, Any] | None = None

    def forget(self, tensor: Any) -> int:
        """Only the number of the saved tensor stays."""
        self._count += 1
        return self._count - 1

    def recall(self, number: int) -> Any:
        """The tensor of this number; the first to be asked for makes all of them."""
        if self._found is None:
            self._run()
        assert self._found is not None
        if number not in self._found:
            raise InputError(
                "the loss goes back through the model more than once (gradients of gradients, retain_graph): a unit on a visit "
                "can do it once, so fit a model that the device holds, without device="
            )
        return self._found.pop(number)

    def _run(self) -> None:
        import torch

        found: dict[int, Any] = {}

        def keep(tensor: Any) -> Any:
            found[len(found)] = tensor.detach()
            if len(found) == self._count:
                raise _Enough
            return tensor.detach()

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


def run_again(
    module: Any, first: Forward, second: Forward, written: dict[Any, tuple[str, ...]], device: Any, real: bool,
    keep: Callable[[Any], Callable[[], Any]] | None,
) -> Forward:  # fmt: skip
    """`first` now, `second` when the backward pass needs what it saved."""
    import torch

    mine = written_in(module, written)
    generators = generators_of(device) if real else []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return first(*args, **kwargs)
        if keep is not None:
            args, kwargs = _packed((args, kwargs))
        inputs = Inputs(args, kwargs, keep)
        runs = Twice(mine, generators)
        settings = _Settings(device)

        def again() -> None:
            args, kwargs = inputs.bring()
            with settings.restored(), runs.second():
                second(*args, **kwargs)

        call = Call(again)
        with torch.autograd.graph.saved_tensors_hooks(call.forget, call.recall), runs.first():
            out = first(*args, **kwargs)
        inputs.check(module)
        return out

    return run


def _packed(value: Any) -> Any:
    """Tensors without gaps: both runs have to see the same strides, and what waits elsewhere has no gaps."""
    import torch
    from torch.utils._pytree import tree_map

    made: dict[int, Any] = {}

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        return made.setdefault(id(leaf), _dense(leaf))

    return tree_map(pack, value)


class _Settings:
    """Autocast at the moment of a call."""

    def __init__(self, device: Any) -> None:
        import torch

        kinds = dict.fromkeys((device.type, "cpu"))
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        import torch

        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype, cached in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield
