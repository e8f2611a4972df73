"""What a worker of a cluster does: some tiles of a pass, a part of one tile, or parts joined; inside the plan's budget.

In: the folder of the run, the number of a pass, and which of its tiles. The pass itself lies in the folder (`Payload`): it is
sized already, and its sinks and stores open where the worker is. The tiles run as they do in one process (`engine/threads.py`).
Out: a `Done` of a few numbers. Tiles go into stores. Whatever is told as done has reached its disk.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.graph.external_sort import Runs, index_of
from outsize.array.graph.local import Together
from outsize.array.graph.node import Node, Source, put_together, take_apart, walk
from outsize.array.kernels.blas import blas_threads
from outsize.array.kernels.precision import Measured, MeasuredStore, Meter
from outsize.array.passes.base import Job, Pass, Sized
from outsize.array.passes.tiling import Grid
from outsize.array.plan.layout import make_pass
from outsize.array.plan.residency import Kept, Scratch
from outsize.array.run.side_files import SideFiles
from outsize.array.store.base import Block, Buffer, Region, Sink, Store
from outsize.array.store.io.view import SeenSink
from outsize.array.tuning import Tuning
from outsize.core.errors import ClusterError, InputError, MissingPath, StoreError
from outsize.engine.cluster import use_cluster
from outsize.engine.heap import lean_heap, trim_heap
from outsize.engine.pool import MemoryPool, make_buffer
from outsize.engine.threads import run_work

Samples = dict[tuple[tuple[int, ...], int], Block]
"""What tells sorted runs apart: (lane, run) -> elements of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a task tells."""

    kept: tuple[tuple[int, Region, Block], ...] = ()
    """Small results that stay with the driver: (number of the output, region, values)."""
    measured: tuple[Measured, ...] = ()
    """What the meters of its sources say, in the order of `meters_of`."""
    peak: int = 0
    """Most bytes of its pool that were out at once."""
    seconds: float = 0.0


@dataclass(slots=True)
class Payload:
    """A sized pass with its stores."""

    sized: Sized
    sinks: tuple[Sink, ...]
    bindings: dict[Node, Store]


class Returned(Kept):
    """A small result of which a worker tells what it has written."""

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept.shape, kept.dtype, kept.name)
        self.create()
        self.written: list[tuple[Region, Block]] = []

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        super().write(region, block, buffer)
        self.written.append((region, np.array(self.lay(region, buffer))))


def pack(
    sized: Sized, sinks: tuple[Sink, ...], bindings: dict[Node, Store], samples: dict[Node, Samples], tuning: Tuning
) -> bytes:
    """A sized pass as bytes; graphs of any depth."""
    nodes = [node for node, _ in sized.work.outputs]
    bound = list(bindings)
    parts = take_apart(Together.of([*nodes, *bound]))
    known = [samples.get(node) for node in bound]
    stores = [bindings[node] for node in bound]
    packed: bytes = pickler().dumps(
        (parts, len(nodes), sinks, stores, known, type(sized), sized.sizes(), tuning), protocol=5
    )
    return packed


def pickler() -> Any:
    """What the engine pickles with, which takes functions of a user's script by value; else Python's own."""
    return next((sys.modules[name] for name in ("cloudpickle", "ray.cloudpickle") if name in sys.modules), pickle)


def unpack(data: bytes) -> Payload:
    """The pass, as it runs on this worker."""
    parts, number, sinks, stores, known, kind, sizes, tuning = pickle.loads(data)
    roots = put_together(parts).inputs
    nodes, bound = roots[:number], roots[number:]
    bindings: dict[Node, Store] = dict(zip(bound, stores, strict=True))
    for node, store, samples in zip(bound, stores, known, strict=True):
        if samples is not None:
            assert isinstance(node, Runs)
            index_of(store, node).keep_all(samples)
    made = tuple(_returned(sink) for sink in sinks)
    work = make_pass(list(zip(nodes, made, strict=True)), bindings, tuning, None, [])
    return Payload(kind(work=work, **sizes), made, bindings)


def _returned(sink: Sink) -> Sink:
    """The sink, with memory of its own where its description has none."""
    if isinstance(sink, Kept):
        return Returned(sink)
    if isinstance(sink, SeenSink):
        sink.sink = _returned(sink.sink)
    return sink


_lock = threading.Lock()
_loaded: dict[str, Payload] = {}
"""The passes that this worker has at hand: the last one."""


def _load(files: SideFiles, name: str) -> Payload:
    """A pass by the name of its file, which no other run has: a folder may be that of another run by now."""
    path = files.path(name)
    with _lock:
        if path not in _loaded:
            _loaded.clear()
            with files.reading(name) as file:
                data = file.read()
            _loaded[path] = unpack(data)
        return _loaded[path]


def forget_passes() -> None:
    """Let go of files and memory of passes that were loaded here."""
    with _lock:
        _loaded.clear()


def on_worker(function: Callable[..., Done]) -> Callable[..., Done]:
    """A task, as a worker runs it: its memory goes back, and a path that is missing there is told as that."""

    @functools.wraps(function)  # so that workers find it by its name
    def run(folder: str, name: str, *arguments: Any) -> Done:
        try:
            with np.errstate(all="ignore"), lean_heap():
                began = time.perf_counter()
                done = function(folder, name, *arguments)
                trim_heap()
                return replace(done, seconds=time.perf_counter() - began)
        except MissingPath as error:
            machine = os.uname().nodename
            if not SideFiles(folder).there():
                raise InputError(
                    f"the worker at {machine} does not reach {folder}: choose a folder that every worker reaches, with "
                    "outsize.cluster(..., scratch=...)"
                ) from None
            raise StoreError(
                f"{error}; the worker at {machine} does not see it: put it where every worker reaches it",
                path=error.path,
            ) from None

    return run


def _run(files: SideFiles, payload: Payload, work: Any, tiles: list[tuple[int, Region]], budget: int) -> Done:
    """Tiles, or parts, in the threads of this worker."""
    sized = payload.sized
    pass_: Any = sized.work
    pool = MemoryPool(max(budget, sized.peak))
    pool.count(sized.shared_bytes + sized.packed)

    def going() -> Iterator[tuple[int, Region]]:
        for tile in tiles:
            if not files.there():
                raise ClusterError("the run that wanted this tile has ended")
            yield tile

    with pass_.opened(sized) as opened, blas_threads(sized.threads):
        job = Job(sized, payload.sinks, payload.bindings, lambda amount: None, opened)
        run_work(work, sized, job, going(), pool, lambda tile: None)
    return Done(kept=_settle(payload.sinks), peak=pool.peak)


def _settle(sinks: tuple[Sink, ...]) -> tuple[tuple[int, Region, Block], ...]:
    """Bring what was written to its disk; small results are told."""
    kept: list[tuple[int, Region, Block]] = []
    for number, sink in enumerate(sinks):
        under = sink.sink if isinstance(sink, SeenSink) else sink
        if isinstance(under, Returned):
            kept += [(number, region, block) for region, block in under.written]
            under.written.clear()
        elif isinstance(under, Scratch):
            under.file.sync()
        else:
            sink.sync()
    return tuple(kept)


@on_worker
def run_tiles(folder: str, name: str, samples: str, tiles: Sequence[int], budget: int) -> Done:
    """Some tiles of a pass."""
    files = SideFiles(folder)
    payload = _load(files, name)
    work: Any = payload.sized.work
    every, wanted = work.tiles(payload.sized), set(tiles)
    found = (
        [(number, every.at(number)) for number in tiles]
        if isinstance(every, Grid)
        else [tile for tile in enumerate(every) if tile[0] in wanted]
    )
    meters = meters_of(work)
    for meter in meters:
        meter.take()  # of a task that failed here
    done = _run(files, payload, work, found, budget)
    done = replace(done, measured=tuple(meter.take() for meter in meters))
    node, sink = work.outputs[0]
    if isinstance(node, Runs) and isinstance(sink, Scratch):
        with files.writing(samples) as file:
            pickle.dump(index_of(sink.reader, node).take_all(), file, protocol=5)
    return done


def meters_of(work: Pass) -> list[Meter]:
    """The meters of all that a pass reads, in the order in which it is met."""
    nodes = walk(*(node for node, _ in work.outputs))
    stores = [node.store for node in nodes if isinstance(node, Source)]
    return [store.meter for store in stores if isinstance(store, MeasuredStore)]


def read_samples(files: SideFiles, number: int) -> Samples:
    """What the tasks of a pass have left that tells its runs apart."""
    found: Samples = {}
    for name in files.names():
        if name.startswith(f"{number}-samples-"):
            with files.reading(name) as file:
                found |= pickle.load(file)
    return found


class _Part:
    """A part of a tile, as the threads see it; what it has come to is left in a file."""

    def __init__(self, work: Pass, files: SideFiles, name: str) -> None:
        self.work, self.files, self.name = work, files, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def chunks(self, job: Job, tile: Region) -> Iterator[Region]:
        return self.work.part_chunks(job, tile)

    def open(self, job: Job, tile: Region, slot: Buffer) -> Any:
        return self.work.open_part(job, tile, slot)

    def load(self, job: Job, tile: Region, chunk: Region, state: Any, context: Any) -> Any:
        return self.work.load(job, self.work.tile_of(tile), chunk, state, context)

    def fold(self, job: Job, tile: Region, chunk: Region, state: Any, payload: Any) -> None:
        self.work.fold(job, self.work.tile_of(tile), chunk, state, payload)

    def close(self, job: Job, tile: Region, state: Any) -> None:
        self.files.put(self.name, self.work.partial(state))


@on_worker
def run_part(folder: str, name: str, part: Region, result: str, budget: int) -> Done:
    """A part of one tile."""
    files = SideFiles(folder)
    payload = _load(files, name)
    pass_: Any = payload.sized.work
    return _run(files, payload, _Part(pass_, files, result), [(0, part)], budget)


@on_worker
def join_parts(
    folder: str, name: str, outer: Region, parts: tuple[tuple[Region, str], ...], result: str | None, budget: int
) -> Done:  # fmt: skip
    """Parts joined in order: into the result of a larger part, or, without one, into the tile, which is then written."""
    files = SideFiles(folder)
    payload = _load(files, name)
    work: Any = payload.sized.work
    pool = MemoryPool(max(budget, work.join_bytes(payload.sized)))
    pool.count(work.join_bytes(payload.sized))
    job = Job(payload.sized, payload.sinks, payload.bindings, lambda amount: None)
    slot = make_buffer(payload.sized.slot_bytes)
    state = work.open(job, outer, slot) if result is None else work.open_part(job, outer, slot)
    for part, file in parts:
        work.join(job, outer, part, state, files.get(file, len(work.partial(state))))
    if result is not None:
        files.put(result, work.partial(state))
        return Done(peak=pool.peak)
    for piece in work.pieces(job, outer, state):
        work.write(job, outer, state, piece)
    work.close(job, outer, state)
    return Done(kept=_settle(payload.sinks), peak=pool.peak)


def call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Work that one worker does by itself, as it would run in one process; that process may be the one that asks (`local`)."""
    with use_cluster(None):
        return function(*arguments, **options)
