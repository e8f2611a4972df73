"""The graph becomes passes, and the passes a plan that can be read before it runs.

In: the node that is wanted, the sink for it, a budget. Out: a `Schedule` (sized passes in order, what each needs and
leaves) and the `Plan` that shows it. Barriers are put in ranks; reductions of one rank that read the same data ride
on one read. Results stay in memory while they are a small share of the budget and go to scratch files otherwise; a
source that several passes read is kept in memory where it fits. Where that makes the plan too large, it is made again
with nothing kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from outsize.array.device.budget import DeviceBudget
from outsize.array.graph.barrier import Contract, Lane, Reduce, Scan, Settled
from outsize.array.graph.external_sort import Merged, Runs
from outsize.array.graph.node import Node, Source, structure, walk
from outsize.array.graph.rearrange import Affine
from outsize.array.graph.settle import settle
from outsize.array.passes.base import Pass, Room, Sized, size, size_barely
from outsize.array.passes.map import MapPass
from outsize.array.passes.product import ContractPass
from outsize.array.passes.reduction import ReducePass
from outsize.array.passes.runs import RunsPass
from outsize.array.passes.scan import ScanPass
from outsize.array.plan.residency import Kept, Scratch, Turned
from outsize.array.store.base import Sink, Store
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning, current
from outsize.core.memory import DISK, HOST, PINNED, Allowance, Budget, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Plan, Step


@dataclass(frozen=True, slots=True)
class Place:
    """What a pass leaves behind for later passes: descriptions, of which the run makes the real ones."""

    node: Node
    """What is left."""
    sink: Kept | Scratch
    """Where it is written to."""
    store: Store
    """What later passes read, under all nodes that are the same."""


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


@dataclass(frozen=True, slots=True)
class _Unsized:
    """One pass before it is sized."""

    work: Pass
    places: tuple[Place, ...]
    last_use: int = 0
    resident: tuple[Part, ...] = ()
    scratch: int = 0

    @property
    def held(self) -> int:
        """Bytes of memory that are held meanwhile besides the pass itself."""
        return sum(part.bytes for part in self.resident)


@dataclass(slots=True)
class _Layout:
    """Passes as they are found, one after another."""

    final: Sink
    tuning: Tuning
    device: DeviceBudget | None
    passes: list[_Unsized] = field(default_factory=list)
    bindings: dict[Node, Store] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, outputs: list[tuple[Node, Sink]], places: tuple[Place, ...]) -> None:
        """One more pass, which reads what those before it leave."""
        work = _make_pass(outputs, dict(self.bindings), self.tuning, self.device, self.notes)
        self.passes.append(_Unsized(work, places))


def make_plan(
    root: Node, sink: Sink, budget: Budget, name: str, device: DeviceBudget | None = None
) -> tuple[Schedule, Plan]:
    """The schedule and its plan; the plan may not fit, which `plan.check()` says."""
    host, tuning, root = budget.host or 0, current(), settle(root)
    tiny = tuning.tiny_result
    for share in (3, 8, 0):
        layout = _lay_out(root, sink, host // share if share else tiny, share == 3, tuning, device)
        passes, fits = _size_all(layout, size, host, give_up=True)
        if fits:
            break
    bare = _lay_out(root, sink, tiny, False, tuning, device)
    barest, _ = _size_all(bare, lambda work, room: (size_barely(work, room.packed), True), host)
    smallest = max((one.sized.peak + sum(part.bytes for part in one.resident) for one in barest), default=0)
    least = max((one.sized.device_bytes for one in barest), default=0)
    if not fits:  # what BLAS took generously in one pass, a later one may lack: then all stay bare
        layout, passes = bare, barest if host >= smallest else _size_all(bare, size, host)[0]
    notes = tuple(dict.fromkeys(layout.notes))
    return Schedule(passes, tuning, device), show_plan(passes, budget, name, device, smallest, least, notes)


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
    layout: _Layout, sizing: Callable[[Pass, Room], tuple[Sized, bool]], host: int, *, give_up: bool = False
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
    if device is not None and one.sized.device_bytes:
        held = one.sized.device_bytes + device.device.outside
        peaks.append(Peak(pool=device.device.pool, bytes=held, known=Known.BOUND))
        if device.pinned is not None:
            peaks.append(Peak(pool=PINNED, bytes=one.sized.locked, known=Known.EXACT))
    return replace(step, peaks=tuple(peaks))


def _lay_out(
    root: Node, sink: Sink, keep: int, keep_sources: bool, tuning: Tuning, device: DeviceBudget | None
) -> _Layout:  # fmt: skip
    layout = _Layout(sink, tuning, device)
    digests: dict[int, str] = {}
    structure(root, digests)
    nodes = walk(root)
    groups = _group(nodes, digests, tuning.tiny_result * 64)
    if keep_sources:
        _keep_sources(layout, nodes, groups, root, min(keep, tuning.kept_sources))
    target, turned = _see_through(root, sink)
    for group in groups:
        _add_barrier(layout, group, target, turned, keep, nodes, digests)
    if target is None:
        layout.add([(root, sink)], ())
    _fill_in_lifetimes(layout)
    return layout


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
    rank: dict[int, int] = {}
    seen: dict[str, Node] = {}
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        below = max((rank[id(child)] for child in node.inputs), default=0)
        rank[id(node)] = below + 1 if node.barrier else below
        if not node.barrier or digests[id(node)] in seen:
            continue
        seen[digests[id(node)]] = node
        key: tuple[object, ...] = (rank[id(node)], id(node))
        if isinstance(node, Reduce) and node.nbytes <= small:
            key = (rank[id(node)], "reduce", node.inputs[0].shape, _sources(node))
        elif isinstance(node, Reduce):
            key = (rank[id(node)], "reduce", node.inputs[0].shape, _sources(node), node.axes)
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


def _keep_sources(layout: _Layout, nodes: list[Node], groups: list[list[Node]], root: Node, keep: int) -> None:
    """Read a source into memory first where several passes need it and it is small enough."""
    users: dict[int, int] = {}
    for members in [*groups, [root]]:
        used = frozenset().union(*(_sources(member) for member in members))
        for store in used:
            users[store] = users.get(store, 0) + 1
    for node in nodes:
        if isinstance(node, Source) and users.get(id(node.store), 0) > 1 and 0 < node.nbytes <= keep:
            keep -= node.nbytes
            kept = Kept(node.shape, node.dtype, node.store.name)
            work = MapPass(node, kept, dict(layout.bindings), layout.tuning)
            place = Place(node, kept, kept.store())
            layout.passes.append(_Unsized(work, (place,)))
            layout.bindings[node] = place.store


def _add_barrier(
    layout: _Layout, group: list[Node], target: Node | None, turned: Sink, keep: int, nodes: list[Node],
    digests: dict[int, str],
) -> None:  # fmt: skip
    held = sum(place.sink.nbytes for one in layout.passes for place in one.places if isinstance(place.sink, Kept))
    outputs: list[tuple[Node, Sink]] = []
    places: list[Place] = []
    for node in group:
        if node is target:
            outputs.append((node, turned))
            continue
        stays = node.nbytes <= layout.tuning.tiny_result or held + node.nbytes <= keep
        sink = (Kept if stays else Scratch)(node.shape, node.dtype, node.label())
        held += node.nbytes if stays else 0
        outputs.append((node, sink))
        places.append(Place(node, sink, sink.store()))
    layout.add(outputs, tuple(places))
    for place in places:
        layout.bindings.update({same: place.store for same in nodes if digests[id(same)] == digests[id(place.node)]})


def _make_pass(
    outputs: list[tuple[Node, Sink]], bindings: Mapping[Node, Store], tuning: Tuning, device: DeviceBudget | None,
    notes: list[str],
) -> Pass:  # fmt: skip
    node, sink = outputs[0]
    if device is not None and all(math.prod(made.shape) for made, _ in outputs):
        from outsize.array.device.placement import pass_on_device

        work = pass_on_device(outputs, bindings, tuning, device, notes)
        if work is not None:
            return work
    if isinstance(node, Reduce):
        return ReducePass(outputs, bindings, tuning)  # type: ignore[arg-type]
    if isinstance(node, Contract):
        return ContractPass(node, sink, bindings, tuning)
    if isinstance(node, Scan):
        return ScanPass(node, sink, bindings, tuning)
    if isinstance(node, Runs):
        return RunsPass(node, sink, bindings, tuning)
    assert isinstance(node, Lane | Settled | Merged) or not node.barrier, node
    return MapPass(node, sink, bindings, tuning)


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


def _fill_in_lifetimes(layout: _Layout) -> None:
    """When each result is last read, and so what is held beside every pass."""
    passes = layout.passes
    made: dict[Node, int] = {}
    for number, one in enumerate(passes):
        for place in one.places:
            made.update({same: number for same, store in layout.bindings.items() if store is place.store})
    last = list(range(len(passes)))
    for number, one in enumerate(passes):
        for node in _reads_of(one.work, made):
            if made[node] < number:
                last[made[node]] = max(last[made[node]], number)
    for number, one in enumerate(passes):
        held = [place.sink for other, end in zip(passes[: number + 1], last, strict=False) if number <= end
                for place in other.places]  # fmt: skip
        parts = [Part(name=f"{sink.name} kept", bytes=sink.nbytes, known=Known.EXACT) for sink in held
                 if isinstance(sink, Kept)]  # fmt: skip
        for _, sink in one.work.outputs:
            under = sink.sink if isinstance(sink, Turned) else sink
            if isinstance(under, MemorySink) and under is layout.final and under.counted:
                result = math.prod(under.shape) * under.dtype.itemsize
                parts.append(Part(name="the result", bytes=result, known=Known.EXACT))
        scratch = sum(sink.nbytes for sink in held if isinstance(sink, Scratch))
        resident = tuple(part for part in parts if part.bytes)
        passes[number] = replace(one, last_use=last[number], resident=resident, scratch=scratch)
