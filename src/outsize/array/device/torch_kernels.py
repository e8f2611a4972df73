"""torch as the array library of a device: on CUDA, and on the processor for the pretended device.

Functions write into memory that is already there (`out=`), in the dtypes of NumPy's own loops: promotion is settled
before, so torch's rules never apply. What torch does differently from NumPy (integer division by zero, shifts past the
width, unsigned integers of more than a byte) is left out of the table; such a chain runs on the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from outsize.array.device.base import Kernels, rows_of
from outsize.array.store.base import Block

_DTYPES = {
    "?": torch.bool, "b": torch.int8, "B": torch.uint8, "h": torch.int16, "i": torch.int32, "l": torch.int64,
    "e": torch.float16, "f": torch.float32, "d": torch.float64, "F": torch.complex64, "D": torch.complex128,
}  # fmt: skip
"""NumPy's dtype character -> torch's dtype."""

_REAL, _FLOAT, _COMPLEX, _WHOLE = "bBhilefd", "efd", "FD", "bBhil"

_ALL = "?" + _REAL + _COMPLEX
_PLAIN = {
    name: dtypes
    for dtypes, names in (
        (_ALL, "add multiply equal not_equal logical_and logical_or logical_xor logical_not"),
        (_REAL + _COMPLEX, "subtract negative absolute square"), (_FLOAT + _COMPLEX, "divide sqrt exp log"),
        ("?" + _REAL, "maximum minimum less less_equal greater greater_equal"), (_REAL, "fmax fmin"),
        (_FLOAT, "power remainder reciprocal exp2 expm1 log2 log10 log1p sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh "
                 "arccosh arctanh arctan2 copysign floor ceil trunc rint signbit"),
        ("fd", "hypot logaddexp"), ("?" + _WHOLE, "bitwise_and bitwise_or bitwise_xor invert"),
    )
    for name in names.split()
}  # fmt: skip
"""Elementwise operation -> the dtypes of inputs for which torch's function of this name means what NumPy's means."""
_RENAMED = {"equal": torch.eq, "power": torch.pow, "rint": torch.round, "invert": torch.bitwise_not}


def _where(out: Any, condition: Any, x: Any, y: Any) -> None:
    _put(out, y)
    if isinstance(x, torch.Tensor) and x.ndim:
        torch.where(condition, x, out, out=out)
    else:
        out.masked_fill_(condition, x.item())


def _put(out: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device != out.device:
        out.fill_(value.item())
    else:
        out.copy_(value)


def _sign(out: Any, x: Any) -> None:
    if not x.is_floating_point():
        torch.sign(x, out=out)
        return
    large = torch.finfo(x.dtype).max  # torch says 0 of NaN, and a mask would take memory
    torch.mul(x, large, out=out)  # in two steps the smallest number passes 1
    out.mul_(large).clamp_(-1, 1).add_(0)  # NumPy says 0.0 of -0.0


_SPECIAL: dict[str, tuple[Callable[..., None], str]] = {
    "astype": (_put, "?" + _REAL + _COMPLEX), "positive": (_put, _REAL + _COMPLEX), "where": (_where, "?"),
    "conjugate": (lambda out, x: out.copy_(x.conj()), _REAL + _COMPLEX),
    "real": (lambda out, x: out.copy_(x.real if x.is_complex() else x), _REAL + _COMPLEX),
    "imag": (lambda out, x: out.copy_(x.imag), _COMPLEX),
    "isnan": (lambda out, x: torch.ne(x, x, out=out), _FLOAT), "sign": (_sign, _REAL),
    "floor_divide": (lambda out, a, b: torch.div(a, b, rounding_mode="floor", out=out), _FLOAT),
}  # fmt: skip
"""Operations that are more than one function with `out=`."""

_REDUCE = {"minimum": torch.amin, "maximum": torch.amax}
_COMBINE = {"add": torch.add, "multiply": torch.mul, "minimum": torch.minimum, "maximum": torch.maximum}


class TorchKernels(Kernels):
    """torch on one of its devices."""

    name = "torch"
    dtypes = frozenset(_DTYPES)

    def __init__(self, device: str, few: int = 15) -> None:
        self.device, self.few = torch.device(device), few
        """`few`: elements that torch's kernels reduce without memory of their own."""

    def reserve(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def view(self, slab: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        size = math.prod(shape) * dtype.itemsize
        return slab[offset : offset + size].view(_DTYPES[dtype.char]).view(shape)

    def upload(self, target: Any, block: Block) -> None:
        if target.device.type == "cpu":
            np.copyto(target.numpy(), block)
        else:
            copy_rows(target, block, inwards=True)

    def download(self, block: Block, source: Any) -> None:
        if source.device.type == "cpu":
            np.copyto(block, source.numpy())
        else:
            copy_rows(source, block, inwards=False)

    def function(self, name: str, char: str) -> Callable[..., None] | None:
        special = _SPECIAL.get(name)
        if special is not None:
            return special[0] if char in special[1] else None
        if char not in _PLAIN.get(name, ()):
            return None
        plain = _RENAMED.get(name) or getattr(torch, name)
        return lambda out, *args: plain(*args, out=out)

    def scalar(self, value: Any, dtype: np.dtype[Any]) -> Any:
        return torch.tensor(np.asarray(value).astype(dtype).item(), dtype=_DTYPES[dtype.char])

    def cast(self, out: Any, value: Any) -> None:
        out.copy_(value)

    def reduce(self, kind: str, out: Any, value: Any, axes: tuple[int, ...]) -> None:
        value = self._halve(kind, value, axes)
        if kind == "add":
            torch.sum(value, dim=axes, keepdim=True, dtype=out.dtype, out=out)
        elif kind == "multiply":
            torch.prod(value, dim=axes[0], keepdim=True, dtype=out.dtype, out=out)
        else:
            _REDUCE[kind](value, dim=axes, keepdim=True, out=out)

    def _halve(self, kind: str, value: Any, axes: tuple[int, ...]) -> Any:
        """Fold the second half of an axis onto the first, in place, until few are left, where the axes that stay are the
        fast ones: torch's kernels for those take a hundred MiB and more for partial results, past any budget."""
        kept = [axis for axis in range(value.ndim) if axis not in axes and value.shape[axis] > 1]
        if not kept or kept[-1] < max(axis for axis in axes):
            return value
        for axis in axes:
            while (length := value.shape[axis]) > 1 and math.prod(value.shape[a] for a in axes) > self.few:
                first = -(-length // 2)
                front, back = value.narrow(axis, 0, length - first), value.narrow(axis, first, length - first)
                _COMBINE[kind](front, back, out=front)
                value = value.narrow(axis, 0, first)
        return value

    def arg(self, kind: str, out: Any, value: Any, axis: int) -> None:
        (torch.argmin if kind == "argmin" else torch.argmax)(value, dim=axis, keepdim=True, out=out)

    def multiply(self, c: Any, a: Any, b: Any, add: bool, tf32: bool) -> None:
        if c.device.type == "cpu":  # torch's own product on the processor takes no strips of C in place
            c.copy_(torch.addmm(c, a, b) if add else torch.mm(a, b))
        elif add:
            torch.addmm(c, a, b, out=c)
        else:
            torch.mm(a, b, out=c)

    def multiply_each(self, c: Any, a: Any, b: Any, tf32: bool) -> None:
        torch.bmm(a, b, out=c)

    def turn(self, value: Any, order: tuple[int, ...]) -> Any:
        return value.permute(order)


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    """torch's dtype of a NumPy one, None where it has none."""
    return _DTYPES.get(dtype.char) if dtype.isnative else None


@contextlib.contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Products of float32 in full precision, or through TF32, whatever the program has set."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


TO_DEVICE, _TO_HOST = 1, 2
_PITCH = 2**31 - 1
"""Bytes from row to row that CUDA copies at most at once."""


@functools.cache
def cuda_runtime(quick: bool = False) -> Any:
    """The CUDA runtime that torch has loaded, for what torch does not offer. None where it is not a library of its own.

    Copies of rows at a pitch: torch itself packs those on the processor first. And, `quick`, calls that keep the
    interpreter's lock: many threads that send small pieces spend more time on handing it over than on the calls."""
    torch.cuda.init()
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split(None, 5)[-1].strip() for line in maps if "libcudart" in line})
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.PyDLL(path) if quick else ctypes.CDLL(path)
            size, pointer = ctypes.c_size_t, ctypes.c_void_p
            library.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
            library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
            library.cudaEventCreateWithFlags.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
            library.cudaEventRecord.argtypes = [pointer, pointer]
            library.cudaEventQuery.argtypes = library.cudaEventDestroy.argtypes = [pointer]
            library.cudaStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
            return library
    return None


def copy_rows(tensor: Any, block: Block, *, inwards: bool) -> None:
    """An asynchronous copy on the current stream between a contiguous tensor and a host block."""
    rows = rows_of(block)
    library = cuda_runtime()
    if rows is None or library is None or not tensor.is_contiguous():
        host = torch.from_numpy(block)
        tensor.copy_(host, non_blocking=True) if inwards else host.copy_(tensor, non_blocking=True)
        return
    width, count, pitch = rows
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    there, here = tensor.data_ptr(), block.ctypes.data
    kind, code = TO_DEVICE if inwards else _TO_HOST, 0
    if count == 1 or pitch == width:
        width, count, pitch = width * count, 1, 0
    if count == 1 or pitch > _PITCH:
        for row in range(count):
            target, source = there + row * width, here + row * pitch
            code = library.cudaMemcpyAsync(*((target, source) if inwards else (source, target)), width, kind, stream)
            if code:
                break
    elif inwards:
        code = library.cudaMemcpy2DAsync(there, width, here, pitch, width, count, kind, stream)
    else:
        code = library.cudaMemcpy2DAsync(here, pitch, there, width, width, count, kind, stream)
    if code:
        raise RuntimeError(f"the CUDA runtime refused a copy of {count} rows of {width} bytes: error {code}")
