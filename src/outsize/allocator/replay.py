"""Allocation events in, what an allocator makes of them out.

One loop serves all models: a model hands blocks out (`malloc`), takes them back (`free`), keeps those another stream still
uses (`wait`), gives its cache back (`release`) and counts its bytes. The loop numbers the events, keeps the peaks and
stops where memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

    `capacity` is what the device has for this process, in bytes (None: no end); `settings` belong to the allocator;
    `samples` keeps the state after every event; `addresses` are (address, bytes) of the segments a recording saw, which
    decide ties as the real run did.
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


def _run(
    model: Model[Any], events: Iterable[AllocationEvent], samples: list[Sample] | None
) -> tuple[int, Sample, int, OutOfMemoryPoint | None]:
    """The loop: count of events, peaks, where reserved peaked, where it failed."""
    malloc, free, live, waiting = model.malloc, model.free, model.live, model.waiting
    requested = allocated = active = reserved = peak_event = number = 0
    failed: OutOfMemoryPoint | None = None
    for number, (_, alloc, id, size, stream, waits) in enumerate(events, 1):
        if alloc:
            if id in live or size < 0:
                raise InputError(_bad_alloc(number - 1, id, size))
            if not malloc(id, size, stream):
                failed = _out_of_memory(model, number - 1, size)
            if model.allocated > allocated:
                allocated = model.allocated
            if model.active > active:
                active = model.active
            if model.requested > requested:
                requested = model.requested
            if model.reserved_peak > reserved:
                reserved, peak_event = model.reserved_peak, number - 1
        elif id in live or id in waiting:
            if waits:
                model.wait(id)
            else:
                free(id)
        elif id == EMPTY_CACHE:
            model.release()
        else:
            raise InputError(f"event {number - 1} frees {id}, which is not allocated then")
        if samples is not None:
            samples.append(Sample(model.requested, model.allocated, model.active, model.reserved))
        if failed is not None:
            break
    return number, Sample(requested, allocated, active, reserved), peak_event, failed


def _bad_alloc(number: int, id: int, size: int) -> str:
    if size < 0:
        return f"event {number} allocates {size} bytes: a size cannot be negative"
    return f"event {number} allocates {id}, which is still allocated then"


def _out_of_memory(model: Model[Any], number: int, size: int) -> OutOfMemoryPoint:
    capacity = model.driver.capacity
    return OutOfMemoryPoint(
        event=number,
        requested=size,
        free=None if capacity is None else capacity - model.driver.held,
        reserved_unallocated=model.reserved - model.allocated,
    )
