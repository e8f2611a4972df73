"""CUDA devices through torch: three streams, blocking events, one allocation.

Streams live as long as the process: cuBLAS keeps a workspace for each stream it was called on, and new streams at every
run would leave one behind each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from outsize.array.device.base import STREAMS, Copier, Device, Event, Rates, Stream
from outsize.array.device.torch_kernels import TO_DEVICE, TorchKernels, cuda_runtime, precision
from outsize.array.store.base import Block
from outsize.core.errors import OutOfMemory
from outsize.core.memory import Pool
from outsize.core.units import format_bytes
from outsize.engine.pinned import is_locked, lock_memory

_WORKSPACES = 64 << 20
"""cuBLAS takes 32 MiB on Hopper for each of the two streams that products run on."""
_NO_TIMING = 2
"""cudaEventDisableTiming."""
_NOT_READY = 600
"""cudaErrorNotReady."""
_PAUSE = 4e-4
"""Seconds between two questions whether an event has come, at most."""
_TEMPORARIES = 32 << 20
"""What reductions take for their partial results, and the rounding of torch's allocator."""


def _ask(come: Callable[[], bool]) -> None:
    """Wait until something has come. It is asked, with pauses, rather than waited for: the driver's own waiting either keeps
    a core busy or has the card interrupt for every event, which many threads with small copies cannot bear."""
    pause = 2e-5
    while not come():
        time.sleep(pause)
        pause = min(_PAUSE, 2 * pause)


class _Moment:
    """A CUDA event by torch."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def come(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        _ask(self.come)

    def delay(self, stream: Any) -> None:
        """What is put on a stream from now on runs after it."""
        stream.wait_event(self._event)


class _QuickMoment:
    """A CUDA event by the runtime itself, which may be recorded again and again. Its calls keep the interpreter's lock: a
    dozen threads that copy want that lock back a thousand times a second each, and whoever gives it away in the middle of
    his work waits in line behind all of them."""

    def __init__(self, runtime: Any) -> None:
        self._runtime, self._event = runtime, ctypes.c_void_p()
        code = runtime.cudaEventCreateWithFlags(ctypes.byref(self._event), _NO_TIMING)
        if code:
            raise RuntimeError(f"the CUDA runtime refused an event: error {code}")

    def record(self, stream: int) -> int:
        """It comes when all that is on the stream now is done; the runtime's answer."""
        return int(self._runtime.cudaEventRecord(self._event, stream))

    def come(self) -> bool:
        """True where it has come, or was never recorded."""
        code = self._runtime.cudaEventQuery(self._event)
        if code == 0:
            return True
        if code != _NOT_READY:
            raise RuntimeError(f"the device has failed: CUDA error {code}")
        self._runtime.cudaGetLastError()  # "not ready" must not be taken for an error by the next who asks
        return False

    def wait(self) -> None:
        _ask(self.come)

    def delay(self, stream: Any) -> None:
        """What is put on a stream from now on runs after it."""
        code = self._runtime.cudaStreamWaitEvent(stream.cuda_stream, self._event, 0)
        if code:
            raise RuntimeError(f"the CUDA runtime refused to let a stream wait: error {code}")

    def __del__(self) -> None:
        self._runtime.cudaEventDestroy(self._event)


class _QuickCopier(_QuickMoment, Copier):
    """Through the runtime itself, with one event for all its copies: for many threads with small pieces."""

    def __init__(self, runtime: Any, stream: int, slab: int) -> None:
        super().__init__(runtime)
        self._stream, self._slab = stream, slab

    def send(self, address: int, size: int, offset: int) -> None:
        code = self._runtime.cudaMemcpyAsync(self._slab + offset, address, size, TO_DEVICE, self._stream)
        code = code or self.record(self._stream)
        if code:
            raise RuntimeError(f"the CUDA runtime refused a copy of {size} bytes: error {code}")


