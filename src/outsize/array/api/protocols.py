"""NumPy's calls on lazy arrays: `np.add(x, y, out=z)`, `np.add.reduce(x)`, `np.mean(x, 0)`.

In: NumPy's function and the arguments it was called with. Out: what our function of that name makes of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from outsize.array.graph.elementwise import WHERE, operation
from outsize.core.errors import InputError

if TYPE_CHECKING:
    from outsize.array.api.lazy import Array

REDUCTIONS = {
    "add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "logical_and": "all", "logical_or": "any",
}  # fmt: skip
"""Of ufuncs whose `reduce` is a reduction."""
SCANS = {"add": "cumsum", "multiply": "cumprod"}
"""Of ufuncs whose `accumulate` is a running sum or product."""


def call_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What `ufunc.method(*inputs, **options)` is, or NotImplemented."""
    if method in ("reduce", "accumulate"):
        return _call_method(ufunc, method, inputs, options)
    if method == "outer" and len(inputs) == 2 and not options:
        import outsize.array as namespace

        one, two = (namespace.asarray(value) for value in inputs)
        return call_ufunc(ufunc, "__call__", (one[(..., *[None] * two.ndim)], two), {})
    if method != "__call__" or set(options) - {"dtype", "casting", "out", "where", "subok", "order"}:
        return NotImplemented
    made = _apply(ufunc, inputs)
    if options.get("dtype") is not None:
        made = [one.astype(options["dtype"]) for one in made]
    targets, where = options.get("out") or (None,) * len(made), options.get("where", True)
    found = [_into(one, target, where, ufunc) for one, target in zip(made, targets, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _apply(ufunc: np.ufunc, inputs: tuple[Any, ...]) -> list[Array]:
    import outsize.array as namespace
    from outsize.array.api.lazy import apply

    if ufunc is np.divmod:
        return [apply(operation(np.floor_divide), *inputs), apply(operation(np.remainder), *inputs)]
    if ufunc is np.modf:
        whole = apply(operation(np.trunc), *inputs)
        part = apply(WHERE, apply(operation(np.isinf), *inputs), whole.dtype.type(0), inputs[0] - whole)
        return [apply(operation(np.copysign), part, *inputs), whole]
    if ufunc.signature is not None and ufunc.__name__ in namespace.__all__:
        return [getattr(namespace, ufunc.__name__)(*(namespace.asarray(value) for value in inputs))]
    return [apply(operation(ufunc), *inputs)]


def _into(made: Array, target: Any, where: Any, ufunc: np.ufunc) -> Any:
    """A result in `out`, where that is given, and only where the condition holds."""
    from outsize.array.api.lazy import Array, apply

    if target is None:
        if where is not True:
            raise InputError(
                f"np.{ufunc.__name__}(where=...) needs out=, whose values stay where the condition is false"
            )
        return made
    if made.shape != target.shape:
        raise InputError(f"out has the shape {target.shape} and the result {made.shape}")
    if not np.can_cast(made.dtype, target.dtype, "same_kind"):
        raise TypeError(f"np.{ufunc.__name__} cannot write {made.dtype} into out of {target.dtype}")
    if where is not True:
        made = apply(WHERE, where, made, target)
    made = made.astype(target.dtype)
    if isinstance(target, Array):
        target.node = made.node
        return target
    target[...] = made.compute()
    return target


def _call_method(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    import outsize.array as namespace

    name = (REDUCTIONS if method == "reduce" else SCANS).get(ufunc.__name__)
    given = {key: value for key, value in options.items() if value is not None and value is not np._NoValue}
    if name is None or len(inputs) > 1 + (method == "accumulate") or set(given) - {"axis", "dtype", "keepdims"}:
        raise InputError(
            f"np.{ufunc.__name__}.{method} has no out-of-core rule with {', '.join(given) or 'this function'}; call it on "
            "x.compute() if the array fits in memory"
        )
    array = inputs[0]
    axis = options.get("axis", 0)
    if method == "accumulate":
        return getattr(namespace, name)(array, axis, options.get("dtype"))
    more = {"dtype": options["dtype"]} if options.get("dtype") is not None and name in ("sum", "prod") else {}
    return getattr(namespace, name)(array, axis=axis, keepdims=bool(given.get("keepdims", False)), **more)


_ASKED = ("shape", "ndim", "size")
"""Functions that are attributes."""


def call_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What NumPy's `function(*args, **kwargs)` is."""
    import outsize.array as namespace

    part, name = function.__module__.removeprefix("numpy").removeprefix("."), function.__name__
    if not part and name in _ASKED and len(args) == 1 and not kwargs:
        return getattr(args[0], name)
    if not part and name in ("may_share_memory", "shares_memory"):
        return share_memory(*args[:2])
    space = {"": namespace, "fft": namespace.fft, "linalg": namespace.linalg}.get(part)
    ours = getattr(space, name) if space is not None and name in space.__all__ else None
    if ours is None or not callable(ours):
        called = ".".join(word for word in ("np", part, name) if word)
        raise InputError(f"{called} has no out-of-core rule; call it on x.compute() if the array fits in memory")
    args, kwargs = _as_ours(function, ours, args, kwargs)
    return ours(*args, **kwargs)


def share_memory(one: Any, two: Any) -> bool:
    """True where two arrays are made of the same memory."""
    return any(np.may_share_memory(a, b) for a in _memory(one) for b in _memory(two))


def _memory(value: Any) -> list[Any]:
    from outsize.array.api.lazy import Array
    from outsize.array.graph.node import Source, walk
    from outsize.array.run.results import to_numpy

    if not isinstance(value, Array):
        return [value]
    return [to_numpy(node) for node in walk(value.node) if isinstance(node, Source) and node.store.resident]


_RENAMED = {"a_min": "min", "a_max": "max"}
"""NumPy's older names of options."""
_MANNERS = ("kind", "optimize", "overwrite_input", "subok", "casting")
"""Options that say how and not what."""


def _as_ours(
    function: Callable[..., Any], ours: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call of NumPy's function for ours, where options are named; those left as they are are not passed on."""
    theirs, own = inspect.signature(function), inspect.signature(ours).parameters
    bound = theirs.bind(*args, **kwargs)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in theirs.parameters.values()):
        plain, given = list(bound.args), bound.kwargs
    else:
        named = [name for name, parameter in own.items() if parameter.kind is not parameter.POSITIONAL_ONLY]
        placed = [name for name, one in own.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        known = [name in named and name in theirs.parameters for name in placed]
        leading = (*known, True).index(True)
        plain = list(bound.arguments.values())[:leading]
        given = dict(list(bound.arguments.items())[leading:])
        given |= given.pop("kwargs", {})
    options = {
        _RENAMED.get(name, name): value
        for name, value in given.items()
        if name not in _MANNERS and not _usual(theirs, name, value)
    }
    unknown = [name for name in options if name not in own]
    if unknown:
        raise InputError(
            f"{function.__name__} of an array that may be larger than memory has no option {', '.join(unknown)}; call it on "
            "x.compute() if the array fits in memory"
        )
    return plain, options


def _usual(theirs: inspect.Signature, name: str, value: Any) -> bool:
    """True where an option is given as NumPy has it anyway."""
    default = theirs.parameters[name].default if name in theirs.parameters else inspect.Parameter.empty
    return value is default or (isinstance(value, bool | int | float | str) and value == default)
