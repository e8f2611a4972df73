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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from outsize.array.device.budget import DeviceBudget
from outsize.array.graph.node import Node
from outsize.array.plan.schedule import Schedule, make_plan
from outsize.array.store.base import Sink
from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.memory import HOST, Allowance, Budget
from outsize.core.plan import Plan
from outsize.core.units import format_bytes, parse_bytes

_MOST = 2**63 - 1
"""Bytes that an address, or an offset in a file, can count."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Work that is planned and not begun."""

    node: Node
    """What is wanted."""
    sink: Sink
    """Where it goes."""
    budget: Budget
    """What may be held."""
    plan: Plan
    """What it reads, writes and holds; it may not fit, which `plan.check()` says."""
    schedule: Schedule
    """The passes of the plan."""
    device: DeviceBudget | None
    """The device that takes part."""

    def on_processor(self, why: Exception) -> Prepared:
        """The same work without its device."""
        note = f"on the processor: {why}"
        warnings.warn(note, stacklevel=5)
        return _make(self.node, self.sink, self.budget, None, (note,), self.plan.name)


def prepare(
    node: Node, sink: Sink, budget: Any = None, device: Any = None, *, tf32: bool = False, name: str | None = None
) -> Prepared:
    """Plan a node into a sink; `name` is what the plan calls it."""
    allowed: DeviceBudget | None = None
    notes: tuple[str, ...] = ()
    if device is not None or tf32:
        from outsize.array.device.find import find_device

        allowed, notes = find_device(device, tf32)
    prepared = _make(node, sink, resolve_budget(budget), allowed, notes, name or title(node))
    if allowed is not None and not allowed.strict:
        try:
            prepared.plan.check()
        except BudgetError as error:
            if prepared.plan.peak() <= prepared.plan.budgets[0].bytes:
                return prepared.on_processor(error)
    return prepared


def _make(
    node: Node, sink: Sink, budget: Budget, allowed: DeviceBudget | None, notes: tuple[str, ...], name: str
) -> Prepared:  # fmt: skip
    schedule, plan = make_plan(node, sink, budget, name, allowed)
    return Prepared(node, sink, budget, replace(plan, notes=(*notes, *plan.notes)), schedule, allowed)


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
    """The budget that holds."""
    if isinstance(budget, Budget):
        return budget
    from outsize.machine import current_budget

    current = current_budget()
    if budget is None:
        return current
    others = tuple(a for a in current.allowances if a.pool != HOST)
    asked = Allowance(pool=HOST, bytes=parse_bytes(budget), reason="asked for")
    return Budget(allowances=(asked, *others), scratch=current.scratch)
