"""The graph becomes passes, and the passes a plan that can be read before it runs.

In: the node that is wanted, the sink for it, a budget. Out: an `Itinerary` (passes in order, what each needs and
leaves) and the `Plan` that shows it. Barriers are put in levels; reductions of one level that read the same data ride
on one read. Results stay in memory while they are a small share of the budget and go to scratch files otherwise; a
source that several passes read is kept in memory where it fits. Where that makes the plan too large, it is made again
with nothing kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outsize.array.graph.barrier import Contract, Lane, Reduce, Scan, Settled
from outsize.array.graph.external_sort import Merged, Runs, RunsPass
from outsize.array.graph.node import Node, Source, structure, walk
from outsize.array.graph.rearrange import Affine
from outsize.array.graph.settle import settle
from outsize.array.passes.base import Pass
from outsize.array.passes.map import MapPass
from outsize.array.passes.product import ContractPass
from outsize.array.passes.reduction import ReducePass
from outsize.array.passes.scan import ScanPass
from outsize.array.plan.residency import Kept, Scratch, Turned
from outsize.array.store.base import Sink, Store
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning, current
from outsize.core.memory import DISK, HOST, PINNED, Allowance, Budget, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Plan, Step

if TYPE_CHECKING:
    from outsize.array.device.transfer.pipeline import Level


@dataclass(slots=True)
class Stop:
    """One pass of an itinerary."""

    work: Pass
    """The pass."""
    places: list[tuple[Node, Kept | Scratch]]
    """What it leaves behind for later passes."""
    last_use: int = 0
    """Number of the last pass that reads what it leaves."""
    resident: tuple[Part, ...] = ()
    """What is held in memory meanwhile besides the pass itself."""
    scratch: int = 0
    """Bytes of scratch files that exist meanwhile."""


@dataclass(slots=True)
class Itinerary:
    """Passes in order, and the bindings they share."""

    stops: list[Stop] = field(default_factory=list)
    bindings: dict[Node, Store] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=current)
    final: Sink | None = None
    """Where the wanted node goes."""
    smallest: int = 0
    """Smallest budget in bytes that works."""
    level: Level | None = None
    """The device that takes part."""
    notes: list[str] = field(default_factory=list)
    """Why passes run where they do."""


def make_plan(
    root: Node, sink: Sink, budget: Budget, name: str, reason: str, level: Level | None = None
) -> tuple[Itinerary, Plan]:
    """The itinerary and its plan; the plan may not fit, which `plan.check()` says."""
    host, root = budget.host or 0, settle(root)
    chosen: Itinerary | None = None
    tiny = current().tiny_result
    for share in (3, 8, 0):
        trip = _lay_out(root, sink, host // share if share else tiny, keep_sources=share == 3, level=level)
        if all(stop.work.size(host - _held(stop)) for stop in _in_turn(trip)):
            chosen = trip
            break
    bare = _lay_out(root, sink, tiny, keep_sources=False, level=level)
    smallest = max((stop.work.smallest() + _held(stop) for stop in _in_turn(bare)), default=0)
    least = max((stop.work.device_peak for stop in bare.stops), default=0)
    if chosen is None:
        chosen = bare
        if host < smallest:  # else all stay bare: what BLAS took generously in one pass, a later one lacks
            for stop in _in_turn(chosen):
                stop.work.size(host - _held(stop))
    chosen.smallest = smallest
    allowances = [Allowance(pool=HOST, bytes=host, reason=reason)]
    if budget.disk is not None and any(stop.scratch for stop in chosen.stops):
        allowances.append(Allowance(pool=DISK, bytes=budget.disk, reason=f"scratch in {budget.scratch}"))
    steps = tuple(_describe(stop, level) for stop in chosen.stops)
    notes = tuple(dict.fromkeys(chosen.notes))
    if level is None or not any(stop.work.device_peak for stop in chosen.stops):
        return chosen, Plan(name=name, steps=steps, budgets=tuple(allowances), smallest=smallest, notes=notes)
    allowances.append(Allowance(pool=level.device.pool, bytes=level.budget, reason=level.reason))
    if level.pinned is not None:
        allowances.append(Allowance(pool=PINNED, bytes=level.pinned, reason="set by you"))
    return chosen, Plan(
        name=name, steps=steps, budgets=tuple(allowances), smallest=smallest, notes=notes,
        smallest_device=least + level.device.outside,
    )  # fmt: skip


def _held(stop: Stop) -> int:
    return sum(part.bytes for part in stop.resident)


def _in_turn(trip: Itinerary) -> Iterator[Stop]:
    """Stops to be sized one after another: each is told what BLAS keeps from those before it."""
    packed = 0
    for stop in trip.stops:
        stop.work.packed_before = packed
        yield stop
        packed = stop.work.packed


def _describe(stop: Stop, level: Level | None) -> Step:
    step = stop.work.step(stop.resident)
    peaks = list(step.peaks)
    if stop.scratch:
        peaks.append(Peak(pool=DISK, bytes=stop.scratch, known=Known.EXACT))
    if level is not None and stop.work.device_peak:
        held = stop.work.device_peak + level.device.outside
        peaks.append(Peak(pool=level.device.pool, bytes=held, known=Known.BOUND))
        if level.pinned is not None:
            peaks.append(Peak(pool=PINNED, bytes=stop.work.locked, known=Known.EXACT))
    return replace(step, peaks=tuple(peaks))


def _lay_out(root: Node, sink: Sink, keep: int, *, keep_sources: bool, level: Level | None) -> Itinerary:
    trip = Itinerary(final=sink, level=level)
    digests: dict[int, str] = {}
    structure(root, digests)
    nodes = walk(root)
    groups = _group(nodes, digests, trip.tuning.tiny_result * 64)
    if keep_sources:
        _keep_sources(trip, nodes, groups, root, min(keep, trip.tuning.kept_sources))
    target, turned = _see_through(root, sink)
    for group in groups:
        _add_barrier(trip, group, target, turned, keep, nodes, digests)
    if target is None:
        trip.stops.append(Stop(_make_pass([(root, sink)], trip), []))
    _fill_in_lifetimes(trip)
    return trip


def _see_through(root: Node, sink: Sink) -> tuple[Node | None, Sink]:
    """The barrier whose pass can write the final sink itself, seen through a mere turning of axes."""
    if root.barrier:
        return root, sink
    if not isinstance(root, Affine) or not root.inputs[0].barrier:
        return None, sink
    below = root.inputs[0]
    targets = tuple(target for target, _, _ in root.axes)
    plain = all((t is None and n == 1) or (t is not None and (start, step) == (0, 1) and root.shape[t] == n)
                for (t, start, step), n in zip(root.axes, below.shape, strict=True))  # fmt: skip
    if isinstance(below, Lane) and list(targets) != sorted(t for t in targets if t is not None):
        return None, sink  # whole lanes across the output's rows: turned in a pass of its own, in long runs
    added = [axis for axis in range(root.ndim) if axis not in targets]
    if not plain or any(root.shape[axis] != 1 for axis in added):
        return None, sink
    return below, Turned(sink, below.shape, targets)


def _group(nodes: list[Node], digests: dict[int, str], small: int) -> list[list[Node]]:
    """Barriers in the order they run; reductions that ride together share a group."""
    level: dict[int, int] = {}
    seen: dict[str, Node] = {}
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        below = max((level[id(child)] for child in node.inputs), default=0)
        level[id(node)] = below + 1 if node.barrier else below
        if not node.barrier or digests[id(node)] in seen:
            continue
        seen[digests[id(node)]] = node
        key: tuple[object, ...] = (level[id(node)], id(node))
        if isinstance(node, Reduce) and node.nbytes <= small:
            key = (level[id(node)], "reduce", node.inputs[0].shape, _sources(node))
        elif isinstance(node, Reduce):
            key = (level[id(node)], "reduce", node.inputs[0].shape, _sources(node), node.axes)
        groups.setdefault(key, []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # type: ignore[arg-type, return-value]


def _sources(node: Node) -> frozenset[int]:
    """The stores that are read below a node, down to the next barrier."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = list(node.inputs)
    while stack:
        child = stack.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, Source) and not child.store.resident:
            found.add(id(child.store))
        if not child.barrier:
            stack.extend(child.inputs)
    return frozenset(found)


