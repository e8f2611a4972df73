"""The graph becomes passes: which nodes are made together, in which order, and where results lie between them.

In: what is wanted and where it goes, the bytes that results may keep in memory. Out: a `Layout`, passes that are not yet sized.
Barriers are put in ranks. Reductions of one rank that read the same data ride on one read, and so do results that are
written region by region while such a read goes on. Results between passes stay in memory while they are a small share of the
budget and go to scratch files otherwise.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outsize.array.device.base import DeviceBudget
from outsize.array.graph.barrier import Contract, Lane, Reduce, Scan, Settled
from outsize.array.graph.external_sort import Merged, Runs
from outsize.array.graph.local import Together
from outsize.array.graph.node import Node, Source, held_by_stores, nodes_below, walk
from outsize.array.graph.rearrange import Affine
from outsize.array.memo import remembered
from outsize.array.passes.base import Pass, Room, Sized, size
from outsize.array.passes.map import MapPass, RunsPass
from outsize.array.passes.product import ContractPass
from outsize.array.passes.reduction import ReducePass
from outsize.array.passes.scan import ScanPass
from outsize.array.plan.residency import Head, Kept, Scratch, Turned
from outsize.array.store.base import Sink, Store
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning
from outsize.core.memory import Part
from outsize.core.noun import Known

_KINDS: tuple[tuple[type[Node], Any], ...] = ((Contract, ContractPass), (Scan, ScanPass), (Runs, RunsPass))
"""Nodes that have a kind of pass of their own."""


Wanted = tuple[Node, Sink]
"""A node, and where it goes."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a pass leaves behind for later passes: descriptions, of which the run makes the real ones."""

    node: Node
    sink: Kept | Scratch
    store: Store
    """What later passes read, under all nodes that are the same."""
    filling: Head | None = None
    """What this very pass reads, where what it leaves is the beginning of a source."""


class Drafts:
    """What the layouts of one plan have in common. A result that is left in the same way is the same place, and the same work is
    the same pass: what one layout measures of it and how it is sized, the next one knows."""

    def __init__(self, tuning: Tuning, device: DeviceBudget | None) -> None:
        self.tuning, self.device = tuning, device

    @remembered
    def place(self, node: Node, kind: type[Kept] | type[Scratch], name: str) -> Place:
        """Where a result is left."""
        sink = kind(node.shape, node.dtype, name)
        return Place(node, sink, sink.store())

    @remembered
    def head(self, source: Source, rows: int) -> Place:
        """Where the beginning of a source is left."""
        filling, store = (Head(source.store, rows, filled=filled) for filled in (False, True))
        return Place(source, filling.kept(), store, filling)

    @remembered
    def turn(self, node: Node, sink: Sink, targets: tuple[int | None, ...]) -> Turned:
        """A sink as a node below a turning of axes sees it."""
        return Turned(sink, node.shape, targets)

    def make_pass(self, outputs: Sequence[Wanted], bindings: Mapping[Node, Store], notes: list[str]) -> Pass:
        """The pass that makes these of what is bound, which is all that it reads of earlier passes."""
        work, said = self._make(tuple(outputs), frozenset(bindings.items()))
        notes += said
        return work

    @remembered
    def _make(self, outputs: tuple[Wanted, ...], bound: frozenset[tuple[Node, Store]]) -> tuple[Pass, list[str]]:
        notes: list[str] = []
        work = make_pass(list(outputs), dict(bound), self.tuning, self.device, notes)
        heads: dict[Store, Store] = {store.inner: store for _, store in bound if isinstance(store, Head)}
        if heads and self.device is None:  # only what is read of the disk differs
            plain = {node: store for node, store in bound if not isinstance(store, Head)}
            work.measure_like(self.make_pass(outputs, plain, []), heads)
        return work, notes

    @remembered
    def read_in(self, source: Source, sink: Sink) -> Pass:
        """The pass that reads a source into memory, on the processor."""
        return MapPass(source, sink, {}, self.tuning)

    @remembered
    def size(self, work: Pass, room: Room) -> tuple[Sized, bool]:
        """As `size` has it."""
        return size(work, room)


@dataclass(frozen=True, slots=True)
class UnsizedPass:
    """One pass before it is sized."""

    work: Pass
    places: tuple[Place, ...]
    reads: frozenset[Node] = frozenset()
    """Which results of earlier passes it reads, and which beginnings of sources."""
    last_use: int = 0
    resident: tuple[Part, ...] = ()
    scratch: int = 0

    @property
    def held(self) -> int:
        """Bytes of memory that are held meanwhile besides the pass itself."""
        return sum(part.bytes for part in self.resident)


