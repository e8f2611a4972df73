"""From a ledger to a footprint: kinds, peaks, what is alive at the peaks, and memory over time.

In: a ledger and the label of a device. Out: two replays of what happened there (likely and bound), and the bytes alive
at the peak by kind, module and line.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from outsize.allocator import CudaSettings, replay
from outsize.core.allocation import Replay, Sample
from outsize.core.footprint import Phase
from outsize.core.noun import Known
from outsize.core.units import MiB
from outsize.model.estimation import moments
from outsize.model.tracing.records.ledger import Held, Ledger
from outsize.model.tracing.records.replay import Happened, as_events, happened_on, largest_size, likely_size

KINDS = (
    "weights", "buffers", "gradients", "optimizer state", "inputs", "KV cache", "activations", "temporaries", "workspace",
)  # fmt: skip
CACHES = "cache_utils.py:"
"""Where transformers makes its caches of keys and values: the beginning of a record's line."""

SOMEWHAT = (4 * MiB, 8 * MiB, 16 * MiB)
"""Bytes added to uncertain sizes for the bound: partial sums of convolutions vary by that much."""


class ReplayedSteps(NamedTuple):
    """What happened on one device."""

    events: Happened
    samples: tuple[Sample, ...]
    likely: Replay
    most: Replay

    @property
    def peak(self) -> int:
        """Number of the event at which allocated bytes were highest."""
        return max(range(len(self.samples)), key=lambda number: self.samples[number].allocated, default=-1)

    @property
    def alive(self) -> list[Held]:
        """What was there then."""
        return moments.alive_at(self.events, self.peak)


def follow(ledger: Ledger, label: str, allocator: str, settings: CudaSettings | None = None) -> ReplayedSteps:
    """Replay what the ledger saw on a device."""
    events = happened_on(ledger, label)
    name_kinds(ledger)

    def run(size: Callable[[Held], int], samples: bool = False) -> Replay:
        return replay(as_events(events, size), allocator=allocator, settings=settings, samples=samples)

    first = run(likely_size, samples=True)
    open_sizes = any(held.most != held.bytes for _, held in events)
    others = [run(largest_size)] if open_sizes else []
    if open_sizes and allocator.startswith("cuda"):
        others += [run(functools.partial(_somewhat_more, more)) for more in SOMEWHAT]
    return ReplayedSteps(events, first.samples, first, _highest([first, *others]))


def _somewhat_more(more: int, held: Held) -> int:
    """An uncertain size, a little larger. Blocks may then fit so badly that more is reserved than with the largest
    sizes."""
    return held.bytes + more if held.most != held.bytes and held.bytes >= MiB else held.bytes


def _highest(replays: list[Replay]) -> Replay:
    """The replay that reserved most, with the highest of every peak."""
    peaks = [played.peak for played in replays]
    best = max(replays, key=lambda played: played.peak.reserved)
    return dataclasses.replace(best, peak=Sample(*(max(values) for values in zip(*peaks, strict=True))))


def peak_within(replayed: ReplayedSteps, steps: int) -> int:
    """Most that was reserved in the first few steps."""
    last = max((i for i, (_, held) in enumerate(replayed.events) if held.step < steps), default=-1)
    return max((sample.reserved for sample in replayed.samples[: last + 1]), default=0)


def phases(
    replayed: ReplayedSteps, ledger: Ledger, label: str, marks: list[tuple[int, str]], names: tuple[str, ...]
) -> tuple[Phase, ...]:
    """The highest moments of each phase; `marks` say at which event of the ledger one begins."""
    numbers = [number for number, (_, held) in enumerate(ledger.events) if held.label == label and held.most]
    peaks: dict[str, tuple[int, int]] = {}
    for (begin, name), (end, _) in zip(marks, [*marks[1:], (len(ledger.events) + 1, "")], strict=True):
        first, last = bisect.bisect_left(numbers, begin), bisect.bisect_left(numbers, end)
        inside = replayed.samples[max(0, first - 1) : last]  # what was there when it began counts
        allocated = max((sample.allocated for sample in inside), default=0)
        reserved = max((sample.reserved for sample in inside), default=0)
        before = peaks.get(name, (0, 0))
        peaks[name] = max(before[0], allocated), max(before[1], reserved)
    return tuple(Phase(name=name, allocated=peaks[name][0], reserved=peaks[name][1]) for name in names if name in peaks)


def name_kinds(ledger: Ledger) -> None:
    """Give a kind to every record that has none yet."""
    backward = [i for i, (alloc, held) in enumerate(ledger.events) if alloc and held.phase == "backward"]
    for held in ledger.all:
        if held.kind:
            continue
        if held.line.startswith(CACHES):
            held.kind = "KV cache"
        elif held.step < 0:
            held.kind = "inputs"
        elif held.phase != "forward":
            held.kind = "temporaries"
        else:
            place = bisect.bisect_left(backward, held.born)
            begins = backward[place] if place < len(backward) else None
            saved = begins is not None and (held.died is None or held.died > begins)
            held.kind = "activations" if saved or not backward else "temporaries"


def unmeasured(alive: list[Held]) -> int:
    """Bytes of kernels' scratch that no measurement of that very call stands behind: only likely, with a bound."""
    return sum(held.bytes for held in alive if held.kind == "workspace" and held.most != held.bytes)


def known_of(kind: str) -> Known:
    """How well the bytes of a kind are known."""
    return Known.ESTIMATE if kind == "workspace" else Known.EXACT


def describe(held: Held) -> str:
    """When a record was made: `step 2 backward`."""
    return "build" if held.step < 0 else f"step {held.step + 1} {held.phase}"
