"""Where bytes wait while the device has no room for them.

In: a tensor. Out: a slot that gives the same bytes back. A card's neighbour is pinned host memory, reached by
copy streams of its own; a CPU's neighbour is a file in the scratch folder, read and written with plain system calls, since a
memory map's pages could not be counted. A stage, where tensors have no contents, gets `NoStore`: the same calls, no
bytes.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from outsize.core.errors import StoreError
from outsize.core.units import format_bytes

Land = Callable[[], None]
"""What is done when a copy out is over for all that follows."""


class Store(Protocol):
    """What the remedies ask of a place."""

    held: int
    """Bytes it holds now."""
    peak: int
    """The most it has held."""
    name: str
    """The place, as a user would say it."""
    beside: bool
    """Copies out run beside what follows, so that what is copied must not be written meanwhile."""

    def put(self, data: Any, land: Land | None = None) -> Any:
        """Keep a flat byte tensor; returns its slot. Nobody may write it or use its memory again before it has landed: then,
        in this call or a later one, it is let go and `land()` is called."""

    def begin(self, slot: Any, into: Any) -> int:
        """Start to fill a flat byte tensor from a slot; it is full after `finish`. Returns the number of the copy."""

    def finish(self, number: int | None = None) -> None:
        """What was begun may be used from now on; nothing is done where that is known of the copy of this number."""

    def read(self, slot: Any, into: Any) -> None:
        """Fill a flat byte tensor in host memory from a slot, at once."""

    def write(self, slot: Any, data: Any) -> None:
        """Put a flat byte tensor in host memory in the place of what a slot has, at once."""

    def land(self) -> None:
        """All that was put has landed."""

    def drop(self, slot: Any) -> None:
        """The slot may be used again."""

    def close(self) -> None:
        """Give everything back."""


IN_FLIGHT = 256 * 2**20
"""Most bytes whose copy to the host has begun and not ended: a forward pass that is faster than the link waits."""


class NoStore:
    """Counts and keeps nothing, except for what a card's copies would still be reading: so many bytes, then the card waits."""

    name = "nowhere"

    def __init__(self, in_flight: int = 0) -> None:
        self.held = 0
        self.peak = 0
        self._in_flight = in_flight
        self.beside = in_flight > 0
        self._flying: deque[tuple[int, Any, Any, Land | None]] = deque()
        """(bytes, data, mark of the copy's end, what to do then) of copies out, oldest first."""
        self._on_way = 0
        """Bytes of them."""

    def put(self, data: Any, land: Land | None = None) -> int:
        """Only the size is kept."""
        size = int(data.numel())
        self._count(size)
        self._fly(size, data, None, land)
        return size

    def have(self, size: int) -> int:
        """A slot of bytes that were there all the time, also when it held most."""
        self.held += size
        self.peak += size
        return size

    def _count(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def _fly(self, size: int, data: Any, done: Any, land: Land | None) -> None:
        """A copy out has begun; the oldest ones are waited for where too many bytes are on their way."""
        self._flying.append((size, data, done, land))
        self._on_way += size
        while self._on_way > self._in_flight and len(self._flying) > self.beside:
            self._land_oldest()

    def _land_oldest(self) -> None:
        size, _, done, land = self._flying.popleft()
        self._on_way -= size
        self._wait(done)
        if land is not None:
            land()

    def _wait(self, done: Any) -> None:
        """What follows waits for one copy; here there is none."""

    def begin(self, slot: int, into: Any) -> int:
        """There is nothing to fill in."""
        return 0

    def finish(self, number: int | None = None) -> None:
        """Nothing was begun."""

    def read(self, slot: Any, into: Any) -> None:
        """As `begin`, which is over when it returns."""
        self.begin(slot, into)

    def write(self, slot: Any, data: Any) -> None:
        """Nothing is kept."""

    def land(self) -> None:
        """All copies out have ended for those who come after."""
        while self._flying:
            self._land_oldest()

    def drop(self, slot: int) -> None:
        """The bytes count no longer."""
        self.held -= slot

    def close(self) -> None:
        """Nothing to give back."""


def _view(data: Any) -> memoryview:
    """The bytes of a flat CPU tensor; by address, since `Tensor.numpy` forbids its storage ever to be resized."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


class DiskStore(NoStore):
    """A file in a scratch folder; it vanishes with the process, since it has no name any more."""

    name = "disk"

    def __init__(self, folder: str) -> None:
        super().__init__()
        os.makedirs(folder, exist_ok=True)
        self.path = folder
        self._file = tempfile.TemporaryFile(dir=folder, prefix="outsize-fit-")  # noqa: SIM115
        self._end = 0
        self._spare: dict[int, list[int]] = defaultdict(list)

    def put(self, data: Any, land: Land | None = None) -> tuple[int, int]:  # type: ignore[override]
        """Write the bytes of a flat byte tensor on the CPU."""
        size = int(data.numel())
        if self._spare[size]:
            start = self._spare[size].pop()
        else:
            start, self._end = self._end, self._end + size
        try:
            self.write((start, size), data)
        except StoreError:
            self._spare[size].append(start)
            raise
        self._count(size)
        self._fly(size, data, None, land)
        return start, size

    def write(self, slot: tuple[int, int], data: Any) -> None:
        """Write the bytes of a flat byte tensor on the CPU over those of a slot."""
        start, size = slot
        view = _view(data)
        done = 0
        try:
            while done < size:
                done += os.pwrite(self._file.fileno(), view[done:], start + done)
        except OSError as error:
            raise StoreError(
                f"the scratch folder {self.path} could not take {format_bytes(size)}: {error.strerror}", path=self.path
            ) from error

    def begin(self, slot: tuple[int, int], into: Any) -> int:  # type: ignore[override]
        """Read the slot into a flat byte tensor on the CPU."""
        start, size = slot
        view = _view(into)
        done = 0
        while done < size:
            read = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if read == 0:
                raise StoreError(f"the scratch file in {self.path} ends before byte {start + size}", path=self.path)
            done += read
        return 0

    def drop(self, slot: tuple[int, int]) -> None:  # type: ignore[override]
        """The room is used for the next block of this size."""
        self._spare[slot[1]].append(slot[0])
        self.held -= slot[1]

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class Slot:
    """A pinned buffer, and the ends of the last copies that wrote and read it."""

    __slots__ = ("buffer", "read", "written")

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.written: Any = None
        self.read: Any = None


class HostStore(NoStore):
    """Pinned host memory of a CUDA device, with copies on two streams of their own: both ways of the link run at once, and
    beside the kernels.

    The order is said by three rules. A copy begins after all that the kernels' stream was given before it: so what it reads
    is written, and the memory that it fills is nobody's. A copy in follows the copy that wrote its buffer, a copy out the one
    that read it before. Memory at either end of a copy is held until the kernels' stream has been told to wait for that copy,
    and so used again in the order of that stream, at a moment that does not depend on how far the processor is ahead.
    """

    name = "host"

    def __init__(self, device: Any) -> None:
        super().__init__(IN_FLIGHT)
        import torch

        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._spare: dict[int, list[Slot]] = defaultdict(list)
        self._begun = 0
        """Copies in so far."""
        self._arrived = 0
        """Those of them that the kernels' stream waits for."""
        self._coming: list[Any] = []
        """What the others fill."""

    def put(self, data: Any, land: Land | None = None) -> Slot:  # type: ignore[override]
        """Start the copy out."""
        import torch

        size = int(data.numel())
        spare = self._spare[size]
        slot = spare.pop() if spare else Slot(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        slot.written = self._copy(self._out, slot.buffer, data, slot.read)
        self._count(size)
        self._fly(size, data, slot.written, land)
        return slot

    def _wait(self, done: Any) -> None:
        """Kernels that follow on the current stream wait for one copy."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(done)

    def begin(self, slot: Slot, into: Any) -> int:  # type: ignore[override]
        """Start the copy in, beside the kernels that are queued after it."""
        slot.read = self._copy(self._in, into, slot.buffer, slot.written)
        self._coming.append(into)
        self._begun += 1
        return self._begun

    def finish(self, number: int | None = None) -> None:
        """Kernels that follow on the current stream wait for the copies in that were begun."""
        import torch

        if self._arrived < (self._begun if number is None else number):
            torch.cuda.current_stream(self._device).wait_stream(self._in)
            self._arrived = self._begun
            self._coming.clear()

    def read(self, slot: Slot, into: Any) -> None:
        """Wait for what is on its way out, then copy from buffer to host memory; the card has no part in it."""
        self._out.synchronize()
        into.copy_(slot.buffer)

    def write(self, slot: Slot, data: Any) -> None:
        """The same the other way: after all copies that read the buffer or fill it."""
        self._in.synchronize()
        self._out.synchronize()
        slot.buffer.copy_(data)

    def drop(self, slot: Slot) -> None:  # type: ignore[override]
        """The buffer is kept for the next block of this size: the pinned allocator rounds up, so few are made."""
        size = int(slot.buffer.numel())
        self._spare[size].append(slot)
        self.held -= size

    def close(self) -> None:
        """Let the buffers go."""
        self.finish()
        self.land()
        self._in.synchronize()
        self._out.synchronize()
        self._spare.clear()

    def _copy(self, stream: Any, into: Any, source: Any, after: Any) -> Any:
        """A copy on a stream after all kernels so far and one other copy; returns the mark of its end."""
        import torch

        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done


def open_store(device: Any, scratch: str) -> Store:
    """The place next to a device."""
    return HostStore(device) if device.type == "cuda" else DiskStore(scratch)
