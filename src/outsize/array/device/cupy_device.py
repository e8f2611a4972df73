"""CUDA devices through CuPy, for programs that have CuPy and no torch: the same streams and memory, CuPy's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cupy

from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.base import STREAMS, Device, Event, Rates, Stream
from outsize.array.store.base import Block
from outsize.core.errors import OutOfMemory
from outsize.core.memory import Pool
from outsize.core.units import format_bytes
from outsize.engine.pinned import is_locked

_OUTSIDE = 96 << 20
"""cuBLAS's workspaces and the temporaries of reductions."""


class _Moment:
    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event(block=True, disable_timing=True)
        self.event.record(stream)

    def come(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()


class CupyDevice(Device):
    """One CUDA device."""

    outside = _OUTSIDE

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name, self.index = f"cupy:{index}", index
        self.pool = Pool(kind="device", index=index)
        self.kernels = ArrayKernels(cupy)

    def available(self) -> tuple[int, str]:
        with cupy.cuda.Device(self.index):
            free, total = cupy.cuda.runtime.memGetInfo()
        cached = cupy.get_default_memory_pool().free_bytes()
        return free + cached, f"{format_bytes(total - free)} of {format_bytes(total)} are held"

    def rates(self) -> Rates:
        flops = {"f": 5e13, "d": 5e13, "tf32": 5e13, "F": 1e13, "D": 1e13}
        return Rates(link_in=5e10, link_out=5e10, memory=3e12, flops=flops, source="assumed")

    def reaches(self, block: Block) -> bool:
        return is_locked(block)

    def open(self, size: int, tf32: bool | None = None) -> None:
        with cupy.cuda.Device(self.index):
            try:
                self.slab = self.kernels.reserve(size)
            except cupy.cuda.memory.OutOfMemoryError:
                left, why = self.available()
                raise OutOfMemory(
                    f"{self.name} has {format_bytes(left)} left and {format_bytes(size)} are needed: {why}"
                ) from None
            cupy.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        for stream in _streams(self.index).values():
            stream.synchronize()
        self.slab = None
        self._views.clear()
        cupy.get_default_memory_pool().free_all_blocks()

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        with cupy.cuda.Device(self.index), _streams(self.index)[stream]:
            work()

    def record(self, stream: Stream) -> Event:
        return _Moment(_streams(self.index)[stream])

    def follow(self, stream: Stream, event: Any) -> None:
        _streams(self.index)[stream].wait_event(event.event)


@functools.cache
def _streams(index: int) -> dict[Stream, Any]:
    with cupy.cuda.Device(index):
        return {stream: cupy.cuda.Stream(non_blocking=True) for stream in STREAMS}
