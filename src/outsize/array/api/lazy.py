"""The lazy array: NumPy's manners over a graph of nodes, nothing computed until it is asked for.

`Array` follows the array API standard and NumPy's promotion; `np.sin(x)` and `np.mean(x)` return arrays too. `plan`
shows what a result would take, `save` writes it to disk inside the budget, `compute` brings it into memory if it fits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from outsize.array.api import indexing
from outsize.array.api.methods import Methods
from outsize.array.api.protocols import call_function, call_ufunc
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import Operation, Scalar, operation
from outsize.array.graph.node import Node, Source, put_together, take_apart, walk
from outsize.array.run.execute import ARRAY_PREFIX
from outsize.array.run.now import keep_now, masked
from outsize.array.run.results import compute_node, plan_node, save_node, to_numpy, update_node
from outsize.array.store.base import Block, Store, region_shape
from outsize.array.tuning import current
from outsize.core.errors import InputError
from outsize.core.events import Listener, default_listener
from outsize.core.plan import Plan
from outsize.core.units import format_bytes

_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
"""Of the array API standard."""


def check_device(device: Any) -> None:
    """An `InputError` for a device on which no arrays lie; `compute` and `save` take devices to work on."""
    if device is not None and str(device) != "cpu":
        raise InputError(f"arrays live on 'cpu', not {device!r}: give the device to compute, save or tiles")


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


def _as(kind: Any) -> Any:
    return lambda self: kind(self._item())


class Array(Methods):
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
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of the pieces in which other libraries (xarray, dask) should take it; plans choose their own."""
        rows = max(1, current().chunk // max(1, self.nbytes // max(1, self.shape[0]))) if self.shape else 1
        return tuple(
            (n,) if axis or n <= rows else (*[rows] * (n // rows), *([n % rows] if n % rows else []))
            for axis, n in enumerate(self.shape)
        )

    def rechunk(self, chunks: Any = None) -> Array:
        """The array: plans cut it as the budget asks."""
        return self

    @property
    def device(self) -> str:
        """Where results are: always the host."""
        return "cpu"

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        """This array; only `cpu` exists."""
        check_device(device)
        if stream is not None:
            raise InputError(f"arrays on 'cpu' have no streams: leave out stream={stream!r}")
        return self

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        import outsize.array

        if api_version is not None and api_version not in _VERSIONS:
            raise InputError(
                f"the array API standard has no version {api_version!r} here: one of {', '.join(_VERSIONS)}"
            )
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Files are pickled by their paths, arrays in memory by their values."""
        for node in walk(self.node):
            if isinstance(node, Source):
                _check_shared(node.store)
        return _unpickle, (take_apart(self.node),)

    def __copy__(self) -> Array:
        return Array(self.node)

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

    def cache(self, budget: int | str | None = None) -> Array:
        """The same array, made now and kept for what is done with it next: in memory where it takes at most half of the budget,
        else in a scratch file. Memory that is kept so is taken off later budgets. Both go when the last array that reads
        them does.
        """
        return Array(keep_now(self.node, budget))

    def tiles(
        self, device: Any = None, prefetch: int = 2, budget: int | str | None = None, *, write: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> Any:  # fmt: skip
        """Its tiles, one after another, the next ones read ahead: NumPy arrays without a device, torch tensors on the one
        that is named ('cpu', 'cuda', ...).

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
        shared = isinstance(self.node, Source) and self.node.store.resident and dtype in (None, self.dtype)
        if copy is False and not shared:
            raise ValueError(
                "an array that is not in memory cannot become NumPy's without a copy: leave out copy=False"
            )
        found = to_numpy(self.node)
        if dtype is not None and found.dtype != dtype:
            return found.astype(dtype)
        return found.copy() if copy else found

    def astype(self, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
        """Another element type; the cast streams. Arrays never change their elements, so nothing is copied for `copy=True`."""
        check_device(device)
        return Array(make.cast(self.node, dtype))

    def __getitem__(self, key: Any) -> Array:
        """A part of it, by any index of NumPy's. What a mask keeps is counted at once."""
        mask = isinstance(key, Array | np.ndarray) and key.dtype == np.dtype(bool)
        large = isinstance(key, Array) or self.ndim > 1 or (mask and key.nbytes > current().made_now)
        if mask and key.shape == self.shape and large and self.ndim:
            return Array(masked(self.node, as_node(key)))
        return Array(indexing.get(self.node, _key(key)))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write into a store that was opened for writing; any other array becomes what it is with this part replaced, and nothing
        that it was made of changes."""
        if isinstance(self.node, Source) and self.node.store.writable:
            return self._write(key, value)
        self.node = indexing.replaced(self.node, _key(key), _fitting(value, self.dtype))
        return None

    def _write(self, key: Any, value: Any) -> None:
        assert isinstance(self.node, Source)
        region = indexing.region_of(key, self.node)
        spread = make.broadcast_to(_fitting(value, self.dtype), make.index(self.node, key).shape)
        update_node(make.cast(make.reshape(spread, region_shape(region)), self.dtype), self.node.store, region)

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

    def var(self, axis: Any = None, *, correction: float = 0, ddof: float = 0, keepdims: bool = False) -> Array:
        """Variance; `correction` (in NumPy `ddof`) is taken off the count."""
        return Array(make.reduce("var", self.node, axis, keepdims, ddof=correction or ddof))

    def std(self, axis: Any = None, *, correction: float = 0, ddof: float = 0, keepdims: bool = False) -> Array:
        """Standard deviation; `correction` as in `var`."""
        return Array(make.reduce("std", self.node, axis, keepdims, ddof=correction or ddof))

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
        return Array(make.matmul(self.node, as_node(other))) if _known(other) else NotImplemented

    def __rmatmul__(self, other: Any) -> Array:
        return Array(make.matmul(as_node(other), self.node)) if _known(other) else NotImplemented

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return call_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return call_function(function, args, kwargs)

    # Single values

    def _item(self) -> Any:
        if self.size != 1:
            raise TypeError(f"an array of {self.size} elements is not a single value")
        return self.compute().reshape(())[()]

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self._item().item()

    def tolist(self) -> Any:
        """All elements as Python numbers, in lists."""
        return self.compute().tolist()

    def __format__(self, spec: str) -> str:
        """A single value by its own format, such as `f"{x.mean():.3f}"`; an array by its text."""
        return format(self._item(), spec) if spec and not self.ndim else format(repr(self), spec)

    __bool__, __int__, __float__, __complex__ = (_as(kind) for kind in (bool, int, float, complex))

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


def _check_shared(store: Store) -> None:
    """An `InputError` that names a source which another process could not open."""
    for path in store.paths:
        if os.path.basename(path).startswith(ARRAY_PREFIX):
            raise InputError(
                f"cannot pickle {path}: it is a scratch file that goes with its array; save the array, open that"
            )
        if not os.path.exists(path):
            raise InputError(f"cannot pickle {store.name}: no other process can open {path}, which is no file")


def _unpickle(parts: list[tuple[Node, tuple[int, ...]]]) -> Array:
    return Array(put_together(parts))


def as_node(value: Any) -> Node:
    """Whatever is an array, or one value, as a node."""
    found = _operand(value)
    return make.constant(found.value) if isinstance(found, Scalar) else found


def apply(op: Operation, *operands: Any) -> Array:
    """An elementwise operation on anything."""
    return Array(make.apply(op, *(_operand(value) for value in operands)))


def _key(key: Any) -> Any:
    """A key in which arrays of ours are nodes."""
    if isinstance(key, tuple):
        return tuple(_key(part) for part in key)
    return key.node if isinstance(key, Array) else key


def as_indices(key: Any) -> make.Indices:
    """A one-dimensional array of indices, or a mask: small ones are held, large ones are in a scratch file of ours."""
    node = key.node if isinstance(key, Array) else np.asarray(key)
    if node.dtype == bool:
        return indexing.places_of(as_node(key))
    return indexing.indices_of(node)


def _fitting(value: Any, dtype: np.dtype[Any]) -> Node:
    """A value that is to be written among elements of a dtype."""
    node = _operand(value)
    if not isinstance(node, Scalar):
        return node
    kinds = "biufc"
    plain = isinstance(node.value, bool | int | float | complex)
    if plain and kinds.index(np.asarray(node.value).dtype.kind) <= kinds.index(dtype.kind):
        return make.constant(np.full((), node.value, dtype))  # NumPy refuses what does not fit, such as 300 among bytes
    return make.constant(node.value)
