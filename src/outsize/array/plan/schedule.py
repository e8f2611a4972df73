"""The graph becomes passes, and the passes a plan that can be read before it runs.

In: the nodes that are wanted, the sinks for them, a budget. Out: a `Schedule` (sized passes in order, what each needs and
leaves) and the `Plan` that shows it. The passes are laid out (`layout.py`) in several ways: with the work of short lanes inside
the passes that read it, with what is read again in memory, in whole or in part, and without. The way that moves least and
fits is taken; where none fits, the barest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outsize.array.device.base import DeviceBudget
from outsize.array.device.local_work import can_make
from outsize.array.graph.barrier import Barrier, Reduce
from outsize.array.graph.local import Together, cut_rows, make_local, unify
from outsize.array.graph.node import Source, nodes_below, walk
from outsize.array.graph.settle import settle
from outsize.array.graph.turn import turn_lanes
from outsize.array.passes.base import Pass, Room, Sized, size_barely
from outsize.array.plan.floor import find_floor
from outsize.array.plan.layout import Drafts, Layout, Place, UnsizedPass, Wanted, lay_out
from outsize.array.store.base import Sink
from outsize.array.tuning import Tuning, current
from outsize.core.errors import InputError
from outsize.core.memory import DISK, HOST, PINNED, Allowance, Budget, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Plan, Step
from outsize.engine.pool import round_to_pages


@dataclass(frozen=True, slots=True)
class ScheduledPass:
    """One pass of a schedule."""

    sized: Sized
    """The pass and its sizes."""
    places: tuple[Place, ...] = ()
    """What it leaves behind for later passes."""
    last_use: int = 0
    """Number of the last pass that reads what it leaves."""
    resident: tuple[Part, ...] = ()
    """What is held in memory meanwhile besides the pass itself."""
    scratch: int = 0
    """Bytes of scratch files that exist meanwhile."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sized passes in order."""

    passes: tuple[ScheduledPass, ...]
    """In the order in which they run."""
    tuning: Tuning
    """What they were sized by."""
    device: DeviceBudget | None
    """The device that takes part."""


def make_plan(
    wanted: Sequence[Wanted], budget: Budget, name: str, device: DeviceBudget | None = None
) -> tuple[Schedule, Plan]:  # fmt: skip
    """The schedule and its plan; the plan may not fit, which `plan.check()` says."""
    host, tuning = budget.host or 0, current()
    top, sinks = unify(Together.of([node for node, _ in wanted])), [sink for _, sink in wanted]
    plain, local = _forms(top, host, tuning, device)
    drafts = Drafts(tuning, device)
    bare = lay_out(plain, sinks, tuning.tiny_result, None, drafts)
    barest, _ = _size_all(bare, lambda work, room: (size_barely(work, room.packed), True), host)
    smallest = max((one.sized.peak + sum(part.bytes for part in one.resident) for one in barest), default=0)
    least = max((one.sized.device_bytes for one in barest), default=0)
    found = [each] if local is not None and (each := _fit_local(local, sinks, host, drafts)) else []
    if found and max(one.sized.worker_bytes for one in found[0][1]) > 4 * tuning.chunk:
        del found[0]  # lanes so far apart that a whole one is most of the array: nothing would run beside it
    wide = bool(found) and local is not None and device is None and _is_wide(local, found[0][1], tuning)
    if wide or not (found and _at_once(*found[0])):
        each = _fit(plain, sinks, host, drafts)
        found = [*([each] if each and wide else []), *found, *([each] if each and not wide else [])]
    if host >= smallest and not (found and all(_reads_once(one) for _, passes in found[-1:] for one in passes)):
        turned = turn_lanes(top) if device is None else top
        each = None if turned is top else _fit(settle(turned), sinks, host, drafts)
        found += [each] if each else []
    if found:
        layout, passes = min(found, key=lambda each: _cost(each[1]))
    else:  # what BLAS took generously in one pass, a later one may lack: then all stay bare
        layout, passes = bare, barest if host >= smallest else _size_all(bare, drafts.size, host)[0]
    floor, closer = find_floor(top, sinks, passes, host, lambda: _comfort(layout, tuning.modest))
    notes = tuple(dict.fromkeys([*layout.notes, *([closer] if closer else [])]))
    plan = show_plan(passes, budget, name, device, smallest, least, notes)
    return Schedule(passes, tuning, device), replace(plan, floor=floor)


