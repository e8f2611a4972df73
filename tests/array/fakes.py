"""What tests of devices share: many chunks and pieces of small arrays, and a pretended device that stages as CUDA does."""

from __future__ import annotations

import ctypes
from typing import Any

from outsize.array.device.base import Copier
from outsize.array.device.fake import FakeDevice


class Runtime:
    """The CUDA runtime's few calls on a pretended device's stream: copies come late, and asking is what makes time pass."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.events: dict[int, Any] = {}
        self.made = self.ended = self.last = 0
        self.early = False
        """True where whatever is asked about comes as soon as it was asked about once."""

    def cudaEventCreateWithFlags(self, event: Any, flags: int) -> int:
        self.made += 1
        event._obj.value = self.made
        return 0

    def cudaEventDestroy(self, event: Any) -> int:
        self.ended += 1
        return 0

    def cudaEventRecord(self, event: Any, stream: int) -> int:
        self.events[event.value] = self.device.record("in")
        return 0

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> int:
        self.device.submit("in", lambda: ctypes.memmove(target, source, size) and None)
        return 0

    def cudaEventQuery(self, event: Any) -> int:
        found = self.events.get(event.value)
        with self.device._lock:
            if found is None or found.done:
                return 0
            self.device.run_until(found) if self.early else self.device._step()
        self.last = 600
        return 600

    def cudaGetLastError(self) -> int:
        last, self.last = self.last, 0
        return last


class Carded(FakeDevice):
    """A pretended device that stages as a CUDA device does."""

    def open(self, size: int, tf32: bool | None = None) -> None:
        super().open(size, tf32)
        self.runtime = Runtime(self)

    def copier(self) -> Copier:
        from outsize.array.device.cuda import _QuickCopier

        slab = self.slab.data_ptr() if hasattr(self.slab, "data_ptr") else self.slab.ctypes.data
        return _QuickCopier(self.runtime, 0, slab)


TINY = {"device_chunk": 1 << 12, "device_slot": 1 << 12, "stage_piece": 512, "stage_pause": 0, "small": 0}
"""Many chunks and pieces although arrays are small; a pretended device works while it is asked."""
