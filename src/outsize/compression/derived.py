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


class Codec(Protocol):
    """How a tensor is stored."""

    @property
    def name(self) -> str:
        """In a few words: `int8`."""

    @property
    def trains(self) -> tuple[str, ...]:
        """Parts that an optimizer may change. Scales are not among them: a step that suits weights is too long for scales."""

    def decode(self, stored: dict[str, Any]) -> Any:
        """The tensor again, nearly."""


def derive(module: Any, name: str, codec: Codec, stored: dict[str, Any]) -> None:
    """Keep the parameter `name` as what `codec` decodes from `stored`."""
    parameter_table(module).pop(name, None)
    for part, tensor in stored.items():
        module.register_parameter(f"{name}_{part}", tensor)
    _set_derived(module, {**module.__dict__.get("derived", {}), name: (codec, tuple(stored))})


def underive(module: Any, name: str) -> dict[str, Any]:
    """What was stored for the parameter `name`, which the module no longer has."""
    kept = dict(module.derived)
    _, parts = kept.pop(name)
    _set_derived(module, kept)
    return {part: parameter_table(module).pop(f"{name}_{part}") for part in parts}


def _set_derived(module: Any, derived: dict[str, Any]) -> None:
    base: Any = getattr(type(module), "derived_from", type(module))
    module.__dict__["derived"] = derived
    module.__class__ = derived_class(base, tuple(derived)) if derived else base


def as_parameters(codec: Codec, tensors: dict[str, Any], trained: bool) -> dict[str, Any]:
    """What a codec stores, as parameters, which are trained if the parameter was and the codec allows it."""
    import torch

    return {
        part: torch.nn.Parameter(tensor, requires_grad=trained and part in codec.trains)
        for part, tensor in tensors.items()
    }


def read(module: Any, name: str) -> Any:
    """The parameter as it is computed now."""
    codec, parts = module.derived[name]
    return codec.decode({part: getattr(module, f"{name}_{part}") for part in parts})


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
