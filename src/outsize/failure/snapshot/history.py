"""A snapshot's trace -> `AllocatorHistory`: bytes in use by line of code over time and at the peak, and the map at the end.

One pass finds who asked for what, when the peak was and which lines held most then. A second pass sums those lines up and
keeps, of every stretch of events, the highest and the lowest moment. Blocks that were alive before the history begins are a
layer of their own. Everything in a snapshot comes from a file, so any field may be missing or of a wrong type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outsize.core.outcomes.allocator_history import AllocatorHistory, HeldBlock, HeldSegment, LineAtPeak, LineLayer
from outsize.failure.snapshot.load import LONGEST_STACK, frames_of
from outsize.failure.snapshot.state import device_of, is_private, line_of

LAYERS = 8
"""Lines that have a layer of their own."""
MOMENTS = 8000
"""Most moments that are kept."""
SEGMENTS, PIECES = 48, 160
"""Most segments of the map, and about how many pieces each is drawn in."""
BEFORE, OTHERS = "alive before the history begins", "other lines"
_HELD = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_LONGEST_STACK = 12


class _Change(NamedTuple):
    """One event that changes what is in use or reserved."""

    time: float
    line: int
    """Number of the line; -1 for what was alive before the history."""
    bytes: int
    reserved: int
    blocks: int


class _Lines:
    """Numbers for lines of code, and the first stack of each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.stacks: list[str] = []
        self._numbers: dict[str, int] = {}
        self._seen: dict[tuple[int, ...], tuple[int, Any]] = {}
        """Which frames -> number of their line, and the frames, so that none of their identities is used again."""

    def number(self, entry: Mapping[str, Any]) -> int:
        frames = entry.get("frames")
        key = tuple(map(id, frames[:LONGEST_STACK])) if isinstance(frames, list | tuple) else ()
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = (self._add(entry, frames_of(entry)), frames)
        return known[0]

    def _add(self, entry: Mapping[str, Any], frames: Sequence[Mapping[str, Any]]) -> int:
        name = line_of(entry)[:300]
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
            python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")] or frames
            shown = [_spell(frame) for frame in python]
            self.stacks.append("\n".join(shown[:_LONGEST_STACK]))
        return number


def _spell(frame: Mapping[str, Any]) -> str:
    return f"{str(frame.get('filename', '??'))[-80:]}:{frame.get('line', 0)} in {str(frame.get('name', '??'))[:80]}"


def read_history(snapshot: Mapping[str, Any], device: int) -> AllocatorHistory:
    """The history of one device of a checked snapshot."""
    traces = snapshot.get("device_traces", [])
    entries = traces[device] if device < len(traces) else []
    segments = [segment for segment in snapshot["segments"] if device_of(segment) == device]
    clock = bool(entries) and all(_is_number(entry.get("time_us")) for entry in (entries[0], entries[-1]))
    lines = _Lines()
    changes, before, began = _follow(entries, segments, lines, clock)
    peak, peak_time, sums, counts = _find_peak(changes, before)
    top = [number for number, _ in sums.most_common() if number >= 0][:LAYERS]
    chosen = _keep(changes, before, began, top)
    rows = sums.most_common(40)
    shown = [
        LineAtPeak(line=BEFORE if number < 0 else lines.names[number], bytes=size, blocks=counts[number])
        for number, size in rows
        if size > 0
    ]
    kept = sorted(segments, key=lambda segment: -segment["total_size"])
    return AllocatorHistory(
        device=f"cuda:{device}", events=len(entries), unit="s" if clock else "event",
        times=tuple(moment.time for moment in chosen), layers=_layers(chosen, top, lines),
        reserved_over_time=tuple(moment.reserved for moment in chosen), lines=("", *lines.names),
        line_at=tuple(moment.line + 1 for moment in chosen), peak_bytes=peak, peak_time=peak_time, at_peak=tuple(shown),
        reserved=sum(segment["total_size"] for segment in segments),
        segments=tuple(_map(segment) for segment in kept[:SEGMENTS]), segments_left_out=len(kept[SEGMENTS:]),
        bytes_left_out=sum(segment["total_size"] for segment in kept[SEGMENTS:]),
    )  # fmt: skip


