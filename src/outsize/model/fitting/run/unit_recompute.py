"""A unit that is computed again when the backward pass comes to it, and whose inputs wait in host memory meanwhile.

In: a unit's forward function. Out: another with the same result and gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.run.recompute import Call, Settings
from outsize.model.fitting.run.saved_activations import _dense
from outsize.model.fitting.run.second_run import Twice, written_in
from outsize.model.torch_port.dispatch import flatten_value, map_leaves, nest_value
from outsize.model.torch_port.objects import version_of

Forward = Callable[..., Any]

ONCE = (
    "the loss goes back through the model more than once (gradients of gradients, retain_graph): a unit on a visit can do it "
    "once, so fit a model that the device holds, without device="
)
"""What is said where saved tensors are asked for a second time."""


class Inputs:
    """Arguments of a call that wait for its second run; `keep(tensor)` gives a function that brings it back."""

    def __init__(self, args: Any, kwargs: Any, keep: Callable[[Any], Callable[[], Any]] | None) -> None:
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


def run_again(
    module: Any, first: Forward, second: Forward, written: dict[Any, tuple[str, ...]], device: Any,
    generators: list[Any], keep: Callable[[Any], Callable[[], Any]] | None,
) -> Forward:  # fmt: skip
    """`first` now, `second` when the backward pass needs what it saved; it draws the same from `generators`."""
    import torch

    mine = written_in(module, written)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return first(*args, **kwargs)
        if keep is not None:
            args, kwargs = _packed((args, kwargs))
        inputs = Inputs(args, kwargs, keep)
        runs = Twice(mine, generators)
        settings = Settings(device.type)

        def again() -> None:
            args, kwargs = inputs.bring()
            with settings.restored(), runs.second():
                second(*args, **kwargs)

        call = Call(again, ONCE)
        with torch.autograd.graph.saved_tensors_hooks(call.forget, call.recall):
            out = first(*args, **kwargs)
        inputs.check(module)
        return out

    return run


def _packed(value: Any) -> Any:
    """Tensors without gaps: both runs have to see the same strides, and what waits elsewhere has no gaps."""
    import torch

    made: dict[int, Any] = {}

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        return made.setdefault(id(leaf), _dense(leaf))

    return map_leaves(pack, value)