class TorchDevice(Device):
    """One CUDA device."""

    outside = _WORKSPACES + _TEMPORARIES

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name, self.index = f"cuda:{index}", index
        self.pool = Pool(kind="device", index=index)
        self.kernels = TorchKernels(self.name)
        self._precision = contextlib.ExitStack()
        self._address = 0

    def available(self) -> tuple[int, str]:
        free, total = torch.cuda.mem_get_info(self.index)
        held, ours = torch.cuda.memory_reserved(self.index), torch.cuda.memory_allocated(self.index)
        left = free + held - ours
        why = f"{format_bytes(total - free - held)} of {format_bytes(total)} are held by others{_holders(self.index)}"
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        allowed = int(total * ask(self.index)) - ours if ask is not None else left
        if allowed < left:
            return max(0, allowed), f"the process may hold {format_bytes(allowed + ours)} (memory fraction)"
        return left, why

    def rates(self) -> Rates:
        found = _known_rates.get(self.index)
        if found is None:
            found = _known_rates[self.index] = _measure(self.index, min(self.limit, self.available()[0]))
        return found

    def reaches(self, block: Block) -> bool:
        return is_locked(block)

    def told(self, error: Exception) -> OutOfMemory | None:
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            return None
        left, why = self.available()
        return OutOfMemory(
            f"{self.name} has {format_bytes(left)} left, and that was not enough: {why}; free some, or give a smaller "
            f"device budget"
        )

    def open(self, size: int, tf32: bool | None = None) -> None:
        if tf32 is not None:
            self._precision.enter_context(precision(tf32))
        try:
            self.slab = self.kernels.reserve(size)
        except torch.OutOfMemoryError as error:
            self._precision.close()
            raise self.told(error) or error from None
        self._address = self.slab.data_ptr()
        begun = torch.cuda.current_stream(self.index)
        for stream in STREAMS:
            _streams(self.index)[stream].wait_stream(begun)

    def close(self) -> None:
        for stream in _streams(self.index).values():
            stream.synchronize()
        self._precision.close()
        self.slab = None
        self._views.clear()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(_streams(self.index)[stream]):
            work()

    def meet(self, event: Any) -> None:
        event.delay(torch.cuda.current_stream(self.index))

    def leave(self) -> Any:
        return self._moment(torch.cuda.current_stream(self.index))

    def copier(self) -> Copier:
        runtime = self._runtime()
        if runtime is None:
            return super().copier()
        with torch.cuda.device(self.index):  # an event belongs to the device on which it is made
            return _QuickCopier(runtime, _streams(self.index)["in"].cuda_stream, self._address)

    def record(self, stream: Stream) -> Event:
        return self._moment(_streams(self.index)[stream])

    def follow(self, stream: Stream, event: Any) -> None:
        event.delay(_streams(self.index)[stream])

    def _runtime(self) -> Any:
        """The CUDA runtime for quick calls, None where there is none: a thread's plain calls go to the first device."""
        return cuda_runtime(quick=True) if self.index == 0 else None

    def _moment(self, stream: Any) -> _Moment | _QuickMoment:
        runtime = self._runtime()
        if runtime is None:
            return _Moment(stream)
        with torch.cuda.device(self.index):
            moment = _QuickMoment(runtime)
        code = moment.record(stream.cuda_stream)
        if code:
            raise RuntimeError(f"the CUDA runtime refused to record an event: error {code}")
        return moment


@functools.cache
def _streams(index: int) -> dict[Stream, Any]:
    return {stream: torch.cuda.Stream(index) for stream in STREAMS}


def _holders(index: int) -> str:
    """Who holds the card, as far as the driver tells."""
    from outsize.machine.gpu import read_devices
    from outsize.machine.system import LiveSystem

    reading = next((r for r in read_devices(LiveSystem())[0] if r.pool.index == index), None)
    others = [holder for holder in (reading.holders if reading is not None else ()) if holder.pid != os.getpid()]
    names = [f"{holder.name or 'process'} ({holder.pid}) {format_bytes(holder.bytes)}" for holder in others]
    return f": {', '.join(names[:3])}" if names else ""


_known_rates: dict[int, Rates] = {}


def _measure(index: int, room: int) -> Rates:
    """A few milliseconds of copies and products, once a process, in half of the room."""
    with torch.cuda.device(index):
        link_in, link_out, memory = _measure_copies(max(1 << 20, min(256 << 20, room // 4 >> 20 << 20)))
        edge = max(256, min(8192, 1 << (max(1, room // 24).bit_length() - 1) // 2))
        flops = {
            "f": _measure_product(edge, torch.float32, False), "tf32": _measure_product(edge, torch.float32, True),
            "d": _measure_product(edge // 2, torch.float64, False),
        }  # fmt: skip
    flops["F"], flops["D"] = flops["f"] / 4, flops["d"] / 4
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return Rates(link_in=link_in, link_out=link_out, memory=memory, flops=flops, source="measured")


def _measure_copies(size: int) -> tuple[float, float, float]:
    """Bytes a second in, out, and within the device (read and written)."""
    card = torch.empty(size, dtype=torch.uint8, device="cuda")
    with lock_memory(size) as pinned:
        host = pinned.tensor()
        link_in = size / _seconds(lambda: card.copy_(host, non_blocking=True))
        link_out = size / _seconds(lambda: host.copy_(card, non_blocking=True))
    half = size // 2
    return link_in, link_out, size / _seconds(lambda: card[:half].copy_(card[half:]))


def _measure_product(edge: int, dtype: Any, tf32: bool) -> float:
    a = torch.randn(edge, edge, device="cuda", dtype=dtype)
    c = torch.empty_like(a)
    with precision(tf32):
        return float(2.0 * edge**3 / _seconds(lambda: torch.mm(a, a, out=c)))


def _seconds(work: Callable[[], Any]) -> float:
    work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
