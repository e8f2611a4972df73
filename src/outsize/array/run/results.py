"""From a node to its result: into a file, into memory, or into a region of an open store.

In: a node, a target, a budget. Out: a `Plan`, a store, or a NumPy array. Every verb prepares its work first (`prepare`)
and runs what it prepared, so that `plan_node` shows what `save_node` and `compute_node` do.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.graph.node import Node, Source, put_together, take_apart, walk
from outsize.array.plan.prepare import (
    Prepared,
    prepare,
    prepare_all,
    refuse_endless,
    resolve_budget,
    run_prepared,
    title,
)
from outsize.array.plan.residency import Kept
from outsize.array.run.at_once import compute_at_once
from outsize.array.run.cluster import local_cluster, on_one_worker
from outsize.array.run.distribute import is_shared
from outsize.array.run.execute import SCRATCH_PREFIX, digest_of, run_schedule
from outsize.array.run.journal import Journal
from outsize.array.store.base import Block, Region, Sink, Store, whole
from outsize.array.store.formats.memory import MemorySink
from outsize.array.store.io.addresses import is_remote
from outsize.array.store.io.partial import JOURNAL, hold
from outsize.array.store.io.view import SeenSink
from outsize.array.store.options import split_key
from outsize.array.store.registry import describe_sink, open_store
from outsize.array.tuning import current
from outsize.core.errors import BudgetError, ClusterError, InputError
from outsize.core.events import Listener
from outsize.core.memory import HOST, Allowance, Budget
from outsize.core.plan import Plan
from outsize.core.units import format_bytes
from outsize.engine.cluster import current_cluster, use_cluster
from outsize.engine.pool import make_buffer


def plan_node(
    node: Node, budget: Any = None, path: str | os.PathLike[str] | None = None, *, device: Any = None, tf32: bool = False,
    **options: Any,
) -> Plan:  # fmt: skip
    """The plan of saving a node to a path; without one, to a .npy file. Nothing is created."""
    refuse_endless(node)
    sink = describe_sink("output.npy" if path is None else path, node.shape, node.dtype, **options)
    name = None if path is None else _saving(path)
    if current_cluster() is not None and not is_shared(sink):
        given = resolve_budget(budget)
        with use_cluster(None):
            plan = prepare(node, sink, given, name=name).plan
        note = f"{sink.name} is written by one process: on one worker"
        return replace(plan, workers=1, useful_workers=1, notes=(*plan.notes, note))
    return prepare(node, sink, budget, device, tf32=tf32, name=name).plan


def _saving(*paths: str | os.PathLike[str]) -> str:
    return f"save {', '.join(os.path.basename(os.fspath(path)) for path in paths)}"


def plan_compute(node: Node, budget: Any = None, *, device: Any = None, tf32: bool = False) -> Plan:
    """The plan of `compute_node`."""
    return _prepare_compute([node], budget, device, tf32).plan


def _prepare_compute(nodes: Sequence[Node], budget: Any, device: Any, tf32: bool) -> Prepared:
    for node in nodes:
        refuse_endless(node)
    wanted = [(node, Kept(node.shape, node.dtype, "result")) for node in nodes]
    name = f"compute {title(nodes[0]) if len(nodes) == 1 else f'{len(nodes)} arrays'}"
    return prepare_all(wanted, budget, device, tf32=tf32, name=name)


def compute_node(
    node: Node, budget: Any = None, listener: Listener | None = None, *, device: Any = None, tf32: bool = False,
    out: Block | None = None,
) -> Block:  # fmt: skip
    """The node as a NumPy array: a new one, or `out`."""
    if out is not None:
        return _compute_into(node, budget, listener, device, tf32, out)
    return compute_nodes([node], budget, listener, device=device, tf32=tf32)[0]


def compute_nodes(
    nodes: Sequence[Node], budget: Any = None, listener: Listener | None = None, *, device: Any = None, tf32: bool = False
) -> list[Block]:  # fmt: skip
    """Several nodes as NumPy arrays, in one walk over what they read."""
    joined = current_cluster()
    if device is None and not tf32:
        found = compute_at_once(nodes, budget if joined is None else None)
        if found is not None:
            return found
    if joined is not None and device is None:
        return _compute_on_cluster(nodes, budget, listener)
    prepared = _prepare_compute(nodes, budget, device, tf32)
    sinks = [sink for _, sink in prepared.wanted if isinstance(sink, Kept)]
    plan, host, size = prepared.plan, prepared.budget.host or 0, sum(sink.nbytes for sink in sinks)
    if size > host:
        raise BudgetError(
            f"the result alone is {format_bytes(size)} and the budget {format_bytes(host)}: "
            f"write it to disk with .save(path), or give compute(budget=...) at least {format_bytes(plan.smallest or 0)}",
            needed=plan.peak(), budget=host, smallest=plan.smallest, culprit="the result", plan=plan,
        )  # fmt: skip
    plan.check()
    for sink in sinks:
        sink.create()
    run_prepared(prepared, lambda work: run_schedule(work, listener))
    return [sink.array for sink in sinks]


def _compute_on_cluster(nodes: Sequence[Node], budget: Any, listener: Listener | None) -> list[Block]:
    """Workers write the results where all of them can, and this process reads them."""
    size = sum(node.nbytes for node in nodes)
    with use_cluster(None):
        here = resolve_budget(None).host or 0
    if size > here:
        raise BudgetError(
            f"the result alone is {format_bytes(size)} and this process may hold {format_bytes(here)}: write it with .save(path)",
            needed=size, budget=here, culprit="the result",
        )  # fmt: skip
    scratch = resolve_budget(budget).scratch
    os.makedirs(scratch, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=scratch) as folder:
        paths = [os.path.join(folder, f"{place}.npy") for place in range(len(nodes))]
        stores = save_nodes(dict(zip(paths, nodes, strict=True)), budget, listener)
        regions = [whole(store.shape) for store in stores]
        return [
            np.array(store.read(region, make_buffer(store.extent(region))))
            for store, region in zip(stores, regions, strict=True)
        ]


def _compute_into(node: Node, budget: Any, listener: Listener | None, device: Any, tf32: bool, out: Block) -> Block:
    """Into an array of the caller's, whose memory is not ours to count."""
    if out.shape != node.shape or out.dtype != node.dtype:
        raise InputError(f"out is {out.dtype}{list(out.shape)}, the result {node.dtype}{list(node.shape)}")
    for source in walk(node):
        if isinstance(source, Source) and source.store.resident and np.may_share_memory(to_numpy(source), out):
            raise InputError("out shares memory with an input: it would be read after it is written")
    if current_cluster() is not None:
        np.copyto(out, compute_node(node, budget, listener))
        return out
    sink = MemorySink(out, "out", counted=False)
    prepared = prepare(node, sink, budget, device, tf32=tf32, name=f"compute {title(node)}")
    run_prepared(prepared, lambda work: run_schedule(work, listener))
    return out


