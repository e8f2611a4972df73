"""A device as a plan sees it: which one, and how many bytes of it may be held."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outsize.array.device.base import Device
from outsize.array.passes.base import Room


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