def _forms(
    top: Together, host: int, tuning: Tuning, device: DeviceBudget | None
) -> tuple[Together, Together | None]:  # fmt: skip
    """The graph with a pass for every barrier, and with those of short lanes inside the passes that read them."""
    longest = min(tuning.local_lane, host // 8)
    if device is None:
        local = make_local(top, longest)
        return settle(top), None if local is top else cut_rows(settle(local))
    there = device.device
    local = make_local(top, min(longest, device.room // 64), lambda node: can_make(node, there))
    return settle(top), None if local is top else settle(local)


def _fit_local(
    top: Together, sinks: Sequence[Sink], host: int, drafts: Drafts
) -> tuple[Layout, tuple[ScheduledPass, ...]] | None:
    """As `_fit`, but None where a device that was named cannot do it so: with a pass for each reduction it may."""
    try:
        return _fit(top, sinks, host, drafts)
    except InputError:
        if drafts.device is None:
            raise
        return None


def _fit(
    top: Together, sinks: Sequence[Sink], host: int, drafts: Drafts
) -> tuple[Layout, tuple[ScheduledPass, ...]] | None:
    """The cheapest passes of a graph that fit, with as much kept in memory as the budget allows; None where none fit."""
    found: list[tuple[Layout, tuple[ScheduledPass, ...]]] = []
    for share in (0,) if drafts.tuning.spread else (3, 8, 0):  # workers of a cluster share only what lies in storage
        keep = host // share if share else drafts.tuning.tiny_result
        layout = lay_out(top, sinks, keep, None, drafts)
        passes, fits = _size_all(layout, drafts.size, host, give_up=True)
        if fits:
            found.append((layout, passes))
            break
    if drafts.tuning.spread:
        return found[0] if found else None
    again = _read_again(layout) if found else []
    if again or (found and not all(_reads_once(one) for one in passes)):
        heads = _choose_heads(layout, again, host) if again else {}
        small = share == 3 and any(isinstance(node, Source) and 0 < node.nbytes <= keep for node in walk(top))
        for residents in ([heads] if heads else []) + ([{}] if small else []):
            layout = lay_out(top, sinks, keep, residents, drafts)
            passes, fits = _size_all(layout, drafts.size, host, give_up=True)
            if fits and all(_fills(one) for one in passes):
                found.append((layout, passes))
    return min(found, key=lambda each: (_cost(each[1]), len(each[1])), default=None)


def _sources(one: UnsizedPass) -> list[Source]:
    """The sources that a pass reads."""
    starts, made = [node for node, _ in one.work.outputs], one.work.bindings
    below = nodes_below(starts, made.__contains__)
    return [node for node in below if isinstance(node, Source) and node not in made and node.nbytes]


def _at_once(layout: Layout, passes: tuple[ScheduledPass, ...]) -> bool:
    """True where one pass reads all sources, once, and the others what it has left in memory: none can do with less."""
    return sum(bool(_sources(one)) for one in layout.passes) == 1 and all(_reads_once(one) for one in passes)


def _read_again(layout: Layout) -> list[Source]:
    """The sources on disk that more than one pass reads."""
    passes: Counter[Source] = Counter()
    for one in layout.passes:
        passes.update(source for source in _sources(one) if not source.store.resident)
    return [source for source, number in passes.items() if number > 1]


def _choose_heads(layout: Layout, again: list[Source], host: int) -> dict[Source, int]:
    """How many first rows of each source stay in memory between passes: what is left beside passes of a modest size."""
    tuning = layout.drafts.tuning
    limit = min(tuning.modest, host // 2)
    held = max((sum(part.bytes for part in one.resident) for one in layout.passes), default=0)
    room = host - _comfort(layout, limit) - held
    rows: dict[Source, int] = {}
    for source in sorted(again, key=lambda node: node.nbytes):
        axis = source.store.order[0] if source.store.order else 0
        length = source.shape[axis]
        row = source.nbytes // length
        number = min(length, room // row)
        while number > 0 and round_to_pages(number * row) > room:  # whole huge pages
            number -= 1
        if number > 0 and number * row >= tuning.small:
            rows[source] = number
            room -= round_to_pages(number * row)
    return rows


def _comfort(layout: Layout, limit: int) -> int:
    """Bytes that the largest pass would like to have, up to a limit: it is sized for what it is given, and uses less."""
    peaks = [layout.drafts.size(one.work, Room(limit))[0].peak for one in layout.passes]
    return min(limit, max(peaks, default=0) * 8 // 5)


def _fills(one: ScheduledPass) -> bool:
    """True where a pass reads exactly its own chunk of each source that it is to leave in memory: chunks cover it once."""
    work = one.sized.work
    heads = [place.filling for place in one.places if place.filling is not None]
    return all(
        {region: times for (store, region), times in work.probe(chunk).reads.items() if store is head} == {chunk: 1}
        for chunk, _ in work.kinds(one.sized.grid, one.sized.chunk)
        for head in heads
    )


def _reads_once(one: ScheduledPass) -> bool:
    """True where a pass costs about as little as any."""
    sized, work = one.sized, one.sized.work
    return bool(work.cost(sized) <= work.enough(sized))


def _cost(passes: tuple[ScheduledPass, ...]) -> float:
    """What passes move, in bytes, and what could be moved while transfers begin."""
    return sum(one.sized.work.cost(one.sized) + one.sized.work.writes() for one in passes)


def _is_wide(local: Together, passes: tuple[ScheduledPass, ...], tuning: Tuning) -> bool:
    """True where reductions of arrays in memory cross them so that the smallest piece is made of more than the caches hold: they
    would be made in crumbs, or again for every tile. A pass of their own costs no disk, and is taken if it moves no more."""
    lanes = [node for node in walk(local) if isinstance(node, Barrier) and node.local]
    if not all(isinstance(node, Reduce) and isinstance(node.inputs[0], Source) for node in lanes):
        return False
    barest = [(one.sized.work, size_barely(one.sized.work, 0)) for one in passes]
    looks = [sum(frame.looks.values()) for work, sized in barest for frame, _ in work.frames(sized)]
    return max(looks, default=0) > 4 * tuning.slice


def show_plan(
    passes: tuple[ScheduledPass, ...], budget: Budget, name: str, device: DeviceBudget | None, smallest: int, least: int,
    notes: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan that shows sized passes; `smallest` and `least` are what the barest of them take of host and device."""
    reason = next((a.reason for a in budget.allowances if a.pool == HOST), "")
    allowances = [Allowance(pool=HOST, bytes=budget.host or 0, reason=reason)]
    if budget.disk is not None and any(one.scratch for one in passes):
        allowances.append(Allowance(pool=DISK, bytes=budget.disk, reason=f"scratch in {budget.scratch}"))
    there = device is not None and any(one.sized.device_bytes for one in passes)
    if device is not None and there:
        allowances.append(Allowance(pool=device.device.pool, bytes=device.budget, reason=device.reason))
        if device.pinned is not None:
            allowances.append(Allowance(pool=PINNED, bytes=device.pinned, reason="set by you"))
    return Plan(
        name=name, steps=tuple(_describe(one, device) for one in passes), budgets=tuple(allowances), smallest=smallest,
        notes=notes,
        smallest_device=least + device.device.outside if device is not None and there else None,
    )  # fmt: skip


def _size_all(
    layout: Layout, sizing: Callable[[Pass, Room], tuple[Sized, bool]], host: int, *, give_up: bool = False
) -> tuple[tuple[ScheduledPass, ...], bool]:
    """All passes sized one after another, and whether all fit: each is told what BLAS keeps from those before it. `give_up`
    stops at the first that does not."""
    made: list[ScheduledPass] = []
    packed, fits = 0, True
    for one in layout.passes:
        sized, fitted = sizing(one.work, Room(host - one.held, packed))
        packed, fits = sized.packed, fits and fitted
        made.append(ScheduledPass(sized, one.places, one.last_use, one.resident, one.scratch))
        if give_up and not fits:
            break
    return tuple(made), fits


def _describe(one: ScheduledPass, device: DeviceBudget | None) -> Step:
    step = one.sized.step(one.resident)
    peaks = list(step.peaks)
    if one.scratch:
        peaks.append(Peak(pool=DISK, bytes=one.scratch, known=Known.EXACT))
    return replace(step, peaks=(*peaks, *device_peaks(one.sized, device)))


def device_peaks(sized: Sized, device: DeviceBudget | None) -> tuple[Peak, ...]:
    """What a sized pass holds of a device and of page-locked memory."""
    if device is None or not sized.device_bytes:
        return ()
    held = sized.device_bytes + device.device.outside
    there = Peak(pool=device.device.pool, bytes=held, known=Known.BOUND)
    return (there,) if device.pinned is None else (there, Peak(pool=PINNED, bytes=sized.locked, known=Known.EXACT))
