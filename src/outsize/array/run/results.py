"""From a node to its result: plan it, run it into a file, into memory, or into a region of an open store.

In: a node, a target, a budget. Out: a `Plan`, a store, or a NumPy array. The budget is what was given here, else what
`outsize.budget` set, else 80 % of what is available. With a device, passes run there where they can (`device/twin.py`);
`auto` comes back to the processor where the device's budget does not suffice.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from outsize.array.graph.node import Node, Source, walk
from outsize.array.plan.residency import Kept, Sketch
from outsize.array.plan.schedule import Itinerary, make_plan
from outsize.array.run.execute import digest_of, run_itinerary
from outsize.array.run.journal import Journal
from outsize.array.store.base import Block, Region, Sink, Store
from outsize.array.store.formats.memory import MemorySink
from outsize.array.store.io.partial import JOURNAL, hold, partial_path
from outsize.array.store.io.view import Seen
from outsize.array.store.keys import split_key
from outsize.array.tuning import current
from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.events import Listener
from outsize.core.memory import HOST, Allowance, Budget
from outsize.core.plan import Plan
from outsize.core.units import format_bytes, parse_bytes
from outsize.engine.pool import make_buffer

_MOST = 2**63 - 1
"""Bytes that an address, or an offset in a file, can count."""


def resolve_budget(budget: int | str | Budget | None) -> tuple[Budget, str]:
    """The budget that holds, and why it is this one."""
    if isinstance(budget, Budget):
        return budget, _reason(budget)
    from outsize.machine import current_budget

    current = current_budget()
    if budget is None:
        return current, _reason(current)
    others = tuple(a for a in current.allowances if a.pool != HOST)
    asked = Allowance(pool=HOST, bytes=parse_bytes(budget), reason="asked for")
    return Budget(allowances=(asked, *others), scratch=current.scratch), "asked for"


def _reason(budget: Budget) -> str:
    return next((a.reason for a in budget.allowances if a.pool == HOST), "")


Result = TypeVar("Result")
Planner = Callable[[Node, Sink, Budget, str, str], tuple[Itinerary, Plan]]
"""`make_plan` with the device already said."""


def _on(device: Any, tf32: bool, work: Callable[[Planner], Result]) -> Result:
    """Do some work with a device; under `auto`, on the processor where the device has too little memory for it."""
    if device is None and not tf32:
        return work(make_plan)
    from outsize.array.device.target import find_level

    level, notes = find_level(device, tf32)
    try:
        return work(_planner(level, notes))
    except (BudgetError, OutOfMemory) as error:
        plan = getattr(error, "plan", None)
        if level is None or level.strict or (plan is not None and plan.peak() > (plan.budgets[0].bytes)):
            raise
        note = f"on the processor: {error}"
    warnings.warn(note, stacklevel=4)
    return work(_planner(None, (note,)))


def _planner(level: Any, notes: tuple[str, ...]) -> Planner:
    def planner(node: Node, sink: Sink, budget: Budget, name: str, reason: str) -> tuple[Itinerary, Plan]:
        trip, plan = make_plan(node, sink, budget, name, reason, level)
        return trip, replace(plan, notes=(*notes, *plan.notes))

    return planner


def plan_node(
    node: Node, budget: Any = None, name: str | None = None, *, device: Any = None, tf32: bool = False
) -> Plan:
    """The plan of writing a node to a .npy file."""
    refuse_endless(node)
    given, reason = resolve_budget(budget)
    sketch = Sketch(node.shape, node.dtype)
    return _on(device, tf32, lambda planner: planner(node, sketch, given, name or _title(node), reason)[1])


def _title(node: Node) -> str:
    return f"{node.label()} {node.dtype}{list(node.shape)}"


def compute_node(
    node: Node, budget: Any = None, listener: Listener | None = None, *, device: Any = None, tf32: bool = False,
    out: Block | None = None,
) -> Block:  # fmt: skip
    """The node as a NumPy array: a new one, or `out`."""
    return _on(device, tf32, lambda planner: _compute(node, budget, listener, planner, out))


def _compute(node: Node, budget: Any, listener: Listener | None, planner: Planner, out: Block | None) -> Block:
    refuse_endless(node)
    given, reason = resolve_budget(budget)
    if out is not None:
        return _compute_into(node, given, reason, listener, planner, out)
    sink = Kept(node.shape, node.dtype, "result")
    trip, plan = planner(node, sink, given, f"compute {_title(node)}", reason)
    if sink.nbytes > (given.host or 0):
        raise BudgetError(
            f"the result alone is {format_bytes(sink.nbytes)} and the budget {format_bytes(given.host)}: "
            f"write it to disk with .save(path), or give compute(budget=...) at least {format_bytes(trip.smallest)}",
            needed=plan.peak(), budget=given.host, smallest=trip.smallest, culprit="the result", plan=plan,
        )  # fmt: skip
    plan.check()
    sink.begin(make_buffer(sink.nbytes))
    run_itinerary(trip, plan, given.host or 0, given.scratch, listener, None)
    return sink.array


def _compute_into(
    node: Node, given: Budget, reason: str, listener: Listener | None, planner: Planner, out: Block
) -> Block:
    """Into an array of the caller's, whose memory is not ours to count."""
    if out.shape != node.shape or out.dtype != node.dtype:
        raise InputError(f"out is {out.dtype}{list(out.shape)}, the result {node.dtype}{list(node.shape)}")
    for source in walk(node):
        if isinstance(source, Source) and source.store.resident and np.may_share_memory(to_numpy(source), out):
            raise InputError("out shares memory with an input: it would be read after it is written")
    sink = MemorySink(out, "out", counted=False)
    trip, plan = planner(node, sink, given, f"compute {_title(node)}", reason)
    plan.check()
    run_itinerary(trip, plan, given.host or 0, given.scratch, listener, None)
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
    with hold(target):
        return _on(device, tf32, lambda planner: _save(node, path, budget, listener, planner, resume, options))


