"""Parameters that are computed when they are read: a weight kept in a narrow dtype, as a few rows, and so on.

In: a module, the name of one of its parameters, and a codec. Out: the same module, which holds what the codec stores instead of
the parameter. The module's class becomes a class made from it that has a property of the parameter's name, so the module's own
`forward` and any code that reads `module.weight` get a tensor as before. This serves every class of modules with one
mechanism. It can be stacked: what a codec stores can be stored by another.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from outsize.model.torch_port.objects import parameter_table

SEPARATOR = "_"


class Codec(Protocol):
    """How a tensor is stored."""

    name: str
    """In a few words: `int8`."""

    def encode(self, tensor: Any) -> dict[str, Any]:
        """What is stored, by name. A floating-point tensor may be trained, others are kept as they are."""
        ...

    def decode(self, stored: dict[str, Any]) -> Any:
        """The tensor again, nearly."""
        ...


def derive(module: Any, name: str, codec: Codec, stored: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keep the parameter `name` as `codec` stores it; `stored` where another module that shares the parameter has it already."""
    import torch

    parameter = parameter_table(module).pop(name)
    parts = stored or {
        part: torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1
        else torch.nn.Parameter(tensor, requires_grad=False)
        for part, tensor in codec.encode(parameter.detach()).items()
    }
    for part, tensor in parts.items():
        module.register_parameter(f"{name}{SEPARATOR}{part}", tensor)
    module.__dict__["derived"] = {**module.__dict__.get("derived", {}), name: (codec, tuple(parts))}
    base: Any = getattr(type(module), "derived_from", type(module))
    module.__class__ = derived_class(base, tuple(module.derived))
    return parts


def read(module: Any, name: str) -> Any:
    """The parameter as it is computed now."""
    codec, parts = module.derived[name]
    return codec.decode({part: getattr(module, f"{name}{SEPARATOR}{part}") for part in parts})


@functools.cache
def derived_class(base: type, names: tuple[str, ...]) -> type:
    """A class made from `base` whose parameters `names` are computed."""
    properties = {name: property(functools.partial(read, name=name)) for name in names}
    members = {"derived_from": base, "__reduce_ex__": _reduce, "extra_repr": _describe, "__module__": __name__}
    return type(f"Derived{base.__name__}", (base,), members | properties)


def _reduce(module: Any, protocol: Any) -> Any:
    """Classes that are made while running cannot be found by their names: a copy or a file says what they were made from."""
    return _make, (type(module).derived_from, tuple(module.derived)), module.__dict__


def _make(base: type, names: tuple[str, ...]) -> Any:
    kind: Any = derived_class(base, names)
    return kind.__new__(kind)


def _describe(module: Any) -> str:
    kept = ", ".join(f"{name}: {codec.name}" for name, (codec, _) in module.derived.items())
    return f"{type(module).derived_from.extra_repr(module)}; {kept}"
