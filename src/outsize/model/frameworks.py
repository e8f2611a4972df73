"""Whose step it is: torch's, JAX's or Keras's. Nothing is imported for it, and nothing is called.

In: what a verb was given (a step, a model, arguments, a builder). Out: the name of a framework. Objects decide first: an array
or a model of a framework. Then functions: what their code names, what they close over, and the user's own functions that
they call. A step that names several is torch's, which was here first, unless one of its objects says otherwise.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

TORCH = "torch"
PACKAGES = {
    "torch": TORCH, "torchvision": TORCH, "torch_geometric": TORCH, "transformers": TORCH, "timm": TORCH, "lightning": TORCH,
    "jax": "jax", "jaxlib": "jax", "flax": "jax", "optax": "jax", "equinox": "jax", "haiku": "jax",
    "keras": "keras", "tensorflow": "keras", "tf_keras": "keras",
}  # fmt: skip
"""Package -> framework."""
ADAPTERS = {"jax": "outsize.model.jax", "keras": "outsize.model.keras"}
"""Framework -> the module with its `estimate` and `fit`. Those of torch are the verbs themselves."""
FIRST = "calls_first"
"""Attribute of a step that only calls its first argument with the others: that one is the step, and may be a model."""
_MOST = 10_000
"""Objects that are looked at."""


def adapter_of(*given: Any) -> Any | None:
    """The module that knows the framework of what was given; None for torch."""
    name = ADAPTERS.get(framework_of(*given))
    return None if name is None else importlib.import_module(name)


def framework_of(*given: Any) -> str:
    """`torch`, `jax` or `keras`; torch where nothing says so."""
    by_object = set(filter(None, (_package_of(type(each)) for each in _objects(given))))
    named = by_object or set(filter(None, _named(given)))
    return TORCH if TORCH in named or not named else min(named)


def _objects(given: Iterable[Any]) -> Iterator[Any]:
    """The objects inside containers, no functions of the user."""
    left, seen = [*given], 0
    while left and seen < _MOST:
        each, seen = left.pop(), seen + 1
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list | tuple | set):
            left.extend(each)
        elif is_dataclass(each) and not isinstance(each, type) and _package_of(type(each)) is None:
            left.extend(getattr(each, field.name, None) for field in fields(each))
        elif not isinstance(each, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
            yield each


def _named(given: Iterable[Any]) -> Iterator[str | None]:
    """Frameworks that functions name, and those that they call or close over."""
    left: list[Any] = [each for each in given if callable(each)]
    done: set[int] = set()
    while left and len(done) < _MOST:
        each = left.pop()
        if id(each) in done:
            continue
        done.add(id(each))
        if isinstance(each, types.ModuleType):
            yield PACKAGES.get(each.__name__.partition(".")[0])
            continue
        found = _package_of(each if isinstance(each, type | types.FunctionType) else type(each))
        if found is not None:
            yield found
            continue
        function = _function_in(each)
        if function is None:
            continue
        names = _names(function.__code__)
        yield from (PACKAGES.get(name) for name in names if name not in function.__globals__)  # imported inside
        left += [function.__globals__[name] for name in names if name in function.__globals__]
        left += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _function_in(each: Any) -> types.FunctionType | None:
    """The Python function that an object calls."""
    wrapped = getattr(each, "__wrapped__", None) or getattr(each, "func", None)
    for one in (each, wrapped, getattr(each, "__func__", None), vars(type(each)).get("__call__")):
        if isinstance(one, types.FunctionType):
            return one
    return None


def _names(code: types.CodeType) -> set[str]:
    """Global names and imported packages of a function and of the functions inside it."""
    names = {name.partition(".")[0] for name in code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _package_of(kind: Any) -> str | None:
    """The framework in whose package a type or a function is."""
    places = [kind, *getattr(kind, "__mro__", ())]
    found = (PACKAGES.get(str(getattr(place, "__module__", "") or "").partition(".")[0]) for place in places)
    return next(filter(None, found), None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
