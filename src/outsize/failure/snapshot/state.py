"""What a snapshot says of one device: held, unused, cut to pieces, private, and by which line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.core.memory import Part
from outsize.core.noun import Known, Noun
from outsize.failure.snapshot.load import frames_of

_LIBRARY = ("/torch/", "site-packages", "dist-packages", "<frozen", "/lib/python")
UNRECORDED = "no stack recorded (torch.cuda.memory._record_memory_history() before the run records them)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryEntry(Noun):
    """The request that failed, as the trace has it."""

    requested: int
    """Bytes, rounded by the allocator."""
    free: int | None
    """Bytes the driver said were free."""
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState(Noun):
    """One device of a snapshot."""

    device: int
    segments: int
    """Pieces of memory got from the driver."""
    reserved: int
    allocated: int
    unused: int
    """Bytes of free blocks in the common pools."""
    largest_unused: int
    unused_blocks: int
    """How many there are."""
    private: int
    """Bytes of segments in the private pools of CUDA graphs."""
    expandable: bool
    """True where its segments are expandable."""
    holders: tuple[Part, ...]
    """Bytes in use by allocation line, largest first."""
    failed: OutOfMemoryEntry | None
    """The last request that failed, None if none did."""


def read_state(snapshot: Mapping[str, Any], device: int | None = None) -> DeviceState:
    """The state of a device; by default the one that ran out, else the one that holds most."""
    if device is None:
        device = _choose_device(snapshot)
    segments = [segment for segment in snapshot["segments"] if device_of(segment) == device]
    common = [segment for segment in segments if not is_private(segment)]
    unused = [block["size"] for segment in common for block in segment["blocks"] if block["state"] == "inactive"]
    reserved = sum(segment["total_size"] for segment in segments)
    return DeviceState(
        device=device,
        segments=len(segments),
        reserved=reserved,
        allocated=sum(_in_use(segment) for segment in segments),
        unused=sum(unused),
        largest_unused=max(unused, default=0),
        unused_blocks=len(unused),
        private=sum(segment["total_size"] for segment in segments if is_private(segment)),
        expandable=any(segment.get("is_expandable") for segment in segments),
        holders=_holders(segments),
        failed=_failed(snapshot, device),
    )


def hold_by_line(snapshot: Mapping[str, Any], device: int) -> Counter[str]:
    """Bytes in use by allocation line."""
    return _count_lines([segment for segment in snapshot["segments"] if device_of(segment) == device])[0]


def _count_lines(segments: list[Mapping[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Bytes in use, and number of blocks, by allocation line."""
    sizes: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                line = line_of(block)
                sizes[line] += block["size"]
                blocks[line] += 1
    return sizes, blocks


def line_of(item: Mapping[str, Any]) -> str:
    """The innermost line of the user's own code, as `train.py:12 in step`."""
    frames = frames_of(item)
    if not frames:
        return UNRECORDED
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith((".py", ">"))]
    own = next(
        (frame for frame in python if not any(part in str(frame["filename"]) for part in _LIBRARY)),
        (python or frames)[0],
    )
    return f"{own.get('filename', '??')}:{own.get('line', 0)} in {own.get('name', '??')}"


def _holders(segments: list[Mapping[str, Any]], most: int = 8) -> tuple[Part, ...]:
    sizes, blocks = _count_lines(segments)
    return tuple(
        Part(name=f"{blocks[line]} block{'s' * (blocks[line] > 1)} from {line}", bytes=size, known=Known.EXACT)
        for line, size in sizes.most_common(most)
    )


def _failed(snapshot: Mapping[str, Any], device: int) -> OutOfMemoryEntry | None:
    traces = snapshot.get("device_traces", [])
    entries = traces[device] if device < len(traces) else []
    for entry in reversed(entries):
        if entry["action"] == "oom":
            free = entry.get("device_free", entry.get("addr"))
            return OutOfMemoryEntry(
                requested=entry["size"], free=free if isinstance(free, int) else None, line=line_of(entry)
            )
    return None


def _choose_device(snapshot: Mapping[str, Any]) -> int:
    for device, entries in enumerate(snapshot.get("device_traces", [])):
        if any(entry["action"] == "oom" for entry in entries[-10_000:]):
            return device
    held: Counter[int] = Counter()
    for segment in snapshot["segments"]:
        held[device_of(segment)] += segment["total_size"]
    return held.most_common(1)[0][0] if held else 0


def device_of(segment: Mapping[str, Any]) -> int:
    """The device that a segment is on."""
    device = segment.get("device", 0)
    return device if isinstance(device, int) else 0


def is_private(segment: Mapping[str, Any]) -> bool:
    """True for a segment in the private pool of a CUDA graph."""
    pool = segment.get("segment_pool_id", (0, 0))
    return isinstance(pool, tuple | list) and any(pool)


def _in_use(segment: Mapping[str, Any]) -> int:
    return sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
