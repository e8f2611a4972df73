"""One way from a node to its plan, for every verb: the plan that is shown is the plan that is run.

In: a node, the sink that it goes to (described, not yet created), a budget, a device. Out: `Prepared`, the plan and the
schedule that it shows. Nothing is created, truncated or read besides headers. The budget is what was given here, else
what `outsize.budget` set, else 80 % of what is available. With a device, passes run there where they can; `auto` comes
back to the processor where the device's budget does not suffice. Tiles and rows that a user's loop takes one by one have no
sink: they are sized and shown by the same parts (`passes/base.py: size`, `plan/schedule.py: show_plan`).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from outsize.array.device.base import DeviceBudget
from outsize.array.graph.node import Node
from outsize.array.plan.layout import Wanted
from outsize.array.plan.schedule import Schedule, make_plan
from outsize.array.plan.shares import useful_workers
from outsize.array.store.base import Block, Sink
from outsize.array.tuning import current, use
from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.memory import HOST, Allowance, Budget
from outsize.core.plan import Plan
from outsize.core.units import format_bytes, parse_bytes
from outsize.engine.cluster import Cluster, current_cluster
from outsize.engine.pool import cores_of_workers

_MOST = 2**63 - 1
"""Bytes that an address, or an offset in a file, can count."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Work that is planned and not begun."""

    wanted: tuple[Wanted, ...]
    """What is wanted, and where it goes."""
    budget: Budget
    plan: Plan
    """What it reads, writes and holds; it may not fit, which `plan.check()` says."""
    schedule: Schedule
    device: DeviceBudget | None

    @property
    def node(self) -> Node:
        """The only thing that is wanted, or the first."""
        return self.wanted[0][0]

    @property
    def sink(self) -> Sink:
        return self.wanted[0][1]

    def on_processor(self, why: Exception) -> Prepared:
        """The same work without its device."""
        note = f"on the processor: {why}"
        warnings.warn(note, stacklevel=5)
        return _make(self.wanted, self.budget, None, (note,), self.plan.name)


def prepare(
    node: Node, sink: Sink, budget: Any = None, device: Any = None, *, tf32: bool = False, name: str | None = None
) -> Prepared:
    """Plan a node into a sink; `name` is what the plan calls it."""
    return prepare_all([(node, sink)], budget, device, tf32=tf32, name=name or title(node))


def prepare_all(
    wanted: Sequence[Wanted], budget: Any = None, device: Any = None, *, tf32: bool = False, name: str
) -> Prepared:  # fmt: skip
    """Plan several nodes, each into its sink, in one walk over what they read."""
    allowed: DeviceBudget | None = None
    notes: tuple[str, ...] = ()
    joined = current_cluster()
    if joined is not None:
        return _prepare_on_cluster(tuple(wanted), resolve_budget(budget), joined, device, name)
    if device is not None or tf32:
        from outsize.array.device.find import find_device

        allowed, notes = find_device(device, tf32)
    prepared = _make(tuple(wanted), resolve_budget(budget), allowed, notes, name)
    if allowed is not None and not allowed.strict:
        try:
            prepared.plan.check()
        except BudgetError as error:
            if prepared.plan.peak() <= prepared.plan.budgets[0].bytes:
                return prepared.on_processor(error)
    return prepared


def _prepare_on_cluster(
    wanted: tuple[Wanted, ...], budget: Budget, joined: Cluster, device: Any, name: str
) -> Prepared:  # fmt: skip
    """A plan of what each worker holds, in tiles that all of them share."""
    if device is not None:
        raise InputError(f"device={device!r} is for work in this process: workers of a cluster use their processors")
    with cores_of_workers(joined.cores), use(replace(current(), spread=joined.spread, worker_cores=joined.cores)):
        prepared = _make(wanted, budget, None, (), name)
    useful = useful_workers(prepared.schedule, budget.host or 0)
    return replace(prepared, plan=replace(prepared.plan, workers=joined.spread, useful_workers=useful))


