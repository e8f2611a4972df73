"""What the array engine asks of a device: memory reserved once, streams of work in order, and a few kernels.

A stream is a queue whose work runs in order: `in` copies to the device, `work` computes, `out` copies back; `side` is for
kernels that may run beside those of `work`. Lanes run at the same time; an event recorded on one can be followed by
another, and waited for by a thread of the host. Nothing else orders them. All memory is one reserved stretch of bytes,
out of which the passes cut arrays, so that what a device holds is known to the byte before it runs. The kernels
(elementwise functions, reductions, a matrix product) come from an array library; `Kernels` is the small part of one that
is needed. `DeviceBudget` is a device as a plan sees it: which one, and how many bytes of it may be held.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from outsize.array.passes.base import Room
from outsize.array.store.base import Block
from outsize.core.errors import OutOfMemory
from outsize.core.memory import Pool

Stream = Literal["in", "work", "side", "out"]
STREAMS: tuple[Stream, ...] = ("in", "work", "side", "out")

ALIGNMENT = 512
"""Bytes: arrays on a device begin at multiples of this, as its own allocators place them."""


_VIEWS = 4096
"""Views that are kept: chunks come in few shapes and places, and making a view costs as much as a launch."""


def padded(size: int) -> int:
    """Bytes that an array takes on a device."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def array_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array on a device."""
    return padded(math.prod(shape) * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device and its link can do, a second."""

    link_in: float
    """Bytes from page-locked host memory."""
    link_out: float
    """Bytes to page-locked host memory."""
    memory: float
    """Bytes of its own memory, read or written."""
    flops: Mapping[str, float]
    """dtype character, or `tf32` -> operations of a large matrix product."""
    source: str
    """How these are known."""

    def product(self, char: str, tf32: bool) -> tuple[str, float]:
        """Name and rate of the arithmetic of a product of this dtype."""
        name = "tf32" if tf32 and char == "f" else char
        return name, self.flops.get(name, self.flops["d"] / 4)


class Event(Protocol):
    """A moment in a stream."""

    def come(self) -> bool:
        """True where it has come."""

    def wait(self) -> None:
        """Block this thread until it has come."""


class Copier:
    """Takes bytes of page-locked memory to a device, one stretch at a time, again and again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Event | None = None

    def send(self, address: int, size: int, offset: int) -> None:
        """Copy bytes at an address of the host to an offset of the reserved memory, on the stream `in`."""
        device, block = self._device, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        target = device.view(offset, (size,), block.dtype)
        device.submit("in", lambda: device.kernels.upload(target, block))
        self._last = device.record("in")

    def come(self) -> bool:
        """True where what was sent last has arrived: from then on its memory may be filled again."""
        return self._last is None or self._last.come()


class Kernels(abc.ABC):
    """An array library on a device. Arrays are the library's own; every call may run later than it returns."""

    name: str
    """The library."""
    dtypes: frozenset[str]
    """dtype characters that it computes with."""
    folds: frozenset[str] = frozenset(("add", "multiply", "minimum", "maximum"))
    """Folds that `reduce` has; the processor makes others."""

    @abc.abstractmethod
    def reserve(self, size: int) -> Any:
        """That many bytes of the device's memory."""

    @abc.abstractmethod
    def view(self, slab: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array inside reserved memory, in C order."""

    @abc.abstractmethod
    def upload(self, target: Any, block: Block) -> None:
        """Copy a host block of the same shape and dtype: contiguous, or rows at a pitch."""

    @abc.abstractmethod
    def download(self, block: Block, source: Any) -> None:
        """Copy back into a host block: contiguous, or rows at a pitch."""

    @abc.abstractmethod
    def function(self, name: str, char: str) -> Callable[..., None] | None:
        """f(out, *arrays or scalars) of an elementwise operation over inputs of a dtype, None where there is none."""

    def apply(self, name: str, dtype: np.dtype[Any], out: Any, *args: Any) -> None:
        """out = an elementwise operation that every library has, of arrays or numbers."""
        call = self.function(name, dtype.char)
        assert call is not None, name
        call(out, *args)

    @abc.abstractmethod
    def scalar(self, value: Any, dtype: np.dtype[Any]) -> Any:
        """A number as `function`'s results take it."""

    @abc.abstractmethod
    def cast(self, out: Any, value: Any) -> None:
        """out[...] = value, whatever the dtypes."""

    @abc.abstractmethod
    def reduce(self, kind: str, out: Any, value: Any, axes: tuple[int, ...]) -> None:
        """out = value reduced over axes that stay with length 1, `value` is lost; kinds: add, multiply, minimum, maximum."""

    @abc.abstractmethod
    def arg(self, kind: str, out: Any, value: Any, axis: int) -> None:
        """out = where along an axis, which stays with length 1, the first smallest or largest element is (kinds: argmin, argmax);
        the first NaN where there is one."""

    @abc.abstractmethod
    def multiply(self, c: Any, a: Any, b: Any, add: bool, tf32: bool) -> None:
        """c = a @ b for matrices, or c + a @ b."""

    @abc.abstractmethod
    def multiply_each(self, c: Any, a: Any, b: Any, tf32: bool) -> None:
        """c[i] = a[i] @ b[i] for a stack of matrices."""

    @abc.abstractmethod
    def turn(self, value: Any, order: tuple[int, ...]) -> Any:
        """The array with its axes in another order, without a copy."""


class Device(abc.ABC):
    """One device, or a pretence of one."""

    name: str
    """As users write it: `cuda:0`."""
    pool: Pool
    """Its memory, as plans name it."""
    kernels: Kernels
    """What computes on it."""
    outside: int
    """Bytes that its libraries take by themselves besides what is reserved: workspaces, temporaries of reductions."""

    limit = 1 << 62
    """Bytes it may take while it is measured."""

    def __init__(self) -> None:
        self.slab: Any = None
        self._views: dict[tuple[int, tuple[int, ...], str], Any] = {}

    @abc.abstractmethod
    def available(self) -> tuple[int, str]:
        """Bytes that can be had now, and a sentence about who has the rest."""

    @abc.abstractmethod
    def rates(self) -> Rates:
        """What it can do; measured at the first call."""

    @abc.abstractmethod
    def reaches(self, block: Block) -> bool:
        """True where it can copy this host memory by itself: page-locked memory."""

    def told(self, error: Exception) -> OutOfMemory | None:
        """Our own word for an error of its library that means that its memory ran out."""
        return None

    @abc.abstractmethod
    def open(self, size: int, tf32: bool | None = None) -> None:
        """Reserve memory and make the streams ready; `OutOfMemory` where it cannot be had.

        `tf32` says how products of float32 are done from here on; None leaves that as the program has set it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for everything and give the memory back."""

    @abc.abstractmethod
    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Put work at the end of a stream."""

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """The moment when all that was submitted to a stream so far is done."""

    @abc.abstractmethod
    def follow(self, stream: Stream, event: Event) -> None:
        """What is submitted to the stream from now on runs after the event."""

    def meet(self, event: Any) -> None:
        """Let what the user does from now on come after an event."""
        event.wait()

    def leave(self) -> Any:
        """The moment when all that the user has begun so far is done."""
        return self.record("work")

    def copier(self) -> Copier:
        """One that carries to the memory that is reserved now."""
        return Copier(self)

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array inside the reserved memory."""
        key = (offset, shape, dtype.char)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > _VIEWS:
                self._views.clear()
            found = self._views[key] = self.kernels.view(self.slab, offset, shape, dtype)
        return found


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A device as a plan sees it."""

    device: Device
    """The device."""
    budget: int
    """Bytes that may be held on it in all."""
    reason: str
    """Why this number."""
    strict: bool
    """True where the user named the device: what cannot run on it is an error, not a note."""
    tf32: bool = False
    """True where products of float32 may be rounded to TF32's ten bits."""
    pinned: int | None = None
    """Bytes of host memory that may be page-locked, None where the host's budget is the only limit."""

    def limit(self, room: Room) -> tuple[Room, int]:
        """What a pass may hold of the host, where its buffers are page-locked, and of the device."""
        return room if self.pinned is None else replace(room, host=min(room.host, self.pinned)), self.room

    @property
    def room(self) -> int:
        """Bytes that passes may reserve: what the device's libraries take is set aside."""
        return max(0, self.budget - self.device.outside)


@contextlib.contextmanager
def reserved(allowed: DeviceBudget, size: int) -> Iterator[None]:
    """Bytes of a device, reserved once; its library's word for memory that ran out becomes ours."""
    device = allowed.device
    device.open(size, allowed.tf32)
    try:
        yield
    except Exception as error:
        told = device.told(error)
        if told is None:
            raise
        raise told from error
    finally:
        device.close()


def rows_of(block: Block) -> tuple[int, int, int] | None:
    """(bytes of a row, rows, bytes from one to the next) of a block that can be copied as it lies: contiguous, or contiguous
    rows of equal length at one pitch. None where it cannot."""
    width, axis = block.itemsize, block.ndim
    while axis > 0 and (block.shape[axis - 1] == 1 or block.strides[axis - 1] == width):
        axis -= 1
        width *= block.shape[axis]
    if axis == 0:
        return width, 1, width
    pitch, rows = block.strides[axis - 1], block.shape[axis - 1]
    step = pitch * rows
    for outer in reversed(range(axis - 1)):
        if block.shape[outer] != 1 and block.strides[outer] != step:
            return None
        step *= block.shape[outer]
        rows *= block.shape[outer]
    return (width, rows, pitch) if pitch >= width else None
