"""torch's own history of a CUDA device, switched on for the few steps of an inspection: which line's allocations stayed.

Unproven on a card: tested with a scripted torch. Where torch has no such history, nothing is said.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from outsize.monitor.leaks.user_code import is_user_file, spell

_EVENTS = 100_000


class DeviceHistory:
    """The allocations of one device from now on."""

    def __init__(self, memory: Any, index: int) -> None:
        self._memory, self._index = memory, index
        self._line: str | None = None

    @classmethod
    def start(cls, device: str) -> DeviceHistory | None:
        """Switch the history on; None for the host, and where the program records one itself."""
        torch = sys.modules.get("torch")
        memory: Any = getattr(getattr(torch, "cuda", None), "memory", None)
        if not device.startswith("cuda") or not hasattr(memory, "_record_memory_history"):
            return None
        try:
            memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_EVENTS)
        except (TypeError, RuntimeError):  # another version's arguments: do without
            return None
        return cls(memory, int(device.partition(":")[2] or 0))

    def largest_line(self) -> str | None:
        """The user's line whose allocations since the start are still there and largest."""
        if self._line is None:
            held: Counter[str] = Counter()
            snapshot = self._memory._snapshot()
            for segment in snapshot.get("segments", ()):
                if segment.get("device", 0) == self._index:
                    for block in segment.get("blocks", ()):
                        if block.get("state") == "active_allocated" and block.get("frames"):
                            held[_user_line(block["frames"])] += block.get("requested_size", block.get("size", 0))
            held.pop("", None)
            self._line = held.most_common(1)[0][0] if held else None
        return self._line

    def stop(self) -> None:
        """Switch it off."""
        self._memory._record_memory_history(None)


def _user_line(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        if is_user_file(frame.get("filename", "<>")):
            return spell(frame["filename"], frame.get("line", 0))
    return ""
