"""Runs an itinerary: each pass inside one pool, with events, a journal, and scratch that is removed after its last
reader.

In: an `Itinerary` and its plan, already inside the budget. Out: the final sink, complete but not committed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from outsize.array.graph.node import Node, Source, structure, walk
from outsize.array.kernels.blas import blas_threads
from outsize.array.passes.base import Pass
from outsize.array.plan.prepare import Prepared
from outsize.array.plan.residency import Kept, Scratch
from outsize.array.plan.schedule import Itinerary, Stop
from outsize.array.run.journal import Journal
from outsize.array.store.base import Region
from outsize.core.events import Advanced, Finished, Listener, Started
from outsize.core.plan import Plan
from outsize.engine.heap import lean_heap, trim_heap
from outsize.engine.pool import MemoryPool
from outsize.engine.threads import run_work

_PREFIX = "outsize-scratch-"
ARRAY_PREFIX = "outsize-array-"
"""How files of arrays in scratch begin; then comes the process that made them."""


def run_schedule(prepared: Prepared, listener: Listener | None = None, journal: Journal | None = None) -> None:
    """Run every pass; what the journal says is finished is left out."""
    trip, plan = prepared.schedule, prepared.plan
    pool = MemoryPool(max(prepared.budget.host or 0, plan.peak()))
    with (
        _scratch_folder(trip, prepared.budget.scratch) as folder,
        np.errstate(all="ignore"),
        lean_heap(),
        _device(trip),
    ):
        try:
            for number, stop in enumerate(trip.stops):
                if number:
                    trim_heap()  # threads that have ended leave up to 1 MiB on their heaps
                _run_stop(trip, number, stop, plan, pool, folder, listener, journal)
                _drop_dead(trip, number, pool)
        except BaseException:
            if journal is not None and trip.final is not None:
                with contextlib.suppress(Exception):
                    journal.flush(trip.final.sync)
            raise
        finally:
            for stop in trip.stops:
                for _, place in stop.places:
                    if isinstance(place, Scratch) and hasattr(place, "file"):
                        place.end()


@contextlib.contextmanager
def _device(trip: Itinerary) -> Iterator[None]:
    """The device's memory, reserved once for all passes that use it."""
    size = max((stop.work.device_peak for stop in trip.stops), default=0)
    if trip.level is None or size == 0:
        yield
        return
    device = trip.level.device
    device.open(size, trip.level.tf32)
    try:
        yield
    except Exception as error:
        told = device.told(error)
        if told is None:
            raise
        raise told from error
    finally:
        device.close()


def _run_stop(
    trip: Itinerary, number: int, stop: Stop, plan: Plan, pool: MemoryPool, folder: str, listener: Listener | None,
    journal: Journal | None,
) -> None:  # fmt: skip
    for index, (node, place) in enumerate(stop.places):
        if isinstance(place, Kept):
            place.begin(pool.take(place.nbytes))
        else:
            place.begin(os.path.join(folder, f"{number}-{index}.raw"))
        sketched, made = trip.bindings[node], place.store()
        trip.bindings.update({twin: made for twin, store in trip.bindings.items() if store is sketched})
    if journal is not None and _restore(number, stop, journal):
        return
    step = plan.steps[number]
    report = _Report(listener, step.name, stop.work, step.read + step.written)
    done = journal.done.get(number, set()) if journal is not None and not stop.places else set()
    report.start(number, len(plan.steps), len(done) / max(1, len(stop.work.grid)))
    work = _Recorded(stop.work, journal if not stop.places else None, number, trip.final)
    stop.work.progress = report.moved
    beside = stop.work.shared_bytes + stop.work.packed
    pool.count(beside)
    try:
        stop.work.begin()
        with blas_threads(stop.work.threads):
            run_work(work, (tile for tile in enumerate(stop.work.tiles()) if tile[0] not in done), pool)
    finally:
        stop.work.end()
        pool.give(beside)
    report.finish()
    if (
        journal is not None
        and stop.places
        and all(isinstance(p, Kept) and p.nbytes <= trip.tuning.journaled_result for _, p in stop.places)
    ):
        for index, (_, place) in enumerate(stop.places):
            assert isinstance(place, Kept)
            journal.keep(f"{number}-{index}", place.array)
    elif journal is not None and trip.final is not None:
        journal.flush(trip.final.sync)


def _restore(number: int, stop: Stop, journal: Journal) -> bool:
    """Bring back what an earlier run put aside; True where the whole pass need not run."""
    names = [f"{number}-{index}" for index in range(len(stop.places))]
    if not names or not all(name in journal.kept for name in names):
        return False
    for name, (_, place) in zip(names, stop.places, strict=True):
        assert isinstance(place, Kept)
        np.copyto(place.array, journal.load(name))
    return True