def save_node(
    node: Node, path: str, budget: Any = None, listener: Listener | None = None, *, resume: bool = True,
    device: Any = None, tf32: bool = False, **options: Any,
) -> Store:  # fmt: skip
    """Write a node to a file or folder in the format of its suffix; the same call goes on after a kill."""
    path = os.fspath(path)
    target = split_key(path, None)[0]
    refuse_overlap(node, target)
    refuse_endless(node)
    sink = describe_sink(path, node.shape, node.dtype, **options)
    joined = current_cluster()
    if joined is not None and not is_shared(sink):
        on_one_worker(_save_parts, budget, take_apart(node), os.path.abspath(path), resume, options)
        return open_store(path)
    with hold(target), _as_earlier(sink, resume and _is_journaled(node)):
        given = resolve_budget(budget)
        if budget is None and resume and _is_journaled(node):
            given = _earlier_budget(sink, given)
        prepared = prepare(node, sink, given, device, tf32=tf32, name=_saving(path))
        return run_prepared(prepared, lambda work: _save(work, listener, resume))


def _save_parts(
    parts: list[tuple[Node, tuple[int, ...]]], path: str, resume: bool, options: dict[str, Any], budget: int
) -> None:  # fmt: skip
    """The whole of a save, on one worker of a cluster."""
    save_node(put_together(parts), path, budget, resume=resume, **options).close()