@dataclass(slots=True)
class Layout:
    """Passes as they are found, one after another."""

    finals: tuple[Sink, ...]
    drafts: Drafts
    heads: dict[Source, int]
    passes: list[UnsizedPass] = field(default_factory=list)
    bindings: dict[Node, Store] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, outputs: list[tuple[Node, Sink]], places: tuple[Place, ...]) -> None:
        """One more pass, which reads what those before it leave."""
        left, made = list(places), [node for node, _ in outputs]
        if self.heads:
            below = set(nodes_below(made, self.bindings.__contains__))
            for source in [source for source in self.heads if source in below]:
                left.append(self.drafts.head(source, self.heads.pop(source)))
                self.bindings[source] = left[-1].store
        starts = [child for node in made for child in node.inputs] + [node for node in made if not node.barrier]
        bound = self.bindings
        reads = frozenset(node for node in nodes_below(starts, bound.__contains__) if node in bound)
        bindings = {node: bound[node] for node in (*reads, *made) if node in bound}
        bindings.update({place.node: place.filling for place in left if place.filling is not None})
        work = self.drafts.make_pass(outputs, bindings, self.notes)
        self.passes.append(UnsizedPass(work, tuple(left), reads))


def lay_out(top: Together, sinks: Sequence[Sink], keep: int, heads: dict[Source, int] | None, drafts: Drafts) -> Layout:
    """The passes that make the inputs of `top` into the sinks, in their order. Of results, `keep` bytes stay in memory; `heads`
    says what of sources stays there, {} that those that fit are read into it first."""
    tuning, device = drafts.tuning, drafts.device
    layout = Layout(tuple(sinks), drafts, dict(heads or {}))
    nodes = walk(top)[:-1]
    ranks = _ranks(nodes)
    groups = _group(nodes, ranks, max(tuning.tiny_result * 64, keep // 8))
    if heads == {}:
        _keep_sources(layout, nodes, groups, top.inputs, min(keep, tuning.kept_sources))
    targets, mapped = _share_out(top, sinks, nodes, drafts)
    riders = _choose_riders(mapped, groups, ranks) if device is None else {}
    for number, group in enumerate(groups):
        _add_barriers(layout, group, targets, riders.pop(number, []), keep)
    ridden = {id(sink) for one in layout.passes for _, sink in one.work.outputs}
    left = [(root, sink) for root, sink in mapped if id(sink) not in ridden]
    for together in _alike(left, ranks) if device is None else [[pair] for pair in left]:
        layout.add(together, ())
    _fill_in_lifetimes(layout, top)
    return layout


def _share_out(
    top: Together, sinks: Sequence[Sink], nodes: list[Node], drafts: Drafts
) -> tuple[dict[Node, Sink], list[Wanted]]:
    """(barriers whose passes write a result themselves, the results that are made region by region)."""
    readers = Counter(id(child) for node in (*nodes, top) for child in node.inputs)
    targets: dict[Node, Sink] = {}
    mapped: list[Wanted] = []
    for root, sink in zip(top.inputs, sinks, strict=True):
        target, turned = _see_through(root, sink, drafts)
        if target is not None and readers[id(target)] == 1 and readers[id(root)] == 1:
            targets[target] = turned
        else:
            mapped.append((root, sink))
    return targets, mapped


def _choose_riders(mapped: list[Wanted], groups: list[list[Node]], ranks: dict[int, int]) -> dict[int, list[Wanted]]:
    """Which results are written while a reduction reads the same data: number of a group -> what rides with it."""
    riders: dict[int, list[Wanted]] = defaultdict(list)
    for root, sink in mapped:
        for number, group in enumerate(groups):
            first = group[0]
            rides = isinstance(first, Reduce) and first.inputs[0].shape == root.shape and 0 not in root.shape
            if rides and ranks[id(first)] > ranks[id(root)] and _sources_at(root) & _sources(first):
                riders[number].append((root, sink))
                break
    return riders


def _alike(wanted: list[Wanted], ranks: dict[int, int]) -> list[list[Wanted]]:
    """Results of one shape that read the same data, together."""
    groups: dict[tuple[Any, ...], list[Wanted]] = {}
    for root, sink in wanted:
        shared = _sources_at(root)
        key = (root.shape, ranks[id(root)], shared) if shared and 0 not in root.shape else (id(root), len(groups))
        groups.setdefault(key, []).append((root, sink))
    return list(groups.values())


def _sources_at(root: Node) -> frozenset[int]:
    """The stores that are read for a node, down to the next barrier."""
    below = nodes_below([root], lambda child: child.barrier)
    return frozenset(id(n.store) for n in below if isinstance(n, Source))


def _see_through(root: Node, sink: Sink, drafts: Drafts) -> tuple[Node | None, Sink]:
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
    return below, drafts.turn(below, sink, targets)


def _ranks(nodes: list[Node]) -> dict[int, int]:
    """How many passes come before the one that makes a node, at the least, that pass included."""
    rank: dict[int, int] = {}
    for node in nodes:
        below = max((rank[id(child)] for child in node.inputs), default=0)
        rank[id(node)] = below + 1 if node.barrier else below
    return rank


def _group(nodes: list[Node], rank: dict[int, int], small: int) -> list[list[Node]]:
    """Barriers in the order they run; reductions that ride together share a group."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        if not node.barrier:
            continue
        key: tuple[object, ...] = (rank[id(node)], id(node))
        if isinstance(node, Reduce):
            axes = () if node.nbytes <= small else node.axes
            key = (rank[id(node)], "reduce", node.inputs[0].shape, _sources(node), axes)
        groups.setdefault(key, []).append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # type: ignore[arg-type, return-value]


def _sources(node: Node) -> frozenset[int]:
    """The stores that are read below a node, down to the next barrier."""
    below = nodes_below(node.inputs, lambda child: child.barrier)
    return frozenset(id(n.store) for n in below if isinstance(n, Source) and not n.store.resident)


def _keep_sources(
    layout: Layout, nodes: list[Node], groups: list[list[Node]], roots: Iterable[Node], keep: int
) -> None:  # fmt: skip
    """Read a source into memory first where several passes need it and it is small enough."""
    users: Counter[int] = Counter()
    for members in [*groups, *([root] for root in roots)]:
        users.update(frozenset().union(*(_sources(member) for member in members)))
    for node in nodes:
        if isinstance(node, Source) and users[id(node.store)] > 1 and 0 < node.nbytes <= keep:
            keep -= node.nbytes
            place = layout.drafts.place(node, Kept, node.store.name)
            layout.passes.append(UnsizedPass(layout.drafts.read_in(node, place.sink), (place,)))
            layout.bindings[node] = place.store


def _add_barriers(
    layout: Layout, group: list[Node], targets: dict[Node, Sink], riders: list[Wanted], keep: int
) -> None:  # fmt: skip
    held = sum(place.sink.nbytes for one in layout.passes for place in one.places if isinstance(place.sink, Kept))
    outputs: list[Wanted] = []
    places: list[Place] = []
    for node in group:
        if node in targets:
            outputs.append((node, targets[node]))
            continue
        stays = node.nbytes <= layout.drafts.tuning.tiny_result or held + node.nbytes <= keep
        place = layout.drafts.place(node, Kept if stays else Scratch, node.label())
        held += node.nbytes if stays else 0
        outputs.append((node, place.sink))
        places.append(place)
    layout.add([*outputs, *riders], tuple(places))
    layout.bindings.update({place.node: place.store for place in places})


def make_pass(
    outputs: list[Wanted], bindings: Mapping[Node, Store], tuning: Tuning, device: DeviceBudget | None, notes: list[str]
) -> Pass:
    """The pass that makes these, on the device where it can: the same wherever it is made."""
    node, sink = outputs[0]
    if device is not None and all(math.prod(made.shape) for made, _ in outputs):
        from outsize.array.device.placement import pass_on_device

        work = pass_on_device(outputs, bindings, tuning, device, notes)
        if work is not None:
            return work
    if len(outputs) > 1 or (isinstance(node, Reduce) and node.barrier):
        return ReducePass(outputs, bindings, tuning)
    assert isinstance(node, Contract | Scan | Runs | Lane | Settled | Merged) or not node.barrier, node
    kind = next((kind for of, kind in _KINDS if isinstance(node, of)), MapPass)
    return kind(node, sink, bindings, tuning)


def _fill_in_lifetimes(layout: Layout, top: Node) -> None:
    """When each result is last read, and so what is held beside every pass."""
    passes = layout.passes
    factors = [
        Part(name=f"factors of {name}", bytes=size, known=Known.EXACT) for name, size in held_by_stores(top).items()
    ]
    made = {place.node: number for number, one in enumerate(passes) for place in one.places}
    last = list(range(len(passes)))
    for number, one in enumerate(passes):
        for node in one.reads:
            last[made[node]] = max(last[made[node]], number)
    for number, one in enumerate(passes):
        held = [place.sink for other, end in zip(passes[: number + 1], last, strict=False) if number <= end
                for place in other.places]  # fmt: skip
        parts = [Part(name=f"{sink.name} kept", bytes=sink.nbytes, known=Known.EXACT) for sink in held
                 if isinstance(sink, Kept)]  # fmt: skip
        for _, sink in (output for other in passes[: number + 1] for output in other.work.outputs):
            under = sink.sink if isinstance(sink, Turned) else sink
            if isinstance(under, MemorySink) and under in layout.finals and under.counted:
                result = math.prod(under.shape) * under.dtype.itemsize
                parts.append(Part(name="the result", bytes=result, known=Known.EXACT))
        scratch = sum(sink.nbytes for sink in held if isinstance(sink, Scratch))
        resident = tuple(part for part in (*parts, *factors) if part.bytes)
        passes[number] = replace(one, last_use=last[number], resident=resident, scratch=scratch)