def _save(
    node: Node, path: str, budget: Any, listener: Listener | None, planner: Planner, resume: bool, options: Any
) -> Store:
    from outsize.array.store.registry import create_sink

    given, reason = resolve_budget(budget)
    tuning = current()
    left = (
        node.nbytes >= tuning.journaled and Journal.header(partial_path(split_key(path, None)[0]) + JOURNAL) is not None
    )
    resume = resume and left  # without its journal nobody knows what an unfinished output is of
    sink = create_sink(path, node.shape, node.dtype, resume=resume, **options)
    journal = Journal(sink.partial + JOURNAL, tuning) if sink.partial and node.nbytes >= tuning.journaled else None
    if journal is not None and budget is None and resume:
        given = _earlier_budget(journal, given)
    try:
        trip, plan = planner(node, sink, given, f"save {os.path.basename(path)}", reason)
        plan.check()
    except (BudgetError, InputError):
        if not resume:  # what an earlier run has finished waits for a budget that suffices
            _abandon(sink, journal)
        raise
    if journal is not None:
        if not resume:
            journal.remove()
        taken_up = journal.begin(digest_of(node, trip, plan), given.host or 0)
        if resume and not taken_up:  # of other work: pages that wait beside it must not come into this one
            _abandon(sink, journal)
            return _save(node, path, budget, listener, planner, False, options)
    try:
        run_itinerary(trip, plan, given.host or 0, given.scratch, listener, journal)
    except KeyboardInterrupt:
        if journal is None:
            _abandon(sink, journal)
        raise
    except BaseException:
        _abandon(sink, journal)
        raise
    store = sink.commit()
    if journal is not None:
        journal.remove()
    return store


def _abandon(sink: Sink, journal: Journal | None) -> None:
    sink.abort()
    if journal is not None:
        journal.remove()


def _earlier_budget(journal: Journal, given: Budget) -> Budget:
    """Take the budget of an interrupted run where it is not larger than ours, so that its tiles fit ours."""
    header = Journal.header(journal.folder)
    earlier = header.get("budget") if header else None
    if not isinstance(earlier, int) or earlier > (given.host or 0):
        return given
    allowances = tuple(
        Allowance(pool=HOST, bytes=earlier, reason="as in the run that is taken up") if a.pool == HOST else a
        for a in given.allowances
    )
    return Budget(allowances=allowances, scratch=given.scratch)


def update_node(node: Node, store: Store, region: Region, budget: Any = None) -> None:
    """Write a node into a region of an open store, in place."""
    given, reason = resolve_budget(budget)
    sink = _Part(store.update(), region)
    if any(isinstance(n, Source) and (n.store is store or set(n.store.paths) & set(store.paths)) for n in walk(node)):
        raise InputError(
            f"{store.name} is both read and written by this assignment: save the values to another file first"
        )
    trip, plan = make_plan(node, sink, given, f"write into {store.name}", reason)
    plan.check()
    run_itinerary(trip, plan, given.host or 0, given.scratch, None, None)
    sink.commit()


class _Part(Seen):
    """A region of another sink."""

    def __init__(self, sink: Sink, region: Region) -> None:
        self.sink, self.region = sink, region
        self.name, self.dtype, self.partial, self.order = sink.name, sink.dtype, "", sink.order
        self.shape = tuple(b - a for a, b in region)
        self.granule = tuple(min(1, n) for n in self.shape)

    def _under(self, region: Region) -> Region:
        return tuple((a + start, b + start) for (a, b), (start, _) in zip(region, self.region, strict=True))


def refuse_endless(node: Node) -> None:
    """An `InputError` where the whole result has more bytes than any memory or file counts."""
    size = math.prod(max(1, length) for length in node.shape) * node.dtype.itemsize
    if size > _MOST:
        raise InputError(
            f"{_title(node)} would be {format_bytes(size)}, and no memory or file has more than {format_bytes(_MOST)}: "
            "reduce it, or take a part of it"
        )


def refuse_overlap(node: Node, path: str) -> None:
    """An `InputError` where the output is one of the inputs: it would be destroyed while it is read."""
    target = os.path.realpath(path)
    for source in walk(node):
        if isinstance(source, Source):
            for used in source.store.paths:
                real = os.path.realpath(used)
                if real == target or real.startswith(target + os.sep) or target.startswith(real + os.sep):
                    raise InputError(f"{path} is also an input ({used}): write to another name, then rename it")


def to_numpy(node: Node) -> Block:
    """The node as a NumPy array, for NumPy's own protocol."""
    if isinstance(node, Source) and node.store.resident:
        return np.asarray(node.store.read(tuple((0, n) for n in node.shape), np.empty(0, np.uint8)))
    return compute_node(node)