def _keep_sources(trip: Itinerary, nodes: list[Node], groups: list[list[Node]], root: Node, keep: int) -> None:
    """Read a source into memory first where several passes need it and it is small enough."""
    users: dict[int, int] = {}
    for members in [*groups, [root]]:
        used = frozenset().union(*(_sources(member) for member in members))
        for store in used:
            users[store] = users.get(store, 0) + 1
    for node in nodes:
        if isinstance(node, Source) and users.get(id(node.store), 0) > 1 and 0 < node.nbytes <= keep:
            keep -= node.nbytes
            place = Kept(node.shape, node.dtype, node.store.name)
            trip.stops.append(Stop(MapPass(node, place, trip.bindings.copy(), trip.tuning), [(node, place)]))
            trip.bindings[node] = place.store()


def _add_barrier(
    trip: Itinerary, group: list[Node], target: Node | None, turned: Sink, keep: int, nodes: list[Node],
    digests: dict[int, str],
) -> None:  # fmt: skip
    held = sum(place.nbytes for stop in trip.stops for _, place in stop.places if isinstance(place, Kept))
    outputs: list[tuple[Node, Sink]] = []
    places: list[tuple[Node, Kept | Scratch]] = []
    for node in group:
        if node is target:
            outputs.append((node, turned))
            continue
        stays = node.nbytes <= trip.tuning.tiny_result or held + node.nbytes <= keep
        place = (Kept if stays else Scratch)(node.shape, node.dtype, node.label())
        held += node.nbytes if stays else 0
        outputs.append((node, place))
        places.append((node, place))
    trip.stops.append(Stop(_make_pass(outputs, trip), places))
    for node, place in places:
        store = place.store()  # one for all nodes that are the same: that is how the run knows them
        trip.bindings.update({twin: store for twin in nodes if digests[id(twin)] == digests[id(node)]})


