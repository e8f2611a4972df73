"""Allocation events in, what an allocator makes of them out.

One loop serves all models: a model hands blocks out (`malloc`), takes them back (`free`), keeps those another stream still
uses (`wait`), gives its cache back (`release`) and counts its bytes. The loop numbers the events, keeps the peaks and
stops where memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from outsize.allocator.cuda import CudaCache
from outsize.allocator.driver import Driver
from outsize.allocator.exact import Exact
from outsize.allocator.expandable import ExpandableCache
from outsize.allocator.settings import CudaSettings
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent, OutOfMemoryPoint, Replay, Sample, Segment
from outsize.core.errors import InputError
from outsize.core.noun import Known


class Model(Protocol):
    """What the loop asks of an allocator."""

    driver: Driver
    requested: int
    allocated: int
    active: int
    reserved: int
    reserved_peak: int
    retries: int
    guessed: bool

    @property
    def live(self) -> Mapping[int, Any]: ...
    @property
    def waiting(self) -> Mapping[int, Any]: ...
    def malloc(self, id: int, requested: int, stream: int) -> bool: ...
    def free(self, id: int) -> None: ...
    def wait(self, id: int) -> None: ...
    def release(self) -> None: ...
    def segments(self) -> Iterator[Segment]: ...


def _cuda(driver: Driver, settings: Any) -> Model:
    chosen = settings or CudaSettings()
    if chosen.backend != "native":
        raise InputError(
            f"backend:{chosen.backend} leaves allocation to the driver's own pool, whose rules are not published; "
            "replay with backend:native, or with the allocator 'exact' for the floor"
        )
    if not chosen.caching:
        return Exact(driver, 512)
    limit = chosen.limit
    if limit is None and chosen.memory_fraction is not None:
        if driver.capacity is None:
            raise InputError(f"a memory fraction of {chosen.memory_fraction} needs the device's capacity in bytes")
        limit = int(chosen.memory_fraction * driver.capacity)
    return (ExpandableCache if chosen.expandable_segments else CudaCache)(driver, chosen, limit)


def _expandable(driver: Driver, settings: Any) -> Model:
    from dataclasses import replace

    return _cuda(driver, replace(settings or CudaSettings(), expandable_segments=True))


MODELS: dict[str, tuple[Callable[[Driver, Any], Model], Known]] = {
    "cuda": (_cuda, Known.EXACT),
    "cuda-expandable": (_expandable, Known.EXACT),
    "exact": (lambda driver, settings: Exact(driver), Known.EXACT),
}
"""Name -> maker of the model, how its numbers are known at best."""


def replay(
    events: Iterable[AllocationEvent],
    allocator: str = "cuda",
    *,
    capacity: int | None = None,
    settings: Any = None,
    samples: bool = False,
    addresses: Iterable[tuple[int, int]] = (),
) -> Replay:
    """Run `events` through a model of an allocator.

    `capacity` is what the device has for this process, in bytes (None: no end); `settings` belong to the allocator;
    `samples` keeps the state after every event; `addresses` are (address, bytes) of the segments a recording saw, which
    decide ties as the real run did.
    """
    if allocator not in MODELS:
        raise InputError(f"unknown allocator {allocator!r}: one of {', '.join(MODELS)}")
    make, known = MODELS[allocator]
    model = make(Driver(capacity, addresses), settings)
    taken: list[Sample] | None = [] if samples else None
    count, peak, peak_event, failed = _run(model, events, taken)
    return Replay(
        allocator=_name(allocator, settings),
        events=count,
        peak=peak,
        peak_event=peak_event,
        samples=tuple(taken or ()),
        segments=tuple(model.segments()),
        retries=model.retries,
        out_of_memory=failed,
        known=Known.ESTIMATE if model.guessed else known,
    )


def _run(
    model: Model, events: Iterable[AllocationEvent], samples: list[Sample] | None
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


def _out_of_memory(model: Model, number: int, size: int) -> OutOfMemoryPoint:
    capacity = model.driver.capacity
    return OutOfMemoryPoint(
        event=number,
        requested=size,
        free=None if capacity is None else capacity - model.driver.held,
        reserved_unallocated=model.reserved - model.allocated,
    )


def _name(allocator: str, settings: Any) -> str:
    changed = settings.changed() if settings is not None else ""
    return f"{allocator} ({changed})" if changed else allocator
