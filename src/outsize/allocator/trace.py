"""torch's own record of its CUDA allocator in, allocation events out.

`torch.cuda.memory._record_memory_history()` followed by `_snapshot()` gives plain dictionaries: `device_traces`, one list of
entries a device, and `segments`, what is held now. An `alloc` entry carries the bytes asked for, so a trace can be replayed
under the same or other settings. `segment_alloc` entries say where the driver put each segment, which decides ties between
equal blocks as the real run did. The history is a ring and may not reach back to the start. Blocks that were alive
before it begins are put in front, in order of address; their true order is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.core.allocation import EMPTY_CACHE, AllocationEvent
from outsize.core.errors import InputError
from outsize.core.noun import Noun

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording(Noun):
    """What a trace says, ready for `replay(recording.events, addresses=recording.addresses)`."""

    events: tuple[AllocationEvent, ...]
    """Allocations and frees in order; times are those of the trace, or running numbers."""
    addresses: tuple[tuple[int, int], ...]
    """(address, bytes) of the segments, in the order in which the driver gave them."""
    alive_before: int
    """How many of the first events stand for blocks that were alive before the history begins; 0 if it is complete."""


class _Reader:
    """Turns entries into events, remembering which block is at which address."""

    def __init__(self, keep_releases: bool) -> None:
        self.keep_releases = keep_releases
        self.events: list[AllocationEvent] = []
        self.before: dict[int, AllocationEvent] = {}
        self.addresses: list[tuple[int, int]] = []
        self.at: dict[int, int] = {}
        self.count = 0
        self.released = False

    def alloc(self, time: float, entry: Entry) -> None:
        self.at[entry["addr"]] = self.count
        self.events.append(AllocationEvent(time, True, self.count, entry["size"], entry["stream"]))
        self.count += 1

    def free(self, time: float, entry: Entry, waits: bool) -> None:
        address = entry["addr"]
        id = self.at.get(address)
        if id is None:
            id = self.alive(entry)
        if not waits:
            del self.at[address]
        self.events.append(AllocationEvent(time, False, id, 0, entry["stream"], waits))

    def alive(self, entry: Entry) -> int:
        """Put a block whose allocation is not in the history before all events."""
        id = self.at[entry["addr"]] = self.count
        self.before[entry["addr"]] = AllocationEvent(0, True, id, entry["size"], entry["stream"])
        self.count += 1
        return id

    def release(self, time: float) -> None:
        """One `empty_cache` for a run of segments given back."""
        if not self.released:
            self.events.append(AllocationEvent(time, False, EMPTY_CACHE, 0))
        self.released = True

    def read(self, entries: Sequence[Entry]) -> None:
        for number, entry in enumerate(entries):
            action = entry["action"]
            time = entry.get("time_us", number)
            if action in {"segment_free", "segment_unmap"}:
                if self.keep_releases:
                    self.release(time)
                continue
            if action == "oom":
                self.release(time)
                continue
            self.released = False
            if action == "alloc":
                self.alloc(time, entry)
            elif action == "free_requested":
                following = entries[number + 1] if number + 1 < len(entries) else None
                done = following is not None and following["action"] == "free_completed"
                if following is None or not done or following["addr"] != entry["addr"]:
                    self.free(time, entry, waits=True)
            elif action == "free_completed":
                self.free(time, entry, waits=False)
            elif action == "segment_alloc":
                self.addresses.append((entry["addr"], entry["size"]))


def read_trace(
    entries: Iterable[Entry], segments: Iterable[Mapping[str, Any]] = (), *, keep_releases: bool = True
) -> Recording:
    """Entries of one device's trace, and the snapshot's segments where there are any, as a `Recording`.

    `keep_releases=False` leaves out the moments at which cached segments were given back. That is right if the replay
    has the limit that caused them. It is wrong if the program called `empty_cache()`.
    """
    reader = _Reader(keep_releases)
    reader.read(list(entries))
    older: list[tuple[int, int]] = []
    seen = set(reader.addresses)
    for segment in segments:
        place = (segment["address"], segment["total_size"])
        if place not in seen and not segment.get("is_expandable", False):
            older.append(place)
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] not in reader.at:
                size = block.get("requested_size", block["size"])
                reader.alive({"addr": block["address"], "size": size, "stream": segment["stream"]})
    before = tuple(reader.before[address] for address in sorted(reader.before))
    return Recording(
        events=before + tuple(reader.events),
        addresses=(*sorted(older), *reader.addresses),
        alive_before=len(before),
    )


def read_snapshot(snapshot: Mapping[str, Any], device: int = 0, *, keep_releases: bool = True) -> Recording:
    """A whole snapshot, as `torch.cuda.memory._snapshot()` returns it or its pickle holds it."""
    traces = snapshot.get("device_traces", [])
    if device >= len(traces):
        raise InputError(f"the snapshot has traces of {len(traces)} devices, so none of device {device}")
    segments = [segment for segment in snapshot.get("segments", []) if segment.get("device", 0) == device]
    return read_trace(traces[device], segments, keep_releases=keep_releases)
