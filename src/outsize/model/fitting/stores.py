"""Where bytes wait while the device has no room for them.

In: a tensor. Out: a slot that gives the same bytes back. A card's neighbour is pinned host memory, reached by its own
copy stream; a CPU's neighbour is a file in the scratch folder, read and written with plain system calls, since a
memory map's pages could not be counted. A stage, where tensors have no contents, gets `NoStore`: the same calls, no
bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, Protocol

from outsize.core.errors import StoreError
from outsize.core.units import format_bytes


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

    def put(self, data: Any, emptied: bool = False) -> Any:
        """Keep a flat byte tensor; returns its slot. `emptied`: its storage may be emptied while the copy runs."""

    def begin(self, slot: Any, into: Any, emptied: bool = False) -> None:
        """Start to fill a flat byte tensor from a slot; it is full after `finish`."""

    def finish(self) -> None:
        """What was begun may be used from now on."""

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
        self._flying: deque[tuple[int, Any]] = deque()

    def put(self, data: Any, emptied: bool = False) -> int:
        """Only the size is kept."""
        size = int(data.numel())
        self.held += size
        self.peak = max(self.peak, self.held)
        if self.beside and not emptied:
            self._fly(size, data)
        return size

    def _fly(self, size: int, held: Any) -> None:
        """A copy has begun; the oldest ones are waited for where too many bytes are on their way."""
        self._flying.append((size, held))
        while sum(size for size, _ in self._flying) > self._in_flight and len(self._flying) > 1:
            self._land(self._flying.popleft()[1])

    def _land(self, held: Any) -> None:
        """Wait for one copy; here there is none."""

    def begin(self, slot: int, into: Any, emptied: bool = False) -> None:
        """There is nothing to fill in."""

    def finish(self) -> None:
        """All copies have ended for those who come after."""
        self._flying.clear()

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

    def put(self, data: Any, emptied: bool = False) -> tuple[int, int]:  # type: ignore[override]
        """Write the bytes of a flat byte tensor on the CPU."""
        view = _view(data)
        size = len(view)
        if self._spare[size]:
            start = self._spare[size].pop()
        else:
            start, self._end = self._end, self._end + size
        done = 0
        try:
            while done < size:
                done += os.pwrite(self._file.fileno(), view[done:], start + done)
        except OSError as error:
            self._spare[size].append(start)
            raise StoreError(
                f"the scratch folder {self.path} could not take {format_bytes(size)}: {error.strerror}", path=self.path
            ) from error
        self.held += size
        self.peak = max(self.peak, self.held)
        return start, size

    def begin(self, slot: tuple[int, int], into: Any, emptied: bool = False) -> None:  # type: ignore[override]
        """Read the slot into a flat byte tensor on the CPU."""
        start, size = slot
        view = _view(into)
        done = 0
        while done < size:
            read = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if read == 0:
                raise StoreError(f"the scratch file in {self.path} ends before byte {start + size}", path=self.path)
            done += read

    def drop(self, slot: tuple[int, int]) -> None:  # type: ignore[override]
        """The room is used for the next block of this size."""
        self._spare[slot[1]].append(slot[0])
        self.held -= slot[1]

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class HostStore(NoStore):
    """Pinned host memory of a CUDA device, with copies on a stream of their own so that they run beside the kernels.

    A tensor whose copy out has begun is held until the kernels' stream has been told to wait for that copy: its memory
    is used again in the order of that stream, at a moment that does not depend on how far the processor is ahead. Only a
    storage that is emptied in place is left to torch, which asks whether the copy has ended when it wants memory.
    """

    name = "host"

    def __init__(self, device: Any) -> None:
        super().__init__(IN_FLIGHT)
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._spare: dict[int, list[Any]] = defaultdict(list)

    def put(self, data: Any, emptied: bool = False) -> Any:
        """Start the copy out; the device memory is not used again before it has ended."""
        import torch

        size = int(data.numel())
        spare = self._spare[size]
        slot = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with self._beside():
            slot.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        if emptied:
            data.record_stream(self._stream)
        else:
            self._fly(size, (done, data))
        self.held += size
        self.peak = max(self.peak, self.held)
        return slot

    def _land(self, held: Any) -> None:
        """Kernels that follow on the current stream wait for one copy."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(held[0])

    def begin(self, slot: Any, into: Any, emptied: bool = False) -> None:
        """Start the copy in, beside the kernels that are queued after it."""
        with self._beside():
            into.copy_(slot, non_blocking=True)
        if emptied:
            into.record_stream(self._stream)

    def finish(self) -> None:
        """Kernels that follow on the current stream wait for the copies that were begun."""
        import torch

        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        super().finish()

    def drop(self, slot: Any) -> None:
        """The buffer is kept for the next block of this size: the pinned allocator rounds up, so few are made."""
        self._spare[slot.numel()].append(slot)
        self.held -= slot.numel()

    def close(self) -> None:
        """Let the buffers go."""
        self._stream.synchronize()
        self._spare.clear()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


def open_store(device: Any, scratch: str) -> Store:
    """The place next to a device."""
    return HostStore(device) if device.type == "cuda" else DiskStore(scratch)
