"""Takes indices out of a model: smaller tensors in the same modules, and the sizes that modules keep as numbers.

In: a model, its trace, which indices stay. Out: the same modules with smaller parameters and buffers. No tensor is written
into: new ones take the places of the old ones, and tensors of several names stay one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.compression.pruning.axes import Axis, Dim, Kept, dims_of, kept_of, left_of, size_of
from outsize.compression.pruning.call import Axes
from outsize.compression.weights import get
from outsize.model.torch_port.objects import buffer_table, parameter_table

SIZES: dict[str, dict[str, tuple[str, int]]] = {
    "Linear": {"out_features": ("weight", 0), "in_features": ("weight", 1)},
    "Embedding": {"embedding_dim": ("weight", 1)},
    "BatchNorm1d": {"num_features": ("running_mean", 0)},
    "BatchNorm2d": {"num_features": ("running_mean", 0)},
    "BatchNorm3d": {"num_features": ("running_mean", 0)},
    "GroupNorm": {"num_channels": ("weight", 0)},
    "Conv1d": {"out_channels": ("weight", 0), "in_channels": ("weight", 1)},
    "Conv2d": {"out_channels": ("weight", 0), "in_channels": ("weight", 1)},
    "Conv3d": {"out_channels": ("weight", 0), "in_channels": ("weight", 1)},
    "ConvTranspose1d": {"in_channels": ("weight", 0), "out_channels": ("weight", 1)},
    "ConvTranspose2d": {"in_channels": ("weight", 0), "out_channels": ("weight", 1)},
    "ConvTranspose3d": {"in_channels": ("weight", 0), "out_channels": ("weight", 1)},
    "Conv1D": {"nx": ("weight", 0), "nf": ("weight", 1)},
}
"""Class -> number that it keeps -> the tensor and axis that it is the size of. The second axis of a convolution is that of
one group."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A number of a module that is the size of an axis, found by trials: `num_heads` of an attention. A later one counts."""

    module: str
    attribute: str
    place: int | None
    """Its place where the attribute is a tuple."""
    axis: Axis


def remove(model: Any, tensors: Mapping[str, Axes], kept: Kept, fixes: Sequence[Fix]) -> None:
    """Leaves only what is kept, in place."""
    done: dict[int, Any] = {}
    for name, axes in tensors.items():
        if any(dim in kept for axis in axes for dim in dims_of(axis)):
            replace(model, name, lambda old, axes=axes: select(old, axes, kept), done)  # type: ignore[misc]
    counts = {dim: int(np.count_nonzero(stays)) for dim, stays in kept.items()}
    put: set[tuple[str, str, int | None]] = set()
    for fix in fixes:
        module, number = get(model, fix.module) if fix.module else model, (fix.module, fix.attribute, fix.place)
        changes = number in put or any(dim in kept for dim in dims_of(fix.axis))
        if (
            module is not None and changes
        ):  # other numbers are those of axes that an earlier removal may have made shorter
            put_number(module, fix.attribute, fix.place, left_of(fix.axis, counts))
            put.add(number)
    for module in model.modules():
        _set_sizes(module)


def fits(model: Any, tensors: Mapping[str, Axes], kept: Kept) -> bool:
    """True where the model still has all that is to be made smaller, in the sizes of the trace."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, axes in tensors.items():
        if any(dim in kept for axis in axes for dim in dims_of(axis)):
            tensor = held.get(name)
            if tensor is None or tuple(tensor.shape) != tuple(map(size_of, axes)):
                return False
    return True


def replace(model: Any, name: str, change: Callable[[Any], Any], done: dict[int, Any]) -> None:
    """A new tensor in the place of this name; `done` holds what others became, so that tensors of several names stay one."""
    import torch

    owner, _, last = name.rpartition(".")
    module: Any = get(model, owner) if owner else model
    parameters = parameter_table(module)
    table = parameters if last in parameters else buffer_table(module)
    old = table[last]
    if id(old) not in done:
        new = change(old.detach())
        done[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad) if table is parameters else new
        done[-id(old)] = old  # held, so that no other gets its number
    table[last] = done[id(old)]


def select(tensor: Any, axes: Axes, kept: Kept) -> Any:
    """The part of a tensor that stays."""
    for place, stays in _shortened(axes, kept):
        tensor = tensor.index_select(place, _places(stays, tensor))
    return tensor


def masked(tensor: Any, axes: Axes, kept: Kept) -> Any:
    """The tensor with zeros for all that leaves."""
    for place, stays in _shortened(axes, kept):
        tensor = tensor.index_fill(place, _places(~stays, tensor), 0)
    return tensor


def _shortened(axes: Axes, kept: Kept) -> Iterator[tuple[int, Any]]:
    """(place, which indices stay) of the axes that lose some."""
    found = ((place, kept_of(axis, kept)) for place, axis in enumerate(axes))
    return ((place, stays) for place, stays in found if not stays.all())


def _places(chosen: Any, tensor: Any) -> Any:
    import torch

    return torch.from_numpy(np.flatnonzero(chosen)).to(tensor.device)


def put_number(module: Any, attribute: str, place: int | None, value: int) -> None:
    """Sets a number of a module, or one in a tuple of it."""
    if place is not None:
        old = getattr(module, attribute)
        changed = [*old[:place], value, *old[place + 1 :]]
        setattr(module, attribute, type(old)(changed))
    else:
        setattr(module, attribute, value)


def _set_sizes(module: Any) -> None:
    """The numbers that modules of torch keep beside their tensors."""
    for number, (tensor, place) in SIZES.get(type(module).__name__, {}).items():
        held = getattr(module, tensor, None)
        if held is not None and hasattr(module, number):
            groups = getattr(module, "groups", 1) if place == 1 else 1
            setattr(module, number, held.shape[place] * groups)
    shape = getattr(module, "normalized_shape", None)
    if shape is not None and getattr(module, "weight", None) is not None:
        module.normalized_shape = tuple(module.weight.shape)


def removable(tensors: Mapping[str, Axes]) -> list[Dim]:
    """Dims of which indices may leave."""
    found = {dim: None for axes in tensors.values() for axis in axes for dim in dims_of(axis) if not dim.why}
    return list(found)
