"""The lazy array: NumPy's manners over a graph of nodes, nothing computed until it is asked for.

`Array` follows the array API standard and NumPy's promotion; `np.sin(x)` and `np.mean(x)` return arrays too. `plan`
shows what a result would take, `save` writes it to disk inside the budget, `compute` brings it into memory if it fits.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.elementwise import Operation, Scalar, operation
from outsize.array.graph.filter import keep
from outsize.array.graph.node import Node, Range, Source
from outsize.array.run.count import count, masked
from outsize.array.run.now import SMALL, make_now
from outsize.array.run.results import compute_node, plan_node, save_node, to_numpy, update_node
from outsize.array.store.base import Block
from outsize.core.errors import InputError
from outsize.core.events import Listener, default_listener
from outsize.core.plan import Plan
from outsize.core.units import format_bytes


def _known(value: Any) -> bool:
    return isinstance(value, Array | bool | int | float | complex | np.generic | np.ndarray)


def _binary(ufunc: np.ufunc, swapped: bool = False) -> Callable[[Array, Any], Array]:
    def method(self: Array, other: Any) -> Array:
        if not _known(other):
            return NotImplemented  # type: ignore[no-any-return]
        return apply(operation(ufunc), *((other, self) if swapped else (self, other)))

    return method


def _unary(ufunc: np.ufunc) -> Callable[[Array], Array]:
    return lambda self: apply(operation(ufunc), self)


class Array:
    """An array that may be larger than memory."""

    __slots__ = ("node",)
    __array_priority__ = 100

    def __init__(self, node: Node) -> None:
        self.node = node

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.node.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.node.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.node.nbytes

    @property
    def device(self) -> str:
        """Where results are: always the host."""
        return "cpu"

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        """This array; only `cpu` exists."""
        if str(device) != "cpu":
            raise InputError(f"arrays live on 'cpu', not {device!r}")
        return self

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        import outsize.array

        return outsize.array

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        """Its parts along the first axis, each lazy; other libraries take what has this for an array, not for one value."""
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        name = f" {self.node.store.name!r}" if isinstance(self.node, Source) and self.node.store.paths else ""
        shape = ", ".join(map(str, self.shape))
        return f"<outsize.Array {self.dtype}[{shape}] {format_bytes(self.nbytes)}{name or ' ' + self.node.label()}>"

    def _repr_html_(self) -> str:
        from outsize.array.api.picture import draw_html

        return draw_html(self.node)

    # What can be done with it

    def plan(
        self, budget: int | str | None = None, path: str | os.PathLike[str] | None = None, *, device: Any = None,
        tf32: bool = False, **options: Any,
    ) -> Plan:  # fmt: skip
        """What `save(path)` would read, write and hold, before any of it runs; without a path, to a .npy file."""
        return plan_node(self.node, budget, path, device=device, tf32=tf32, **options)

    def compute(
        self, budget: int | str | None = None, progress: Listener | None = None, *, device: Any = None,
        tf32: bool = False, out: Block | None = None,
    ) -> Block:  # fmt: skip
        """The values as a NumPy array (in `out`, where that is given); a `BudgetError` where they do not fit.

        `device` is 'cuda', 'cuda:1', 'cupy', or 'auto': there, inside `outsize.budget(device=...)`, only where it pays.
        `tf32=True` lets products of float32 be rounded to TF32.
        """
        return compute_node(self.node, budget, progress, device=device, tf32=tf32, out=out)

    def save(
        self, path: str | os.PathLike[str], budget: int | str | None = None, progress: Listener | bool | None = None,
        resume: bool = True, *, device: Any = None, tf32: bool = False, **options: Any,
    ) -> Array:  # fmt: skip
        """Write it to disk, in the format of the path's suffix, inside the budget, and open what was written.

        An interrupted call is taken up where it stopped. `chunks=` and `key=` are for the formats that have them;
        `device` and `tf32` are as in `compute`.
        """
        listener = default_listener() if progress is None or progress is True else progress or None
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"save needs the path of a file such as 'x.npy', not {type(path).__name__}")
        store = save_node(
            self.node, os.fspath(path), budget, listener, resume=resume, device=device, tf32=tf32, **options
        )
        return Array(make.source(store))

    def tiles(
        self, device: Any = None, prefetch: int = 2, budget: int | str | None = None, *, write: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> Any:  # fmt: skip
        """Its tiles as torch tensors on a device, one after another, the next ones read and sent ahead.

        `write=True` writes each tile back when the next is asked for, into an array of `outsize.empty` or one opened with
        `mode="r+"`; leaving the loop early leaves the present tile as it was.
        The iterator's `region` says which part the present tile is. A tile is good until the next is asked for.

        >>> for tile in x.tiles(device="cuda"): my_kernel(tile)
        """
        from outsize.array.run.tiles import Tiles

        return Tiles(self.node, device, prefetch, budget, write, shape)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """The values for other libraries: shared where they lie in memory, computed first otherwise."""
        said = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return to_numpy(self.node).__dlpack__(**{name: value for name, value in said.items() if value is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Block:
        found = to_numpy(self.node)
        if dtype is not None and found.dtype != dtype:
            return found.astype(dtype)
        return found.copy() if copy else found

    def astype(self, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
        """Another element type; the cast streams."""
        return Array(make.cast(self.node, dtype))

    def __getitem__(self, key: Any) -> Array:
        """A part of it; a mask of its own shape gives the elements where it is true, which are counted at once."""
        mask = isinstance(key, Array | np.ndarray) and key.dtype == np.dtype(bool)
        large = isinstance(key, Array) or self.ndim > 1 or (mask and key.nbytes > SMALL)
        if mask and key.shape == self.shape and large and self.ndim:
            return Array(masked(self.node, _as_node(key)))
        return Array(make.index(self.node, _plain_key(key)))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write into a store that was opened for writing."""
        if not isinstance(self.node, Source):
            raise InputError("only an array opened with mode='r+' can be written into; this one is an expression")
        target = make.index(self.node, _plain_key(key))
        region = _region(target, self.node)
        shape = tuple(b - a for a, b in region)
        node = _operand(value)
        node = make.constant(node.value) if isinstance(node, Scalar) else node
        spread = make.broadcast_to(node, target.shape)
        update_node(make.cast(make.reshape(spread, shape), self.dtype), self.node.store, region)

    # Shapes

    @property
    def T(self) -> Array:
        """Axes reversed."""
        return Array(make.permute(self.node, tuple(reversed(range(self.ndim)))))

    @property
    def mT(self) -> Array:
        """The last two axes swapped."""
        if self.ndim < 2:
            raise InputError(f".mT needs at least two dimensions, this array has {self.ndim}")
        return Array(make.permute(self.node, (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)))

    def transpose(self, *axes: Any) -> Array:
        """Axes in the given order, or reversed."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        return Array(make.permute(self.node, order)) if order else self.T

    def reshape(self, *shape: Any) -> Array:
        """The same elements under another shape."""
        return Array(make.reshape(self.node, shape[0] if len(shape) == 1 else shape))

    # Reductions

    def sum(self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
        """Sum of elements; float32 does not drift."""
        return Array(make.reduce("sum", self.node, axis, keepdims, dtype))

    def prod(self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
        """Product of elements."""
        return Array(make.reduce("prod", self.node, axis, keepdims, dtype))

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """Arithmetic mean."""
        return Array(make.reduce("mean", self.node, axis, keepdims))

    def var(self, axis: Any = None, *, ddof: float = 0, keepdims: bool = False) -> Array:
        """Variance."""
        return Array(make.reduce("var", self.node, axis, keepdims, ddof=ddof))

    def std(self, axis: Any = None, *, ddof: float = 0, keepdims: bool = False) -> Array:
        """Standard deviation."""
        return Array(make.reduce("std", self.node, axis, keepdims, ddof=ddof))

    def min(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """Smallest element."""
        return Array(make.reduce("min", self.node, axis, keepdims))

    def max(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """Largest element."""
        return Array(make.reduce("max", self.node, axis, keepdims))

    def any(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """True where any element is."""
        return Array(make.reduce("any", self.node, axis, keepdims))

    def all(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """True where all elements are."""
        return Array(make.reduce("all", self.node, axis, keepdims))

    def argmin(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """Index of the smallest element."""
        return Array(make.reduce("argmin", self.node, axis, keepdims))

    def argmax(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """Index of the largest element."""
        return Array(make.reduce("argmax", self.node, axis, keepdims))

    def cumsum(self, axis: Any = None) -> Array:
        """Running sum."""
        return Array(make.scan(np.add, self.node, axis))

    # Operators

    __add__, __radd__ = _binary(np.add), _binary(np.add, swapped=True)
    __sub__, __rsub__ = _binary(np.subtract), _binary(np.subtract, swapped=True)
    __mul__, __rmul__ = _binary(np.multiply), _binary(np.multiply, swapped=True)
    __truediv__, __rtruediv__ = _binary(np.true_divide), _binary(np.true_divide, swapped=True)
    __floordiv__, __rfloordiv__ = _binary(np.floor_divide), _binary(np.floor_divide, swapped=True)
    __mod__, __rmod__ = _binary(np.remainder), _binary(np.remainder, swapped=True)
    __pow__, __rpow__ = _binary(np.power), _binary(np.power, swapped=True)
    __and__, __rand__ = _binary(np.bitwise_and), _binary(np.bitwise_and, swapped=True)
    __or__, __ror__ = _binary(np.bitwise_or), _binary(np.bitwise_or, swapped=True)
    __xor__, __rxor__ = _binary(np.bitwise_xor), _binary(np.bitwise_xor, swapped=True)
    __lshift__, __rlshift__ = _binary(np.left_shift), _binary(np.left_shift, swapped=True)
    __rshift__, __rrshift__ = _binary(np.right_shift), _binary(np.right_shift, swapped=True)
    __lt__, __le__ = _binary(np.less), _binary(np.less_equal)
    __gt__, __ge__ = _binary(np.greater), _binary(np.greater_equal)
    __eq__ = _binary(np.equal)  # type: ignore[assignment]
    __ne__ = _binary(np.not_equal)  # type: ignore[assignment]
    __neg__, __pos__ = _unary(np.negative), _unary(np.positive)
    __abs__, __invert__ = _unary(np.absolute), _unary(np.invert)
    __hash__ = None  # type: ignore[assignment]

    def __matmul__(self, other: Any) -> Array:
        return Array(make.matmul(self.node, _as_node(other))) if _known(other) else NotImplemented

    def __rmatmul__(self, other: Any) -> Array:
        return Array(make.matmul(_as_node(other), self.node)) if _known(other) else NotImplemented

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or set(options) - {"dtype", "casting"}:
            return NotImplemented
        if ufunc.signature is not None:
            import outsize.array

            ours = getattr(outsize.array, ufunc.__name__) if ufunc.__name__ in outsize.array.__all__ else None
            if ours is not None and not options:
                return ours(*(Array(_as_node(value)) for value in inputs))
        result = apply(operation(ufunc), *inputs)
        return result.astype(options["dtype"]) if options.get("dtype") is not None else result

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        import outsize.array

        part, name = function.__module__.removeprefix("numpy").removeprefix("."), function.__name__
        if not part and name in ("shape", "ndim"):
            return getattr(args[0], name)
        space = {"": outsize.array, "fft": outsize.array.fft, "linalg": outsize.array.linalg}.get(part)
        ours = getattr(space, name) if space is not None and name in space.__all__ else None
        if ours is None:
            called = ".".join(word for word in ("np", part, name) if word)
            raise InputError(f"{called} has no out-of-core rule; call it on x.compute() if the array fits in memory")
        args, kwargs = _as_ours(function, ours, args, kwargs)
        return ours(*args, **kwargs)

    # Single values

    def _item(self) -> Any:
        if self.size != 1:
            raise TypeError(f"an array of {self.size} elements is not a single value")
        return self.compute().reshape(())[()]

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self._item().item()

    def __bool__(self) -> bool:
        return bool(self._item())

    def __int__(self) -> int:
        return int(self._item())

    def __float__(self) -> float:
        return float(self._item())

    def __complex__(self) -> complex:
        return complex(self._item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"an index is a whole number, not {self.dtype}")
        return int(self._item())


def _operand(value: Any) -> Node | Scalar:
    """What a user put beside an array: another array, NumPy's, or a scalar."""
    if isinstance(value, Array):
        return value.node
    if isinstance(value, bool | int | float | complex | np.generic):
        return Scalar(value)
    if isinstance(value, Node):
        return value
    if isinstance(value, np.ndarray | list | tuple):
        found = np.asarray(value)
        if found.dtype.hasobject:
            raise InputError(f"an array of Python objects ({type(value).__name__}) has no memory rule")
        return make.constant(found)
    from outsize.array.store.registry import open_store

    return make.source(open_store(value))


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
        leading = sum(name not in named or name not in theirs.parameters for name in _placed(own))
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


