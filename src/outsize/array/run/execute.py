"""Runs a schedule: each pass inside one pool, with events, a journal, and scratch that is removed after its last
reader.

In: what `prepare` made, inside the budget, and its sink, created. Out: the sink, complete but not committed. A schedule
does not change: all that exists while it runs is the run's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.device.base import reserved
from outsize.array.graph.node import Node, Source, structure, walk
from outsize.array.kernels.blas import blas_threads
from outsize.array.passes.base import Job, Pass, Sized
from outsize.array.plan.layout import Place
from outsize.array.plan.prepare import Prepared
from outsize.array.plan.residency import Kept, Scratch
from outsize.array.plan.schedule import Schedule, ScheduledPass
from outsize.array.run.distribute import Distribution, shared_folder
from outsize.array.run.journal import Journal
from outsize.array.store.base import Sink, Store
from outsize.core.events import Advanced, Finished, Listener, Started
from outsize.core.plan import Plan
from outsize.engine.cluster import Cluster, current_cluster
from outsize.engine.heap import keeping_blocks, lean_heap, trim_heap
from outsize.engine.pool import MemoryPool
from outsize.engine.threads import run_work

SCRATCH_PREFIX = "outsize-scratch-"
"""How folders of scratch begin; then comes the process that made them."""
ARRAY_PREFIX = "outsize-array-"
"""How files of arrays in scratch begin; then comes the process that made them."""


def run_schedule(prepared: Prepared, listener: Listener | None = None, journal: Journal | None = None) -> None:
    """Run every pass; what the journal says is finished is left out."""
    schedule = prepared.schedule
    joined = current_cluster() if schedule.tuning.spread else None
    with (
        _scratch_folder(schedule, prepared.budget.scratch)
        if joined is None
        else shared_folder(prepared, joined, journal) as folder,
        np.errstate(all="ignore"),
        lean_heap(),
        _device(schedule),
    ):
        run = _Run(prepared, folder, listener, journal, joined)
        try:
            for number in range(len(schedule.passes)):
                if number:
                    trim_heap()  # threads that have ended leave up to 1 MiB on their heaps
                run.run_pass(number)
                run.drop_dead(number)
            if run.shared is not None:
                run.shared.tell()
        except BaseException:
            if journal is not None:
                with contextlib.suppress(Exception):
                    journal.flush(prepared.sink.sync)
            raise
        finally:
            run.close()


@contextlib.contextmanager
def _device(schedule: Schedule) -> Iterator[None]:
    """The device's memory, reserved once for all passes that use it."""
    size = max((one.sized.device_bytes for one in schedule.passes), default=0)
    with contextlib.nullcontext() if schedule.device is None or size == 0 else reserved(schedule.device, size):
        yield


