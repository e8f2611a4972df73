"""The parts of JAX that differ between its versions or are not public, each looked for when it is used.

In: an equation, a program, a name. Out: what every supported version of JAX calls by another name, or an `OutsizeError` in
one sentence. Floor and newest version are those that the tests ran on.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from outsize.core.errors import OutsizeError
from outsize.core.extras import need

FLOOR = "0.7.0"
"""The oldest JAX that was tried; the newest is 0.11.2."""
PACKAGE = str(Path(__file__).parents[2])


def require_jax() -> Any:
    """The package, or one sentence that says how to get it."""
    jax = need("jax", "this step is JAX's and")
    if not hasattr(jax, "jit"):  # a folder of that name, not the package
        raise OutsizeError("the jax that Python finds here is not JAX: pip install 'outsize[jax]'")
    return jax


def is_literal(atom: Any) -> bool:
    """True for a constant that is written in the program itself."""
    return hasattr(atom, "val")


def is_dropped(var: Any) -> bool:
    """True for a result that nobody reads."""
    return type(var).__name__ == "DropVar"


def inner_jaxpr(thing: Any) -> Any:
    """The bare jaxpr of a closed one, or itself."""
    return getattr(thing, "jaxpr", thing)


def constants_of(thing: Any) -> list[Any]:
    """The values that a closed jaxpr carries."""
    return list(getattr(thing, "consts", ()))


def is_away(aval: Any) -> bool:
    """True for a value of a program that is in the host's memory while the program runs on a device."""
    return type(aval).__name__ == "ShapedArray" and str(getattr(aval, "memory_space", "")).endswith("Host")


def in_memory(device: Any, kind: str) -> Any:
    """A placement in a device's own memory (`device`), or in page-locked memory of its host (`pinned_host`)."""
    return require_jax().sharding.SingleDeviceSharding(device, memory_kind=kind)


def names_in(closed: Any) -> set[str]:
    """Names that the user gave to values with `checkpoint_name`."""
    found = set()
    for equation in inner_jaxpr(closed).eqns:
        if equation.primitive.name == "name":
            found.add(str(equation.params["name"]))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner_jaxpr(inner), "eqns"):
                    found |= names_in(inner)
    return found


def bytes_of(aval: Any) -> int | None:
    """Bytes of a value of this shape; None where a size is not a number, 0 for tokens and for what is on the host."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None or is_away(aval):
        return 0
    if not all(isinstance(size, int) for size in shape):
        try:
            shape = tuple(int(size) for size in shape)
        except Exception:  # symbolic dimensions raise errors of their own
            return None
    return int(math.prod(shape)) * element_bytes(dtype)


def element_bytes(dtype: Any) -> int:
    """Bytes of one element, of a random key those of its words."""
    implementation = getattr(dtype, "_impl", None)
    if implementation is not None:
        return 4 * int(math.prod(implementation.key_shape))
    if getattr(dtype, "name", "") == "float0":
        return 0
    return int(dtype.itemsize)


def scan_counts(equation: Any) -> tuple[int, int]:
    """(constants, carries) of a scan, by the ranks: rows of stacks have one axis less inside. Versions name them differently."""
    body = inner_jaxpr(equation.params["jaxpr"])
    outside, inside = (
        [len(getattr(atom.aval, "shape", ())) for atom in atoms]
        for atoms in ((*equation.invars, *equation.outvars), (*body.invars, *body.outvars))
    )
    stacked = [one != other for one, other in zip(outside, inside, strict=True)]
    given = len(equation.invars)
    carry = stacked[given:].count(False)
    return stacked[:given].count(False) - carry, carry


def bind(equation: Any, values: list[Any]) -> list[Any]:
    """Run one equation on values, with the user's line on it."""
    params = equation.primitive.get_bind_params(equation.params)
    functions: Any = ()
    if isinstance(params, tuple):  # up to 0.7 or so: functions beside the parameters
        functions, params = params
    try:
        from jax._src import source_info_util

        info = equation.source_info
        names = source_info_util.current_name_stack() + info.name_stack
        line: Any = source_info_util.user_context(info.traceback, name_stack=names)
    except Exception:  # a private part: without it there is no line, and nothing else is lost
        line = contextlib.nullcontext()
    with line:
        found = equation.primitive.bind(*functions, *values, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def line_of(equation: Any) -> str:
    """`train.py:12` of the user's line, empty where nobody knows."""
    try:
        from jax._src import source_info_util

        said = str(source_info_util.summarize(equation.source_info))
    except Exception:  # a private part: without it there is no line, and nothing else is lost
        return ""
    place = said.partition(" ")[0]
    if not place or place.startswith(("unknown", PACKAGE)):
        return ""
    file, _, numbers = place.partition(":")
    return f"{Path(file).name}:{numbers.partition(':')[0]}"