def _make(
    wanted: tuple[Wanted, ...], budget: Budget, allowed: DeviceBudget | None, notes: tuple[str, ...], name: str
) -> Prepared:  # fmt: skip
    schedule, plan = make_plan(wanted, budget, name, allowed)
    return Prepared(wanted, budget, replace(plan, notes=(*notes, *plan.notes)), schedule, allowed)


def run_prepared(prepared: Prepared, run: Callable[[Prepared], Result]) -> Result:
    """Check the plan and run it; under `auto`, on the processor where the device turns out to have too little memory."""
    prepared.plan.check()
    try:
        return run(prepared)
    except OutOfMemory as error:
        if prepared.device is None or prepared.device.strict:
            raise
        again = prepared.on_processor(error)
    again.plan.check()
    return run(again)


def refuse_endless(node: Node) -> None:
    """An `InputError` where the whole result has more bytes than any memory or file counts: no sink describes that."""
    size = math.prod(max(1, length) for length in node.shape) * node.dtype.itemsize
    if size > _MOST:
        raise InputError(
            f"{title(node)} would be {format_bytes(size)}, and no memory or file has more than {format_bytes(_MOST)}: "
            "reduce it, or take a part of it"
        )


def title(node: Node) -> str:
    """What plans and messages call a node."""
    return f"{node.label()} {node.dtype}{list(node.shape)}"


def resolve_budget(budget: int | str | Budget | None) -> Budget:
    """The budget that holds, without what arrays keep of it (`Array.cache`). The default rule sees that memory as taken."""
    if isinstance(budget, Budget):
        return budget
    joined = current_cluster()
    if joined is not None:
        return _worker_budget(budget, joined)
    from outsize.machine import current_budget, current_system
    from outsize.machine.budget import choose_budget, current_wishes
    from outsize.machine.disk import default_scratch, read_disk
    from outsize.machine.system import ReadOnce

    wishes = current_wishes()
    if budget is None and wishes.host is None:
        return current_budget()
    system = ReadOnce(
        current_system()
    )  # the host's memory is not read: all its groups and limits cost most of a millisecond
    disk = read_disk(system, wishes.scratch or default_scratch(system))
    others = choose_budget(wishes, (disk,), disk.name)
    bytes_, reason = (wishes.host or 0, "set by you") if budget is None else (parse_bytes(budget), "asked for")
    kept = kept_bytes()
    if kept:
        bytes_, reason = max(0, bytes_ - kept), f"{reason}, less {format_bytes(kept)} that cached arrays hold"
    host = Allowance(pool=HOST, bytes=bytes_, reason=reason)
    return Budget(allowances=(host, *others.allowances), scratch=others.scratch)


def _worker_budget(budget: int | str | None, joined: Cluster) -> Budget:
    """The budget of one worker; a `BudgetError` that names the worker which has less."""
    from outsize.machine import current_system
    from outsize.machine.budget import current_wishes
    from outsize.machine.disk import default_scratch

    wishes, tightest = current_wishes(), joined.tightest
    asked = wishes.host if budget is None else parse_bytes(budget)
    if asked is not None and asked > tightest.room:
        raise BudgetError(
            f"the budget of a worker is {format_bytes(asked)} and {tightest.name} has room for {format_bytes(tightest.room)} "
            f"({tightest.reason}): give a smaller budget, or that worker more memory",
            needed=asked, budget=tightest.room, culprit=tightest.name,
        )  # fmt: skip
    bytes_, reason = (tightest.room, tightest.reason) if asked is None else (asked, "of each worker")
    scratch = joined.scratch or wishes.scratch or default_scratch(current_system())
    return Budget(allowances=(Allowance(pool=HOST, bytes=bytes_, reason=reason),), scratch=scratch)


_kept: dict[int, int] = {}
"""id of memory that cached arrays hold -> its bytes."""


def keep_count(values: Block) -> None:
    """Count memory of an array as taken, until its last view goes."""
    _kept[id(values)] = values.nbytes
    weakref.finalize(values, _kept.pop, id(values), None)


def kept_bytes() -> int:
    """Bytes that cached arrays hold."""
    return sum(_kept.copy().values())
