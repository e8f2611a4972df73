"""Allocation events in, the memory that an allocator takes for them out.

One loop serves all models. A model hands blocks out (`malloc`), takes them back (`free`), keeps those that another
stream still uses (`wait`), gives its cache back (`release`), and counts its bytes. The loop numbers the events, keeps
the peaks, and stops when memory runs out. `replay_steps` runs a step several times through the same loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from outsize.allocator.bfc import Bfc, BfcSettings
from outsize.allocator.cuda import CudaCache
from outsize.allocator.driver import CudaDriver, Driver
from outsize.allocator.exact import Exact
from outsize.allocator.expandable import ExpandableCache
from outsize.allocator.glibc import Glibc, GlibcSettings
from outsize.allocator.model import Model
from outsize.allocator.pinned import Pinned
from outsize.allocator.settings import CudaSettings
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent, OutOfMemoryPoint, Replay, Sample
from outsize.core.errors import InputError
from outsize.core.noun import Known

Settings = CudaSettings | BfcSettings | GlibcSettings
Addresses = Iterable[tuple[int, int]]


def _cuda(capacity: int | None, settings: CudaSettings, addresses: Addresses) -> Model[Any]:
    if settings.backend != "native":
        raise InputError(
            f"backend:{settings.backend} leaves allocation to the driver's own pool, whose rules are not published; "
            "replay with backend:native, or with the allocator 'exact' for the floor"
        )
    if not settings.caching:
        return Exact(Driver(capacity), 512)
    limit = settings.limit
    if limit is None and settings.memory_fraction is not None:
        if capacity is None:
            raise InputError(f"a memory fraction of {settings.memory_fraction} needs the device's capacity in bytes")
        limit = int(settings.memory_fraction * capacity)
    kind = ExpandableCache if settings.expandable_segments else CudaCache
    return kind(CudaDriver(capacity, addresses), settings, limit)


def _expandable(capacity: int | None, settings: CudaSettings, addresses: Addresses) -> Model[Any]:
    return _cuda(capacity, replace(settings, expandable_segments=True), addresses)


class _Kind(NamedTuple):
    """One row of the table of models."""

    make: Callable[[int | None, Any, Addresses], Model[Any]]
    settings: type[Any]
    known: Known


MODELS: dict[str, _Kind] = {
    "cuda": _Kind(_cuda, CudaSettings, Known.EXACT),
    "cuda-expandable": _Kind(_expandable, CudaSettings, Known.EXACT),
    "bfc": _Kind(lambda capacity, settings, _: Bfc(Driver(capacity), settings), BfcSettings, Known.ESTIMATE),
    "pinned": _Kind(lambda capacity, settings, _: Pinned(Driver(capacity), settings), CudaSettings, Known.EXACT),
    "glibc": _Kind(lambda capacity, settings, _: Glibc(Driver(capacity), settings), GlibcSettings, Known.ESTIMATE),
    "exact": _Kind(lambda capacity, settings, _: Exact(Driver(capacity)), CudaSettings, Known.EXACT),
}
"""Name -> maker of the model, the settings it takes, how its numbers are known at best."""


def replay(
    events: Iterable[AllocationEvent],
    allocator: str = "cuda",
    *,
    capacity: int | None = None,
    settings: Settings | None = None,
    samples: bool = False,
    addresses: Addresses = (),
) -> Replay:
    """Run `events` through a model of an allocator.

    `capacity` is what the device has for this process, in bytes (None: unlimited). `settings` belong to the allocator.
    `samples` keeps the state after every event. `addresses` are (address, bytes) of the segments in a recording; they
    decide ties as in the real run.
    """
    if allocator not in MODELS:
        raise InputError(f"unknown allocator {allocator!r}: one of {', '.join(MODELS)}")
    kind = MODELS[allocator]
    chosen = kind.settings() if settings is None else settings
    if not isinstance(chosen, kind.settings):
        raise InputError(f"the allocator {allocator!r} takes {kind.settings.__name__}, not {type(chosen).__name__}")
    model = kind.make(capacity, chosen, addresses)
    taken: list[Sample] | None = [] if samples else None
    count, peak, peak_event, failed = _run(model, events, taken)
    return Replay(
        allocator=f"{allocator} ({chosen.changed()})" if chosen.changed() else allocator,
        events=count,
        peak=peak,
        peak_event=peak_event,
        samples=tuple(taken or ()),
        segments=tuple(model.segments()),
        retries=model.retries,
        out_of_memory=failed,
        known=Known.ESTIMATE if model.guessed else kind.known,
    )


class PhaseEvent(NamedTuple):
    """One allocation or free, and the phase of the step it belongs to."""

    alloc: bool
    id: int
    bytes: int
    phase: str


class StepsReplay(NamedTuple):
    """The memory that an allocator takes for repeated steps."""

    peaks: dict[str, int]
    """Most bytes that were handed out, by phase."""
    reserved: int
    """Most bytes that it had reserved."""
    retries: int
    """How often it cleared its cache in the last step."""
    failed: bool
    """Memory ran out."""


STEPS = 3
"""Steps that are replayed: the first makes optimizer state, the second runs beside it, the third shows whether memory
still grows."""


def replay_steps(
    first: Iterable[PhaseEvent], later: Sequence[PhaseEvent], allocator: str = "cuda", settings: Settings | None = None
) -> StepsReplay:  # fmt: skip
    """Run the events of a first step and those of every later one through a model of an allocator.

    A later step frees what it allocates, and free neighbours join. If it neither gets memory from the driver nor gives
    any back, it ends in the state in which it began. The next step would do the same, so it is not replayed.
    """
    kind = MODELS[allocator]
    model = kind.make(None, kind.settings() if settings is None else settings, ())
    peaks: dict[str, int] = {}
    failed = not _run_phases(model, first, peaks)
    retries = 0
    for _ in range(1, STEPS):
        calls, before = model.driver.calls, model.retries
        failed = failed or not _run_phases(model, later, peaks)
        retries = model.retries - before
        if failed or model.driver.calls == calls:
            break
    return StepsReplay(peaks, model.reserved_peak, retries, failed)


def _run_phases(model: Model[Any], events: Iterable[PhaseEvent], peaks: dict[str, int]) -> bool:
    """Run events and write down the peak of each phase; False where memory ran out."""
    for phase, own in itertools.groupby(events, lambda event: event.phase):
        plain = (AllocationEvent(0, alloc, id, size) for alloc, id, size, _ in own)
        _, peak, _, failed = _run(model, plain, None)
        if failed is not None:
            return False
        peaks[phase] = max(peaks.get(phase, 0), peak.allocated)
    return True


def _run(
    model: Model[Any], events: Iterable[AllocationEvent], samples: list[Sample] | None
) -> tuple[int, Sample, int, OutOfMemoryPoint | None]:
    """The loop: counts events, keeps the peaks, and notes where reserved peaked and where memory ran out."""
    malloc, free, live, waiting = model.malloc, model.free, model.live, model.waiting
    requested = allocated = active = reserved = peak_event = number = 0
    failed: OutOfMemoryPoint | None = None
    for number, (_, alloc, id, size, stream, waits) in enumerate(events, 1):
        if alloc:
            if size < 0:
                raise InputError(f"event {number - 1} allocates {size} bytes: a size cannot be negative")
            if id in live:
                raise InputError(f"event {number - 1} allocates {id}, which is still allocated then")
            if not malloc(id, size, stream):
                failed = _out_of_memory(model, number - 1, size)
        elif id in live or id in waiting:
            if waits:
                model.wait(id)
            else:
                free(id)
        elif id == EMPTY_CACHE:
            model.release()
        else:
            raise InputError(f"event {number - 1} frees {id}, which is not allocated then")
        if alloc or number == 1:  # a free raises no peak, but the first event may continue what earlier events began
            if model.allocated > allocated:
                allocated = model.allocated
            if model.active > active:
                active = model.active
            if model.requested > requested:
                requested = model.requested
            if model.reserved_peak > reserved:
                reserved, peak_event = model.reserved_peak, number - 1
        if samples is not None:
            samples.append(Sample(model.requested, model.allocated, model.active, model.reserved))
        if failed is not None:
            break
    return number, Sample(requested, allocated, active, reserved), peak_event, failed


def _out_of_memory(model: Model[Any], number: int, size: int) -> OutOfMemoryPoint:
    capacity = model.driver.capacity
    return OutOfMemoryPoint(
        event=number,
        requested=size,
        free=None if capacity is None else capacity - model.driver.held,
        reserved_unallocated=model.reserved - model.allocated,
    )