class _Run:
    """What exists while a schedule runs: memory, results that were left, files, the journal."""

    def __init__(
        self, prepared: Prepared, folder: str, listener: Listener | None, journal: Journal | None, joined: Cluster | None
    ) -> None:  # fmt: skip
        self.passes, self.plan, self.final = prepared.schedule.passes, prepared.plan, prepared.sink
        self.folder, self.listener, self.journal = folder, listener, journal
        self.tuning = prepared.schedule.tuning
        self.pool = MemoryPool(max(prepared.budget.host or 0, self.plan.peak()))
        self.shared = None if joined is None else Distribution(joined, folder, prepared.budget.host or 0, self.tuning)
        """The workers of a cluster, where they do the work."""
        self.sinks: dict[Sink, Kept | Scratch] = {}
        """Description of where a result is left -> the real one."""
        self.stores: dict[Store, Store] = {}
        """Description of what a pass left -> what reads it."""

    def run_pass(self, number: int) -> None:
        """One pass, unless the journal has its results."""
        one, journal, step = self.passes[number], self.journal, self.plan.steps[number]
        sized, work = one.sized, one.sized.work
        assert isinstance(work, Pass)
        self._make_places(number)
        if journal is not None and self._restore(number):
            return
        report = _Report(self.listener, step.name, work, step.read + step.written)
        done = journal.done.get(number, set()) if journal is not None and self._is_noted(one) else set()
        report.start(number, len(self.plan.steps), len(done) / max(1, len(sized.grid)))
        sinks = tuple(self.sinks.get(sink, sink) for _, sink in work.outputs)
        bindings = {node: self.stores[store] for node, store in work.bindings.items() if store in self.stores}
        note = functools.partial(self._note, number)
        if self.shared is None:
            self._run_here(sized, Job(sized, sinks, bindings, report.moved), done, note)
        else:
            self.shared.run_pass(number, sized, sinks, bindings, done, note, report.moved)
        report.finish()
        self._keep(number)
        for place in one.places:
            if place.filling is not None and not done:
                self.stores[place.store].filled = True  # type: ignore[attr-defined]

    def _run_here(self, sized: Sized, job: Job, done: set[int], note: Callable[[int], None]) -> None:
        """The tiles that are not done, in the threads of this process."""
        work: Any = sized.work
        beside = sized.shared_bytes + sized.packed
        self.pool.count(beside)
        try:
            with work.opened(sized) as opened, blas_threads(sized.threads), keeping_blocks(work.churn):
                tiles = (tile for tile in enumerate(work.tiles(sized)) if tile[0] not in done)
                run_work(work, sized, replace(job, opened=opened), tiles, self.pool, note)
        finally:
            self.pool.give(beside)

    def _is_noted(self, one: ScheduledPass) -> bool:
        """True where the journal follows single tiles of a pass: what it leaves for later ones must survive a kill too."""
        return all(self.shared is not None and isinstance(place.sink, Scratch) for place in _results(one))

    def _note(self, number: int, tile: int) -> None:
        """A tile of a pass is finished."""
        if self.journal is not None and self._is_noted(self.passes[number]):
            self.journal.tile(number, tile, self.final.sync)

    def _make_places(self, number: int) -> None:
        """Memory and files for what a pass leaves."""
        for index, place in enumerate(self.passes[number].places):
            if isinstance(place.sink, Kept):
                buffer = self.pool.take(place.sink.nbytes, huge=place.filling is None)
                made: Kept | Scratch = place.sink.make(buffer)
            else:
                made = place.sink.make(os.path.join(self.folder, f"{number}-{index}.raw"))
            self.sinks[place.sink] = made
            if place.filling is None:
                self.stores[place.store] = made.store()
            else:
                assert isinstance(made, Kept)
                self.stores[place.store] = self.stores[place.filling] = place.filling.lie_in(made)

    def _restore(self, number: int) -> bool:
        """Bring back what an earlier run put aside; True where the whole pass need not run."""
        places, journal = _results(self.passes[number]), self.journal
        assert journal is not None
        names = [f"{number}-{index}" for index in range(len(places))]
        if not names or not all(name in journal.kept for name in names):
            return False
        for name, place in zip(names, places, strict=True):
            made = self.sinks[place.sink]
            assert isinstance(made, Kept)
            np.copyto(made.array, journal.load(name))
        return True

    def _keep(self, number: int) -> None:
        """Put small results of a finished pass aside, or bring what was written into the journal."""
        made = [self.sinks[place.sink] for place in _results(self.passes[number])]
        small = [sink for sink in made if isinstance(sink, Kept) and sink.nbytes <= self.tuning.journaled_result]
        if self.journal is None:
            return
        if not made or len(small) < len(made):
            self.journal.flush(self.final.sync)
            return
        for index, sink in enumerate(small):
            self.journal.keep(f"{number}-{index}", sink.array)

    def drop_dead(self, number: int) -> None:
        """Let go of what no later pass reads."""
        for one in self.passes[: number + 1]:
            for place in one.places if one.last_use == number else ():
                del self.stores[place.store]
                if place.filling is not None:
                    del self.stores[place.filling]
                self._end(place.sink)

    def _end(self, sink: Sink) -> None:
        made = self.sinks.pop(sink)
        if isinstance(made, Kept):
            self.pool.give(made.nbytes)
        else:
            made.end()

    def close(self) -> None:
        """Let go of everything. What workers of a cluster have left goes with its folder, or is taken up by a later run."""
        self.stores.clear()
        for sink in list(self.sinks):
            made = self.sinks[sink]
            if self.shared is not None and isinstance(made, Scratch):
                made.file.close()
                del self.sinks[sink]
            else:
                self._end(sink)


def _results(one: ScheduledPass) -> list[Place]:
    """What a pass makes for later ones; parts of sources that stay in memory are only a cache."""
    return [place for place in one.places if place.filling is None]


class _Report:
    """Turns what a pass reports into events whose bytes add up to what the plan said."""

    def __init__(self, listener: Listener | None, name: str, work: Pass, total: int) -> None:
        self._listener, self._name, self._total = listener, name, total
        self._volume, self._moved, self._told = max(1, work.volume()), 0, 0
        self._lock = threading.Lock()
        self._began = time.perf_counter()

    def start(self, index: int, steps: int, share: float) -> None:
        if self._listener is not None:
            done = int(share * self._total)
            self._listener(Started(step=self._name, index=index, steps=steps, bytes=self._total, done=done))

    def moved(self, amount: int) -> None:
        if self._listener is not None:
            with self._lock:
                self._moved += amount
                done = self._moved * self._total // self._volume
                told, self._told = self._told, done
                self._listener(Advanced(step=self._name, bytes=done - told))

    def finish(self) -> None:
        if self._listener is not None:
            self._listener(Finished(step=self._name, seconds=time.perf_counter() - self._began))


@contextlib.contextmanager
def _scratch_folder(schedule: Schedule, parent: str) -> Iterator[str]:
    """A folder for scratch files, if any pass leaves one; folders of dead processes are removed first."""
    clean_scratch(parent)
    if not any(isinstance(place.sink, Scratch) for one in schedule.passes for place in one.places):
        yield ""
        return
    os.makedirs(parent, exist_ok=True)
    import tempfile

    prefix = f"{SCRATCH_PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


def clean_scratch(parent: str) -> None:
    """Remove scratch folders and files whose process is gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            prefix = next(
                (known for known in (SCRATCH_PREFIX, ARRAY_PREFIX) if name.lstrip(".").startswith(known)), None
            )
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