def _follow(
    entries: Sequence[Mapping[str, Any]], segments: list[Mapping[str, Any]], lines: _Lines, clock: bool
) -> tuple[list[_Change], tuple[int, int], int]:
    """The changes; (bytes, blocks) in use and bytes reserved before the first of them."""
    changes: list[_Change] = []
    alive: dict[int, tuple[int, int]] = {}
    older = [0, 0]
    first = float(entries[0]["time_us"]) if clock else 0.0
    time, reserved = 0.0, 0
    for number, entry in enumerate(entries):
        action, size, address = entry["action"], entry["size"], entry.get("addr")
        if not isinstance(address, int):
            continue
        stamp: Any = entry.get("time_us") if clock else number
        if _is_number(stamp):
            time = max(time, (float(stamp) - first) / 1e6 if clock else float(stamp))
        if action == "alloc":
            line = lines.number(entry)
            alive[address] = (line, size)
            changes.append(_Change(time, line, size, 0, 1))
        elif action == "free_completed":
            line, size = alive.pop(address, (-1, size))
            if line < 0:
                older[0] += size
                older[1] += 1
            changes.append(_Change(time, line, -size, 0, -1))
        elif action in _HELD:
            reserved += _HELD[action] * size
            changes.append(_Change(time, -1, 0, _HELD[action] * size, 0))
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block.get("address") not in alive:
                older[0] += block["size"]
                older[1] += 1
    began = max(0, sum(segment["total_size"] for segment in segments) - reserved)
    return changes, (older[0], older[1]), began


def _find_peak(changes: list[_Change], before: tuple[int, int]) -> tuple[int, float, Counter[int], Counter[int]]:
    """(bytes at the highest moment, when, bytes by line, blocks by line)."""
    total = best = before[0]
    place = -1
    for number, change in enumerate(changes):
        total += change.bytes
        if total > best:
            best, place = total, number
    sums, counts = Counter({-1: before[0]}), Counter({-1: before[1]})
    for change in changes[: place + 1]:
        if change.blocks:
            sums[change.line] += change.bytes
            counts[change.line] += change.blocks
    return best, changes[place].time if place >= 0 else 0.0, sums, counts


class _Moment(NamedTuple):
    """What is in use after an event."""

    time: float
    line: int
    bytes: tuple[int, ...]
    """By layer: what was alive before, the top lines, the others."""
    reserved: int


def _keep(changes: list[_Change], before: tuple[int, int], began: int, top: list[int]) -> list[_Moment]:
    """The highest and the lowest moment of each stretch, in order; all of them where there are few."""
    layer = {-1: 0} | {line: place for place, line in enumerate(top, start=1)}
    now = [before[0], *[0] * len(top), 0]
    total, reserved, others = before[0], began, len(now) - 1
    width = max(1, -(-len(changes) // (MOMENTS // 2)))
    chosen: list[_Moment] = []
    high = low = None
    most, least = -1, 0
    for number, change in enumerate(changes):
        now[layer.get(change.line, others)] += change.bytes
        total += change.bytes
        reserved += change.reserved
        if high is None or total > most:
            most, high = total, (number, _Moment(change.time, change.line, tuple(now), reserved))
        if low is None or total < least:
            least, low = total, (number, _Moment(change.time, change.line, tuple(now), reserved))
        if number % width == width - 1 or number == len(changes) - 1:
            chosen += [moment for _, moment in sorted({high[0]: high, low[0]: low}.values())]
            high = low = None
    return chosen


def _layers(chosen: list[_Moment], top: list[int], lines: _Lines) -> tuple[LineLayer, ...]:
    named = [(BEFORE, ""), *((lines.names[line], lines.stacks[line]) for line in top), (OTHERS, "")]
    columns = zip(*(moment.bytes for moment in chosen), strict=True) if chosen else [()] * len(named)
    made = (
        LineLayer(name=name, stack=stack, bytes=tuple(column))
        for (name, stack), column in zip(named, columns, strict=True)
    )
    return tuple(one for one in made if any(one.bytes))


def _map(segment: Mapping[str, Any]) -> HeldSegment:
    """A segment with its small neighbours joined, so that it is drawn in about `PIECES` pieces."""
    least = segment["total_size"] // PIECES
    pieces: list[HeldBlock] = []
    run: list[tuple[int, Mapping[str, Any]]] = []
    place = 0
    for block in segment["blocks"]:
        size, free = block["size"], block["state"] == "inactive"
        if size >= least:
            pieces += [
                *_join(run),
                HeldBlock(
                    offset=place,
                    bytes=size,
                    used=0 if free else size,
                    blocks=not free,
                    line="" if free else line_of(block),
                ),
            ]
            run = []
        else:
            run.append((place, block))
            if place + size - run[0][0] >= least:
                pieces += _join(run)
                run = []
        place += size
    stream = segment["stream"]
    kind = "private" if is_private(segment) else str(segment.get("segment_type", ""))
    name = kind + (f", stream {stream}" if stream else "") + (", expandable" if segment.get("is_expandable") else "")
    return HeldSegment(pool=name, bytes=segment["total_size"], blocks=(*pieces, *_join(run)))


def _join(run: list[tuple[int, Mapping[str, Any]]]) -> list[HeldBlock]:
    """Blocks side by side as one piece."""
    if not run:
        return []
    used = [block for _, block in run if block["state"] != "inactive"]
    line = line_of(max(used, key=lambda block: block["size"])) if used else ""
    size = sum(block["size"] for _, block in run)
    return [
        HeldBlock(offset=run[0][0], bytes=size, used=sum(block["size"] for block in used), blocks=len(used), line=line)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63
