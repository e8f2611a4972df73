"""A user's step as a function of arrays only, and its arguments as shapes.

In: a step, its arguments or a function that builds them. Out: `Call`: what `jax.jit` can lower without allocating anything:
shapes, dtypes and shardings of all arrays, what else was given kept as it is, what is donated, and what each array is for.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outsize.core.errors import InputError, OutsizeError
from outsize.model.jax.private_parts import bytes_of, inner_jaxpr, require_jax

WEIGHTS, STATE, INPUTS = "weights", "optimizer state", "inputs"
STATE_NAMES = ("opt", "state", "momentum", "mu", "nu")
WEIGHT_NAMES = ("param", "weight", "model", "variables", "theta")


@dataclass(frozen=True)
class Call:
    """A step on arrays."""

    name: str
    function: Callable[..., Any]
    """(arrays in the order of `shapes`) -> what the step returns."""
    shapes: tuple[Any, ...]
    kinds: tuple[str, ...]
    """`weights`, `optimizer state` or `inputs` for each array."""
    donated: tuple[bool, ...]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def jaxpr(self) -> Any:
        jax = require_jax()
        return guarded(self.name, lambda: jax.make_jaxpr(self.function)(*self.shapes))


def read_call(step: Callable[..., Any], args: tuple[Any, ...], build: Callable[..., Any] | None, *sizes: int) -> Call:
    """The step with the arguments that were given or are built."""
    jax = require_jax()
    if not callable(step):
        raise InputError(f"the step is a function that runs one training or inference step, not {step!r}")
    if build is not None and args:
        raise InputError("give either build= or the step's arguments, not both")
    name = getattr(step, "__name__", type(step).__name__)
    notes: tuple[str, ...] = ()
    if build is not None:
        args, notes = _built(build, sizes)
    leaves, tree = jax.tree_util.tree_flatten(args)
    places = [number for number, leaf in enumerate(leaves) if is_array(leaf)]
    if not places:
        raise InputError(
            f"{name} was given no array of JAX, so there is nothing to estimate: give its arguments, or build="
        )

    def function(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return step(*jax.tree_util.tree_unflatten(tree, filled))

    shapes = tuple(shape_of(leaves[place]) for place in places)
    kinds = tuple(_kinds(step, args)[place] for place in places)
    call = Call(name, function, shapes, kinds, (False,) * len(shapes), notes)
    return replace(call, donated=_donated(call))


def guarded(name: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; its errors become one sentence with the user's line."""
    try:
        return run()
    except OutsizeError:
        raise
    except Exception as error:
        inside = (str(Path(__file__).parents[2]), str(Path(require_jax().__file__).parent))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
        place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        said = str(error).splitlines()[0] if str(error) else ""
        raise InputError(f"{name} cannot be traced by jax.jit: {type(error).__name__}{place}: {said}") from error


def is_array(leaf: Any) -> bool:
    """True for what `jax.jit` traces: arrays, their shapes, and numbers."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, numbers.Number)


def shape_of(leaf: Any) -> Any:
    """An array without its contents; its sharding stays."""
    jax = require_jax()
    if isinstance(leaf, numbers.Number):
        return jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if is_spread(leaf) else None)


def bytes_on_one(shape: Any) -> int:
    """Bytes that one device holds of an argument: of a spread one its part."""
    sharding = getattr(shape, "sharding", None)
    part = shape.shape if sharding is None else sharding.shard_shape(shape.shape)
    return bytes_of(require_jax().ShapeDtypeStruct(part, shape.dtype)) or 0


def is_spread(shape: Any) -> bool:
    """True for an argument on several devices."""
    return len(getattr(getattr(shape, "sharding", None), "device_set", ())) > 1


def _built(build: Callable[..., Any], sizes: Sequence[int]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """What the builder makes, as shapes; really, with a note, where it needs values."""
    jax = require_jax()
    kept: list[Any] = []

    def arrays() -> list[Any]:
        made = build(*sizes)
        leaves, tree = jax.tree_util.tree_flatten(made if isinstance(made, tuple) else (made,))
        kept[:] = [leaves, tree]
        return [leaf for leaf in leaves if is_array(leaf)]

    try:
        shapes = iter(jax.eval_shape(arrays))
        leaves, tree = kept
        return jax.tree_util.tree_unflatten(tree, [next(shapes) if is_array(leaf) else leaf for leaf in leaves]), ()
    except OutsizeError:
        raise
    except Exception:  # it looks at values: then it is built for real
        made = guarded(getattr(build, "__name__", "build"), lambda: build(*sizes))
        return made if isinstance(made, tuple) else (made,), (
            "the arguments were built for real: build() looks at values",
        )


def _kinds(step: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """What each leaf of the arguments is for: by the names on the way to it, and by the types of optax."""
    jax = require_jax()
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        names = []
    found = []
    for number, arg in enumerate(args):
        name = names[number] if number < len(names) else ""
        whole = _kind_of((name,)) or (STATE if _is_optax(arg) else None)
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]:
            words = tuple(str(getattr(key, "name", getattr(key, "key", ""))) for key in path)
            inside = next((kind for word in words if (kind := _kind_of((word,)))), None) if whole != WEIGHTS else None
            found.append((STATE if inside == STATE else inside) or whole or INPUTS)
    return found


def _kind_of(words: Sequence[str]) -> str | None:
    for word in words:
        if any(word.lower().startswith(name) for name in WEIGHT_NAMES):
            return WEIGHTS
        if any(word.lower() == name or word.lower().startswith(f"{name}_") for name in STATE_NAMES):
            return STATE
    return None


def _is_optax(value: Any) -> bool:
    if type(value).__module__.startswith("optax"):
        return True
    return isinstance(value, tuple | list) and any(_is_optax(part) for part in value)


def _donated(call: Call) -> tuple[bool, ...]:
    """Which arrays the user's own `jax.jit` donates: its call is the only one in the program."""
    jaxpr = inner_jaxpr(call.jaxpr)
    calls = [equation for equation in jaxpr.eqns if any(equation.params.get("donated_invars", ()))]
    given = {
        id(atom)
        for equation in calls
        for atom, donated in zip(equation.invars, equation.params["donated_invars"], strict=True)
        if donated
    }
    return tuple(id(var) in given for var in jaxpr.invars)