@contextlib.contextmanager
def _as_earlier(sink: Sink, resumes: bool) -> Iterator[None]:
    """Plan for as many workers as the run that is taken up, so that its tiles are ours: on a cluster of another size, or in this
    process in place of one."""
    header = Journal.header(sink.partial + JOURNAL) if resumes else None
    spread, cores = (header.get(name) for name in ("workers", "cores")) if header else (None, None)
    joined = current_cluster()
    if not isinstance(spread, int) or not isinstance(cores, int) or not spread:
        yield
        return
    with use_cluster(local_cluster(spread, cores) if joined is None else replace(joined, spread=spread, cores=cores)):
        yield


def _is_journaled(node: Node) -> bool:
    """True where an output is large enough to be taken up after a kill."""
    return node.nbytes >= current().journaled


def _save(prepared: Prepared, listener: Listener | None, resume: bool) -> Store:
    sink, digest, journal = prepared.sink, "", None
    if _is_journaled(prepared.node):  # a digest of arrays in memory reads all of them
        digest = digest_of(prepared.node, prepared.plan)
        journal = Journal(sink.partial + JOURNAL, prepared.schedule.tuning)
        resume = resume and journal.is_of(digest)  # without its journal nobody knows what an unfinished output is of
        if not resume:
            journal.remove()
    sink.create(resume=resume and journal is not None)
    if journal is not None:
        journal.begin(digest, prepared.budget.host or 0)
    try:
        run_schedule(prepared, listener, journal)
    except (KeyboardInterrupt, ClusterError) as stop:
        if journal is None:
            sink.abort()
        else:
            stop.add_note(
                f"finished tiles are kept in {sink.partial}: the same call goes on from there (to give up, delete it and "
                f"{os.path.basename(sink.partial + JOURNAL)})"
            )
        raise
    except BaseException:
        sink.abort()
        if journal is not None:
            journal.remove()
        raise
    store = sink.commit()
    if journal is not None:
        journal.remove()
    return store


def _earlier_budget(sink: Sink, given: Budget) -> Budget:
    """Take the budget of an interrupted run where it is not larger than ours, so that its tiles fit ours."""
    header = Journal.header(sink.partial + JOURNAL)
    earlier = header.get("budget") if header else None
    if not isinstance(earlier, int) or earlier > (given.host or 0):
        return given
    allowances = tuple(
        Allowance(pool=HOST, bytes=earlier, reason="as in the run that is taken up") if a.pool == HOST else a
        for a in given.allowances
    )
    return Budget(allowances=allowances, scratch=given.scratch)


def plan_nodes(wanted: Mapping[str, Node], budget: Any = None, *, device: Any = None, tf32: bool = False) -> Plan:
    """The plan of `save_nodes`."""
    return prepare_all(_described(wanted), budget, device, tf32=tf32, name=_saving(*wanted)).plan


def save_nodes(
    wanted: Mapping[str, Node], budget: Any = None, listener: Listener | None = None, *, device: Any = None,
    tf32: bool = False,
) -> list[Store]:  # fmt: skip
    """Write several nodes, each to its file, in one walk over what they read. All appear at the end, or none does."""
    _refuse_shared(list(wanted))
    with contextlib.ExitStack() as held:
        for path, node in wanted.items():
            target = split_key(path, None)[0]
            for other in wanted.values():
                refuse_overlap(other, target)
            refuse_endless(node)
            held.enter_context(hold(target))
        prepared = prepare_all(_described(wanted), budget, device, tf32=tf32, name=_saving(*wanted))
        return run_prepared(prepared, lambda work: write_all(work, listener))


