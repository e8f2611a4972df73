"""A pass on the workers of a cluster: its tiles, or parts of them, as tasks.

In: a sized pass, its sinks and stores as they exist now, the tiles that are done. A pass of many tiles becomes tasks of a few
tiles each. Where tiles are fewer than workers, each is cut into parts (`Pass.cut`): slabs of a reduction, stretches of the sum of
a product. What parts come to is joined in order by further tasks, as a tree. Which parts there are depends on the plan alone, so
the bytes of the result do not depend on who was fast, lost or alone. What cannot be cut runs on one worker. Out: the sinks,
written; the run is told of every tile that is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from outsize.array.graph.external_sort import Runs
from outsize.array.graph.node import Node, Source, nodes_below, walk
from outsize.array.passes.base import Pass, Sized
from outsize.array.plan.prepare import Prepared
from outsize.array.plan.residency import Kept, Scratch
from outsize.array.plan.shares import Shares, share_out
from outsize.array.run.journal import Journal
from outsize.array.run.side_files import SideFiles
from outsize.array.run.task import (
    Done,
    Samples,
    forget_passes,
    join_parts,
    meters_of,
    pack,
    read_samples,
    run_part,
    run_tiles,
)
from outsize.array.store.base import Region, Sink, Store
from outsize.array.store.io.partial import SCRATCH
from outsize.array.store.io.view import SeenSink, SeenStore
from outsize.array.tuning import Tuning
from outsize.core.errors import ClusterError, InputError
from outsize.core.units import format_bytes
from outsize.engine.barrier import Faults, Patience, run_tasks
from outsize.engine.cluster import Cluster
from outsize.engine.executor import Task

_BY_VALUE = 1 << 20
"""Bytes of an array in memory that goes to the workers with the pass."""


def refuse_unreachable(work: Pass) -> None:
    """An `InputError` where workers cannot reach what a pass reads."""
    for node in nodes_below([node for node, _ in work.outputs], work.bindings.__contains__):
        if not _is_reachable(node):
            raise InputError(
                f"an array of {format_bytes(node.nbytes)} lies in the memory of this process, which no worker reaches: save it "
                "to a file or a store that all of them read, and open that"
            )


def is_reachable(root: Node) -> bool:
    """True where workers reach all that a node is made of."""
    return all(_is_reachable(node) for node in walk(root))


def _is_reachable(node: Node) -> bool:
    store = node.store if isinstance(node, Source) else None
    while isinstance(store, SeenStore):
        store = store.inner
    return store is None or not store.resident or node.nbytes <= _BY_VALUE


def is_shared(sink: Sink) -> bool:
    """True where several processes may write it at once."""
    while isinstance(sink, SeenSink):
        sink = sink.sink
    return sink.shared


@contextlib.contextmanager
def shared_folder(prepared: Prepared, cluster: Cluster, journal: Journal | None) -> Iterator[str]:
    """The folder of a run that all workers reach: beside the output, or where the user said. It outlives a run whose journal
    is followed later."""
    partial = prepared.sink.partial
    if cluster.scratch is None and partial:
        folder = getattr(prepared.sink, "beside", f"{partial}{SCRATCH}")
    else:
        name = hashlib.blake2b((partial or uuid.uuid4().hex).encode(), digest_size=8).hexdigest()
        folder = f"{(cluster.scratch or prepared.budget.scratch).rstrip('/')}/outsize-shared-{name}"
    files = SideFiles(folder)
    between = [
        place.sink.name for one in prepared.schedule.passes for place in one.places if isinstance(place.sink, Scratch)
    ]
    if between and files.remote:
        raise InputError(
            f"{prepared.plan.name} leaves {between[0]} between its steps, which no object store takes piece by piece: give "
            "outsize.cluster(..., scratch=...) a folder on a disk that every worker reaches"
        )
    if journal is None or not journal.resumed:
        files.remove()
    files.create()
    try:
        yield folder
    except (ClusterError, KeyboardInterrupt):
        if journal is None:
            files.remove()
        raise
    except BaseException:
        files.remove()
        raise
    with contextlib.suppress(Exception):  # workers let go of files that are removed now
        cluster.executor.ask_all(forget_passes)
    files.remove()


class Distribution:
    """One run on a cluster."""

    def __init__(self, cluster: Cluster, folder: str, budget: int, tuning: Tuning) -> None:
        self.cluster, self.files, self.budget, self.tuning = cluster, SideFiles(folder), budget, tuning
        self.faults, self.patience = Faults(), Patience()
        self.peak = 0
        """Most bytes that any task has held of its pool."""
        self._token = uuid.uuid4().hex[:12]
        """Tells the passes of this run from those of all others."""
        self._runs: dict[Node, int] = {}
        """Sorted runs -> the pass that wrote them."""

    def run_pass(
        self, number: int, sized: Sized, sinks: tuple[Sink, ...], bindings: Mapping[Node, Store], done: set[int],
        note: Callable[[int], None] | None, moved: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Run one pass; `note` is told of tiles that are done, `moved` of what has been moved."""
        work: Any = sized.work
        refuse_unreachable(work)
        if isinstance(work.outputs[0][0], Runs):
            self._runs[work.outputs[0][0]] = number
        shares = share_out(sized, self.tuning, self.budget, done)
        if not shares.tasks:
            return
        self._hand_over(number, sized, sinks, dict(bindings))
        volume, meters = work.volume(), meters_of(work)

        def finish(task: Task, told: Done | None) -> None:
            told = told or Done()  # of a simulated task nothing is told
            self.peak = max(self.peak, told.peak)
            for output, region, block in told.kept:
                _place(sinks[output], region, block)
            for meter, measured in zip(meters, told.measured, strict=False):
                meter.give(measured)
            if note is not None and task.function is run_tiles:
                for tile in task.arguments[3]:
                    note(tile)
            moved(int(task.share * volume))

        self._run(self._tile_tasks(number, sized, shares), finish)
        if shares.parts:
            self._run_parts(number, sized, shares, finish, note)

    def _run(self, tasks: list[Task], finish: Callable[[Task, Done | None], None]) -> None:
        if tasks:
            run_tasks(self.cluster.executor, tasks, finish, self.faults, self.patience)

    def _hand_over(self, number: int, sized: Sized, sinks: tuple[Sink, ...], bindings: dict[Node, Store]) -> None:
        """Leave the pass where workers find it."""
        samples: dict[Node, Samples] = {
            node: read_samples(self.files, self._runs[node]) for node in bindings if node in self._runs
        }
        data = pack(sized, sinks, bindings, samples, self.tuning)
        with self.files.writing(self._name(number)) as file:
            file.write(data)

    def _name(self, number: int) -> str:
        return f"{number}-{self._token}.pass"

    def _tile_tasks(self, number: int, sized: Sized, shares: Shares) -> list[Task]:
        each, moves = _moves(sized)
        folder = self.files.folder
        return [
            Task(
                key=f"{os.path.basename(folder)}-{number}-tiles-{tiles[0]}", function=run_tiles,
                arguments=(folder, self._name(number), f"{number}-samples-{tiles[0]}", tiles, self.budget),
                bytes=sized.peak, moved=int(moves * len(tiles)), share=len(tiles) * each,
            )
            for tiles in shares.tiles
        ]  # fmt: skip

    def _run_parts(
        self, number: int, sized: Sized, shares: Shares, finish: Callable[[Task, Done | None], None],
        note: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Parts, then what joins them, a level of the tree at a time."""
        folder, there = self.files.folder, self.files.names()
        trees: dict[int, list[tuple[Region, str]]] = {}
        tasks: list[Task] = []
        count = sum(len(parts) for _, _, parts in shares.parts)
        _, moves = _moves(sized)
        for tile, _, parts in shares.parts:
            trees[tile] = [(part, f"{number}-{tile}-0-{place}") for place, part in enumerate(parts)]
            for part, name in trees[tile]:
                if name not in there:
                    tasks.append(Task(
                        key=f"{os.path.basename(folder)}-{name}", function=run_part,
                        arguments=(folder, self._name(number), part, name, self.budget), bytes=sized.peak,
                        moved=int(moves * len(sized.grid) / count), share=1 / count,
                    ))  # fmt: skip
        self._run(tasks, finish)
        level, fan = 0, self.tuning.fan
        while any(len(tree) > fan for tree in trees.values()):
            level += 1
            joins: list[Task] = []
            for tile, tree in trees.items():
                trees[tile] = []
                for place, group in enumerate(tree[low : low + fan] for low in range(0, len(tree), fan)):
                    name = f"{number}-{tile}-{level}-{place}"
                    spans = zip(*(part for part, _ in group), strict=True)  # they follow each other along one axis
                    trees[tile].append((tuple((axis[0][0], axis[-1][1]) for axis in spans), name))
                    if name not in there:
                        joins.append(self._join(number, sized, trees[tile][-1][0], group, name))
            self._run(joins, finish)
        tops = [self._join(number, sized, tile, trees[place], None, place) for place, tile, _ in shares.parts]
        self._run(tops, finish)
        if note is not None:
            for place, _, _ in shares.parts:
                note(place)

    def _join(
        self, number: int, sized: Sized, outer: Region, group: list[tuple[Region, str]], name: str | None,
        place: int = 0,
    ) -> Task:  # fmt: skip
        work: Any = sized.work
        key = f"{os.path.basename(self.files.folder)}-{name or f'{number}-{place}-top'}"
        arguments = (self.files.folder, self._name(number), outer, tuple(group), name, self.budget)
        return Task(
            key=key, function=join_parts, arguments=arguments, bytes=work.join_bytes(sized), moved=len(group) * sized.slot_bytes,
        )  # fmt: skip

    def tell(self) -> None:
        """Name what went wrong and was cured."""
        told = self.faults.told()
        if told:
            warnings.warn(f"on {self.cluster.executor.name}: {told}", stacklevel=2)


def _place(sink: Sink, region: Region, block: Any) -> None:
    """A small result that a worker has told of."""
    place = sink.lay(region, np.empty(0, np.uint8))
    np.copyto(place, block)
    assert isinstance(sink.sink if isinstance(sink, SeenSink) else sink, Kept)


def _moves(sized: Sized) -> tuple[float, float]:
    """(share of a tile in its pass, bytes that it moves)."""
    work: Any = sized.work
    count = max(1, len(sized.grid))
    return 1 / count, (work.reads(sized) + work.writes()) / count