def _make_pass(outputs: list[tuple[Node, Sink]], trip: Itinerary) -> Pass:
    node, sink = outputs[0]
    bindings = trip.bindings
    if trip.level is not None and all(math.prod(made.shape) for made, _ in outputs):
        from outsize.array.device.placement import make_twin

        twin = make_twin(outputs, bindings, trip.tuning, trip.level, trip.notes)
        if twin is not None:
            return twin
    if isinstance(node, Reduce):
        return ReducePass(outputs, bindings, trip.tuning)  # type: ignore[arg-type]
    if isinstance(node, Contract):
        return ContractPass(node, sink, bindings, trip.tuning)
    if isinstance(node, Scan):
        return ScanPass(node, sink, bindings, trip.tuning)
    if isinstance(node, Runs):
        return RunsPass(node, sink, bindings, trip.tuning)
    assert isinstance(node, Lane | Settled | Merged) or not node.barrier, node
    return MapPass(node, sink, bindings, trip.tuning)


def _reads_of(work: Pass, bound: Iterable[Node]) -> set[Node]:
    """Which of the bound nodes a pass reads."""
    wanted = set(bound)
    made = {node for node, _ in work.outputs}
    found: set[Node] = set()
    stack = [child for node in made for child in node.inputs] + [
        node for node in made if not node.barrier and node in wanted
    ]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node in wanted:
            found.add(node)
            continue
        stack.extend(node.inputs)
    return found


def _fill_in_lifetimes(trip: Itinerary) -> None:
    """When each result is last read, and so what is held beside every pass."""
    made: dict[Node, int] = {}
    for number, stop in enumerate(trip.stops):
        for node, _ in stop.places:
            for twin, store in trip.bindings.items():
                if store is trip.bindings[node]:
                    made[twin] = number
            made[node] = number
    for number, stop in enumerate(trip.stops):
        stop.last_use = max(stop.last_use, number)
        for node in _reads_of(stop.work, made):
            if made[node] < number:
                trip.stops[made[node]].last_use = max(trip.stops[made[node]].last_use, number)
    for number, stop in enumerate(trip.stops):
        parts, scratch = [], 0
        for other_number, other in enumerate(trip.stops):
            if not other_number <= number <= other.last_use:
                continue
            for _, place in other.places:
                if isinstance(place, Kept):
                    parts.append(Part(name=f"{place.name} kept", bytes=place.nbytes, known=Known.EXACT))
                else:
                    scratch += place.nbytes
        for _, sink in stop.work.outputs:
            under = sink.sink if isinstance(sink, Turned) else sink
            if isinstance(under, MemorySink) and under is trip.final and under.counted:
                size = math.prod(under.shape) * under.dtype.itemsize
                parts.append(Part(name="the result", bytes=size, known=Known.EXACT))
        stop.resident, stop.scratch = tuple(part for part in parts if part.bytes), scratch
