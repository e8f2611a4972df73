"""NumPy's interface as the array library of a device: CuPy on CUDA, NumPy itself for the pretended device.

CuPy has NumPy's functions under NumPy's names and in NumPy's dtypes, so the table is the library itself.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.device.base import Kernels, rows_of
from outsize.array.store.base import Block

_REDUCE = {"add": "sum", "multiply": "prod", "minimum": "min", "maximum": "max"}
_TO_DEVICE, _TO_HOST = 1, 2


class ArrayKernels(Kernels):
    """A module with NumPy's interface."""

    dtypes = frozenset("?bBhHiIlLefdFD")

    def __init__(self, module: Any) -> None:
        self.module, self.name = module, module.__name__
        self._host = module is np

    def reserve(self, size: int) -> Any:
        return self.module.empty(size, np.uint8)

    def view(self, slab: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        size = math.prod(shape) * dtype.itemsize
        return slab[offset : offset + size].view(dtype).reshape(shape)

    def upload(self, target: Any, block: Block) -> None:
        if self._host:
            np.copyto(target, block)
        else:
            self._copy(target, block, inwards=True)

    def download(self, block: Block, source: Any) -> None:
        if self._host:
            np.copyto(block, source)
        else:
            self._copy(source, block, inwards=False)

    def _copy(self, array: Any, block: Block, *, inwards: bool) -> None:
        rows = rows_of(block)
        assert rows is not None, block.strides
        width, count, pitch = rows
        runtime, stream = self.module.cuda.runtime, self.module.cuda.get_current_stream().ptr
        there, here = array.data.ptr, block.ctypes.data
        if inwards:
            runtime.memcpy2DAsync(there, width, here, pitch, width, count, _TO_DEVICE, stream)
        else:
            runtime.memcpy2DAsync(here, pitch, there, width, width, count, _TO_HOST, stream)

    def function(self, name: str, char: str) -> Callable[..., None] | None:
        if name in ("real", "imag"):
            return lambda out, value: self.cast(out, getattr(value, name))
        if name in ("astype", "where"):
            return self.cast if name == "astype" else self._where
        found = getattr(self.module, name, None)
        if found is None or (name in _UNSAFE and char in "bBhHiIlL"):
            return None
        return lambda out, *args: found(*args, out=out)

    def _where(self, out: Any, condition: Any, x: Any, y: Any) -> None:
        out[...] = y
        self.module.copyto(out, x, where=condition)

    def scalar(self, value: Any, dtype: np.dtype[Any]) -> Any:
        return dtype.type(np.asarray(value).astype(dtype))

    def cast(self, out: Any, value: Any) -> None:
        if self._host:
            np.copyto(out, value, casting="unsafe")
        else:
            out[...] = value

    def reduce(self, kind: str, out: Any, value: Any, axes: tuple[int, ...]) -> None:
        getattr(self.module, _REDUCE[kind])(value, axis=axes, keepdims=True, out=out)

    def arg(self, kind: str, out: Any, value: Any, axis: int) -> None:
        out[...] = getattr(self.module, kind)(value, axis=axis, keepdims=True)

    def multiply(self, c: Any, a: Any, b: Any, add: bool, tf32: bool) -> None:
        if self._host:
            c[...] = self.module.matmul(a, b) + (c if add else 0)
        else:  # rows of C are columns of its transpose, which is how cuBLAS counts: no temporary
            importlib.import_module("cupy.cublas").gemm(
                "N", "N", b.T, a.T, out=c.T, alpha=1.0, beta=1.0 if add else 0.0
            )

    def multiply_each(self, c: Any, a: Any, b: Any, tf32: bool) -> None:
        self.module.matmul(a, b, out=c)

    def turn(self, value: Any, order: tuple[int, ...]) -> Any:
        return value.transpose(order)


_UNSAFE = frozenset(("floor_divide", "remainder", "left_shift", "right_shift", "power", "reciprocal"))
"""Operations whose result on integers NumPy defines and a card does not."""