def _drop_dead(trip: Itinerary, number: int, pool: MemoryPool) -> None:
    """Let go of what no later pass reads."""
    for stop in trip.stops[: number + 1]:
        if stop.last_use != number:
            continue
        for node, place in stop.places:
            if isinstance(place, Kept):
                pool.give(place.nbytes)
            else:
                place.end()
            gone = trip.bindings.get(node)
            for twin in [twin for twin, store in trip.bindings.items() if store is gone]:
                del trip.bindings[twin]


class _Recorded:
    """A pass whose tiles carry their numbers, and whose finished tiles go into the journal."""

    def __init__(self, work: Pass, journal: Journal | None, number: int, final: Any) -> None:
        self._work, self._journal, self._number, self._final = work, journal, number, final
        self.workers, self.slots, self.ordered, self.ahead = work.workers, work.slots, work.ordered, work.ahead
        self.locks = work.locks
        self.detach = work.detach
        self.worker_bytes, self.slot_bytes, self.outside_bytes = work.worker_bytes, work.slot_bytes, work.outside_bytes

    def chunks(self, tile: tuple[int, Region]) -> Iterator[Region]:
        return self._work.chunks(tile[1])

    def context(self, buffer: Any) -> Any:
        np.seterr(
            all="ignore"
        )  # a thread starts with NumPy's defaults: it would warn where the caller's call already did
        return self._work.context(buffer)

    def open(self, tile: tuple[int, Region], slot: Any) -> Any:
        return self._work.open(tile[1], slot)

    def load(self, tile: tuple[int, Region], chunk: Region, state: Any, context: Any) -> Any:
        return self._work.load(tile[1], chunk, state, context)

    def fold(self, tile: tuple[int, Region], chunk: Region, state: Any, payload: Any) -> None:
        self._work.fold(tile[1], chunk, state, payload)

    def pieces(self, tile: tuple[int, Region], state: Any) -> Iterable[Region]:
        return self._work.pieces(tile[1], state)

    def write(self, tile: tuple[int, Region], state: Any, piece: Region) -> None:
        self._work.write(tile[1], state, piece)

    def close(self, tile: tuple[int, Region], state: Any) -> None:
        self._work.close(tile[1], state)
        if self._journal is not None:
            self._journal.tile(self._number, tile[0], self._final.sync)


class _Report:
    """Turns what a pass reports into events whose bytes add up to what the plan said."""

    def __init__(self, listener: Listener | None, name: str, work: Pass, total: int) -> None:
        self._listener, self._name, self._total = listener, name, total
        self._volume = max(1, work.volume())
        self._lock = threading.Lock()
        self._began = time.perf_counter()

    def start(self, index: int, steps: int, share: float) -> None:
        if self._listener is not None:
            done = int(share * self._total)
            self._listener(Started(step=self._name, index=index, steps=steps, bytes=self._total, done=done))

    def moved(self, amount: int) -> None:
        if self._listener is not None:
            with self._lock:
                self._listener(Advanced(step=self._name, bytes=amount * self._total // self._volume))

    def finish(self) -> None:
        if self._listener is not None:
            self._listener(Finished(step=self._name, seconds=time.perf_counter() - self._began))


@contextlib.contextmanager
def _scratch_folder(trip: Itinerary, parent: str) -> Iterator[str]:
    """A folder for scratch files, if any pass leaves one; folders of dead processes are removed first."""
    if not any(isinstance(place, Scratch) for stop in trip.stops for _, place in stop.places):
        clean_scratch(parent)
        yield ""
        return
    os.makedirs(parent, exist_ok=True)
    clean_scratch(parent)
    import tempfile

    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_scratch(parent: str) -> None:
    """Remove scratch folders and files whose process is gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            prefix = next((known for known in (_PREFIX, ARRAY_PREFIX) if name.lstrip(".").startswith(known)), None)
            pid = name.lstrip(".")[len(prefix) :].split("-")[0] if prefix else ""
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                path = os.path.join(parent, name)
                shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)


def digest_of(root: Node, plan: Plan) -> str:
    """What tells this work from other work: graph, sources as they are now, tiles."""
    known: dict[int, str] = {}
    for node in walk(root):
        if isinstance(node, Source):
            known[id(node)] = node.store.fingerprint()
    parts = [structure(root, known), *(f"{s.name} {s.tile} {s.tiles}" for s in plan.steps)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
