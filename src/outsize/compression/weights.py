"""The bytes of a model, and copies of it that share its tensors.

Bytes are those of storages, each counted once: tied weights count once, and so does a view of a larger tensor. Quantised
tensors are counted by the tensors inside them.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

from outsize.model.torch_port.dispatch import parts_of
from outsize.model.torch_port.objects import key_of, parameter_table

SMALL = 0.005
"""Modules with less than this share of the bytes are treated together."""


def count_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    storages = (inner.untyped_storage() for tensor in tensors for inner in parts_of(tensor))
    return sum({key_of(storage): storage.nbytes() for storage in storages}.values())


def share(model: Any) -> Any:
    """A copy of the modules that holds the same tensors."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def own_parameters(module: Any) -> list[Any]:
    """Parameters that the module holds itself, not in modules below it."""
    return [tensor for tensor in parameter_table(module).values() if tensor is not None]


@dataclass(frozen=True, slots=True)
class Site:
    """Modules that are treated together: those that share a parameter, or many small ones."""

    name: str
    """Name of the first module, or `small layers`."""
    modules: tuple[str, ...]


def sites_of(model: Any) -> list[Site]:
    """The modules that hold parameters, each in one site. Modules that share a parameter are one site."""
    import torch

    groups: list[tuple[list[str], dict[int, int]]] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.RNNBase) or not own_parameters(module):  # these keep their weights in a list too
            continue
        names, tensors = [name], {id(tensor): tensor.nbytes for tensor in own_parameters(module)}
        for group in [group for group in groups if group[1].keys() & tensors.keys()]:
            names, tensors = group[0] + names, group[1] | tensors
            groups.remove(group)
        groups.append((names, tensors))
    least = count_bytes(model) * SMALL
    large = [Site(names[0] or "model", tuple(names)) for names, tensors in groups if sum(tensors.values()) >= least]
    small = [name for names, tensors in groups if sum(tensors.values()) < least for name in names]
    return [*large, Site("small layers", tuple(small))] if small else large


def holders_of(model: Any) -> list[str]:
    """Names of all modules that hold parameters themselves."""
    return [name for name, module in model.named_modules() if own_parameters(module)]


def get(model: Any, name: str) -> Any | None:
    """The module of this name, None where there is none."""
    for part in name.split(".") if name else ():
        model = model._modules.get(part)
        if model is None:
            return None
    return model


def put(model: Any, old: Any, new: Any) -> Any:
    """The model with a module in another's place, wherever that stands."""
    if model is old:
        return new
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new
    return model