def store_nodes(wanted: Sequence[tuple[Node, Sink]], listener: Listener | None = None) -> None:
    """Write several nodes into what exists already, in one walk over what they read."""
    for node, _ in wanted:
        refuse_endless(node)
    with use_cluster(None):  # an object that another library opened stays in this process
        prepared = prepare_all(wanted, name=f"store {len(wanted)} arrays")
        run_prepared(prepared, lambda work: run_schedule(work, listener))


def write_all(prepared: Prepared, listener: Listener | None) -> list[Store]:
    """Run prepared work into its sinks, which are complete then, or removed."""
    begun: list[Sink] = []
    try:
        for _, sink in prepared.wanted:
            sink.create()
            begun.append(sink)
        run_schedule(prepared, listener)
        for sink in begun:
            sink.sync()
    except BaseException as error:
        for sink in begun:
            sink.abort()
        if isinstance(error, KeyboardInterrupt):
            error.add_note("nothing was written: the same call begins again")
        raise
    return [sink.commit() for sink in begun]


def _described(wanted: Mapping[str, Node]) -> list[tuple[Node, Sink]]:
    return [(node, describe_sink(path, node.shape, node.dtype)) for path, node in wanted.items()]


def _refuse_shared(paths: Sequence[str]) -> None:
    """An `InputError` where two results would be one file."""
    real = [os.path.realpath(split_key(path, None)[0]) for path in paths]
    twice = next((path for place, path in enumerate(paths) if real[place] in real[:place]), None)
    if twice is not None or not paths:
        raise InputError(
            f"{twice} is the target of two arrays: give each a file of its own" if twice else "nothing to save"
        )


def update_node(node: Node, store: Store, region: Region, budget: Any = None) -> None:
    """Write a node into a region of an open store, in place."""
    sink = _Part(store.update(), region)
    if any(isinstance(n, Source) and (n.store is store or set(n.store.paths) & set(store.paths)) for n in walk(node)):
        raise InputError(
            f"{store.name} is both read and written by this assignment: save the values to another file first"
        )
    with use_cluster(None):  # in place, and small as a rule: in this process
        prepared = prepare(node, sink, budget, name=f"write into {store.name}")
        run_prepared(prepared, run_schedule)
    sink.commit()


class _Part(SeenSink):
    """A region of another sink."""

    def __init__(self, sink: Sink, region: Region) -> None:
        self.sink, self.region = sink, region
        self.name, self.dtype, self.partial, self.order = sink.name, sink.dtype, "", sink.order
        self.shape = tuple(b - a for a, b in region)

    def _under(self, region: Region) -> Region:
        return tuple((a + start, b + start) for (a, b), (start, _) in zip(region, self.region, strict=True))


def refuse_overlap(node: Node, path: str) -> None:
    """An `InputError` where the output is one of the inputs: it would be destroyed while it is read."""
    target = os.path.realpath(path)
    for source in walk(node):
        if isinstance(source, Source):
            if source.store.name.rstrip("/") == path.rstrip("/") and is_remote(path):
                raise InputError(f"{path} is also an input: write to another name")
            for used in source.store.paths:
                real = os.path.realpath(used)
                if real == target or real.startswith(target + os.sep) or target.startswith(real + os.sep):
                    raise InputError(f"{path} is also an input ({used}): write to another name, then rename it")


def to_numpy(node: Node) -> Block:
    """The node as a NumPy array, for NumPy's own protocol."""
    if isinstance(node, Source) and node.store.resident:
        return np.asarray(node.store.read(tuple((0, n) for n in node.shape), np.empty(0, np.uint8)))
    return compute_node(node)
