"""One stream on the workers of a cluster: its chunks in parts, each folded by a task, their sums joined in order as a tree.

In: a sized stream, a folder that all workers reach. Out: its kernel, as if it had folded every chunk. A task tells sums only (a
mixture, a Gram matrix, a few numbers), so that little is sent however large the data are; what a projection leaves goes to a
file that all of them reach. Which parts there are depends on the plan alone, and so do the bytes of the result.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from typing import Any

import numpy as np

from outsize.array.graph.node import put_together, take_apart
from outsize.array.passes.base import Sized
from outsize.array.run.distribute import is_reachable
from outsize.array.run.side_files import SideFiles
from outsize.array.run.task import Done, on_worker, pickler
from outsize.array.tuning import current
from outsize.core.errors import ClusterError
from outsize.core.events import Advanced, Finished, Listener, Started
from outsize.engine.barrier import Faults, run_tasks
from outsize.engine.cluster import Cluster
from outsize.engine.executor import Task
from outsize.factor.algorithms.stream import Kernel, StreamPass, run_stream
from outsize.factor.algorithms.tensor import Tensor

_LITTLE = 8
"""Sums of all parts are at most one part in so many of what is read, or those of one part a worker."""


def is_shared(cluster: Cluster | None, tensor: Tensor, sample: int | None) -> bool:
    """True where a stream over a tensor is worth tasks: all of it is read, and that is much."""
    large = sample is None and tensor.size * tensor.dtype.itemsize >= current().shared_stream
    return cluster is not None and large and is_reachable(tensor.node)


def cut(work: StreamPass, sized: Sized, workers: int) -> list[tuple[int, int]]:
    """Parts of the chunks that are not folded yet: (first, behind the last)."""
    tuning, count = current(), len(work.picked(sized))
    wanted = max(workers * tuning.tasks, work.volume() // tuning.task_bytes)
    sums = sum(np.asarray(value).nbytes for value in work.kernel.sums().values())
    most = max(workers, work.volume() // (_LITTLE * max(1, sums)))
    parts = max(1, min(wanted, most, count))
    edges = [max(work.start, place * count // parts) for place in range(parts + 1)]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]


def run_shared(
    work: StreamPass, sized: Sized, cluster: Cluster, folder: str, room: int, listener: Listener | None, place: tuple[int, int]
) -> None:  # fmt: skip
    """Run a stream; parts that an earlier run has left are not done again."""
    files, data, total = SideFiles(folder), _pack(work, sized), work.volume()
    files.create()
    name = hashlib.blake2b(data, digest_size=8).hexdigest()
    with files.writing(name) as file:
        file.write(data)
    parts, there = cut(work, sized, cluster.spread), files.names()
    if listener is not None:
        listener(Started(step=work.label(), index=place[0], steps=place[1], bytes=total, done=0))

    def finish(task: Task, _: Any) -> None:
        if listener is not None:
            listener(Advanced(step=work.label(), bytes=int(task.share * total)))

    def task(function: Any, result: str, size: int, share: float, *arguments: Any) -> Task:
        key = f"{os.path.basename(os.path.dirname(folder))}-{result}"
        return Task(key=key, function=function, arguments=(folder, name, result, *arguments), bytes=size,
                    moved=int(share * total), share=share)  # fmt: skip

    faults, chunks = Faults(), len(work.picked(sized))
    results = [f"{name}-{low}-{high}" for low, high in parts]
    tasks = [
        task(fold_part, result, sized.peak, (high - low) / chunks, low, high, room)
        for result, (low, high) in zip(results, parts, strict=True)
        if result not in there
    ]
    run_tasks(cluster.executor, tasks, finish, faults)
    fan = current().fan
    while len(results) > fan:
        groups = [tuple(results[low : low + fan]) for low in range(0, len(results), fan)]
        results = [f"{group[0]}.." for group in groups]
        joins = [task(join_parts, one, sized.peak, 0, group) for one, group in zip(results, groups, strict=True)]
        run_tasks(cluster.executor, joins, finish, faults)
    for result in results:
        _join(work.kernel, files, result)
    if listener is not None:
        listener(Finished(step=work.label(), seconds=0.0))
    if faults.told():
        warnings.warn(f"on {cluster.executor.name}: {faults.told()}", stacklevel=2)


def _pack(work: StreamPass, sized: Sized) -> bytes:
    content = (take_apart(work.node), work.axis, work.kernel, work.tuning, sized.sizes())
    packed: bytes = pickler().dumps(content, protocol=5)
    return packed


def _unpack(files: SideFiles, name: str) -> tuple[StreamPass, Sized]:
    with files.reading(name) as file:
        node, axis, kernel, tuning, sizes = pickler().load(file)
    work = StreamPass(put_together(node), axis, kernel, tuning)
    return work, Sized(work=work, **sizes)


@on_worker
def fold_part(folder: str, name: str, result: str, low: int, high: int, room: int) -> Done:
    """Fold some chunks, and leave what they come to."""
    files = SideFiles(folder)
    work, sized = _unpack(files, name)
    work.start, work.stop = low, high

    def saved(done: int) -> None:
        if not files.there():
            raise ClusterError("the run that wanted this part has ended")

    work.saved = saved
    work.kernel.begin()
    try:
        run_stream(work, sized, room, None, (0, 1))
        work.kernel.flush()
    finally:
        work.kernel.end()
    _leave(work.kernel, files, result)
    return Done()


@on_worker
def join_parts(folder: str, name: str, result: str, parts: tuple[str, ...]) -> Done:
    """What parts came to, as one."""
    files = SideFiles(folder)
    kernel = _unpack(files, name)[0].kernel
    for part in parts:
        _join(kernel, files, part)
    _leave(kernel, files, result)
    return Done()


def _leave(kernel: Kernel, files: SideFiles, result: str) -> None:
    with files.writing(result) as file:
        np.savez(file, **kernel.sums())


def _join(kernel: Kernel, files: SideFiles, result: str) -> None:
    with files.reading(result) as file, np.load(file, allow_pickle=False) as found:
        kernel.join({name: found[name] for name in found.files})