def _placed(own: Mapping[str, inspect.Parameter]) -> list[str]:
    """The parameters that can be given by their place."""
    return [name for name, one in own.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _usual(theirs: inspect.Signature, name: str, value: Any) -> bool:
    """True where an option is given as NumPy has it anyway."""
    default = theirs.parameters[name].default if name in theirs.parameters else inspect.Parameter.empty
    return value is default or (isinstance(value, bool | int | float | str) and value == default)


def _as_node(value: Any) -> Node:
    found = _operand(value)
    return make.constant(found.value) if isinstance(found, Scalar) else found


def apply(op: Operation, *operands: Any) -> Array:
    """An elementwise operation on anything."""
    return Array(make.apply(op, *(_operand(value) for value in operands)))


def lazy(x: Any) -> Array:
    """What an operator or a NumPy function has made of arrays, which is one."""
    assert isinstance(x, Array)
    return x


def _plain_key(key: Any) -> Any:
    """An index in which every array of indices is ready to be read piece by piece."""
    if isinstance(key, tuple):
        return tuple(_plain_key(part) for part in key)
    if isinstance(key, Array) and not key.ndim and key.dtype != bool:
        return key._item()
    return as_indices(key) if isinstance(key, Array | np.ndarray) and key.ndim == 1 else _computed(key)


def _computed(key: Any) -> Any:
    return key.compute() if isinstance(key, Array) else key


def as_indices(key: Any) -> Any:
    """A one-dimensional array of indices, or a mask: small ones as NumPy's, large ones in a scratch file of ours."""
    if not isinstance(key, Array | np.ndarray) or key.nbytes <= SMALL:
        return _computed(key)
    if key.dtype == bool:
        flat = _as_node(key)
        found = keep(Range(shape=flat.shape, dtype=np.dtype(np.int64), start=0, step=1), flat, count(flat))
        return make.Indices(found, 0, max(0, flat.shape[0] - 1), True)
    if isinstance(key, np.ndarray):
        return make.known_indices(key, make_now(make.constant(key)))
    now = Array(make_now(key.node))
    return make.Indices(now.node, int(now.min()), int(now.max()), False)


def _region(target: Node, base: Node) -> tuple[tuple[int, int], ...]:
    """The region of a store that an index names; only whole numbers and slices of step 1 name one."""
    from outsize.array.graph.rearrange import Affine

    if target is base:
        return tuple((0, n) for n in base.shape)
    if not isinstance(target, Affine) or target.inputs[0] is not base:
        raise InputError("in-place writing takes whole numbers and slices, not lists of indices")
    region = []
    for axis, start, step in target.axes:
        if axis is not None and step != 1:
            raise InputError(f"in-place writing takes slices of step 1, not {step}")
        region.append((start, start + (1 if axis is None else target.shape[axis])))
    return tuple(region)
