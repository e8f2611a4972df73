"""A pass for matrix products: a tile of C stays in memory while panels of A and B stream past it, the next read during
this product.

The box that is chosen has three kinds of axes: those of C (cut into tiles) and those summed over (cut into panels).
With S words of memory a square C moves about 2mnk/sqrt(S) words, the least that is possible (Smith, Lowery, Langou,
van de Geijn 2017); the chooser finds that shape because nothing else costs less disk time. Panels of A are short
pieces of its rows, thousands of small reads; where it costs no more, the tile's whole rows of A stay beside C instead,
read once in one stretch, and only B streams. BLAS has all cores, where the budget has room for their buffers; one worker
multiplies, the other reads. Long sums of float32 whose C is small are accumulated in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from outsize.array.graph.barrier import Contract
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, nodes_below
from outsize.array.graph.rearrange import runs_on
from outsize.array.kernels.blas import Packing, find_symbol, multiply_add, packing, takes
from outsize.array.memo import remembered
from outsize.array.passes.base import ANY, BARE, Effort, Job, Pass, Room, Sized, split
from outsize.array.passes.tiling import Box, Grid, balance, center, grow, read_seconds, write_seconds
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape, round_up
from outsize.array.tuning import Tuning
from outsize.engine.pool import cores, round_to_pages


@dataclass(slots=True)
class _State:
    total: Block
    out: Block
    scratch: Buffer
    left: Block | None
    """The tile's whole rows of A, where they stay."""


class _Loading(NamedTuple):
    """What loading a part of an operand takes, by itself."""

    peak: int
    """Bytes of buffer at the most."""
    kept: int
    """Bytes of it that stay."""
    outside: int
    """Bytes beside the buffer."""
    waits: tuple[float, ...]
    """Seconds of each read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedProduct(Sized):
    """A product with its sizes; its chunks are the panels."""

    left_stays: bool
    """True where a tile keeps its whole rows of A."""
    strip: int
    """Bytes of A's rows that BLAS copies at once."""


class ContractPass(Pass):
    """Makes one contraction."""

    ordered = True
    overlap = 2  # one worker reads while the other multiplies: that is worth up to twice the reads

    def __init__(self, node: Contract, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        super().__init__(((node, sink),), bindings, tuning)
        self.node, self.sink = node, sink
        a, b = node.inputs
        self.batch = node.batch
        self.m = a.ndim - node.batch - node.summed
        self.n = b.ndim - node.batch - node.summed
        self.lengths = a.shape[self.batch + self.m :]
        """Lengths of the axes summed over."""
        self.domain = (*node.shape, *self.lengths)
        self.working = self._working()
        self._element = np.dtype(np.float32) if node.dtype.char == "e" else node.dtype.newbyteorder("=")
        """The dtype in which panels are multiplied."""
        a_nodes, b_nodes = (set(nodes_below([child], bindings.__contains__)) for child in node.inputs)
        self._apart = a_nodes.isdisjoint(b_nodes)
        """True where what is read for one operand never serves the other: each can be measured by itself."""

    def _working(self) -> np.dtype[Any]:
        dtype = self.node.dtype
        if dtype.char == "e":
            return np.dtype(np.float32)
        if self.node.widens(self.tuning) and self.node.nbytes <= self.tuning.small_result:
            return np.dtype(np.float64 if dtype.char == "f" else np.complex128)
        return dtype.newbyteorder("=")

    def label(self) -> str:
        a, b = self.node.inputs
        return f"product of {a.label()} and {b.label()}"

    def _regions(self, tile: Region, panel: Region) -> tuple[Region, Region]:
        batch, m = tile[: self.batch], tile[self.batch : self.batch + self.m]
        n = tile[self.batch + self.m :]
        return (*batch, *m, *panel), (*batch, *panel, *n)

    def measure(self, region: Region, frame: Frame, stays: bool = False) -> None:
        """The region covers C's axes and those summed over. A is left out where it stays."""
        split_at = len(self.node.shape)
        self._load(region[:split_at], region[split_at:], frame, None, stays)

    @remembered
    def _panel(self, region: Region, stays: bool, strip: int) -> Frame:
        """A dry frame that has read and multiplied a panel."""
        found, shape = self.frame(), region_shape(region)
        self.measure(region, found, stays)
        found.reserve(self._added(shape, strip))
        found.pack(self._packing(shape, strip))
        return found

    @remembered
    def _measure(self, box: Box, stays: bool) -> tuple[int, int, float]:
        """(buffer, memory outside of it, seconds) of reading a panel; three numbers, since a search looks at thousands of
        panels and their frames would be megabytes."""
        region, split_at = center(self.domain, box), len(self.node.shape)
        if not self._apart:
            frame = self.frame()
            self.measure(region, frame, stays)
            return frame.peak, frame.outside, sum(self._wait_for(frame))
        a, b = self._regions(region[:split_at], region[split_at:])
        left, right = _Loading(0, 0, 0, ()) if stays else self._load_apart(0, a), self._load_apart(1, b)
        waits = sum((*left.waits, *right.waits))
        return max(left.peak, left.kept + right.peak), max(left.outside, right.outside), waits

    @remembered
    def _load_apart(self, number: int, region: Region) -> _Loading:
        """What loading a region of one operand takes."""
        frame = self.frame()
        axes = (self.batch, self.m, self.node.summed) if number == 0 else (self.batch, self.node.summed, self.n)
        self._operand(self.node.inputs[number], region, axes, frame)
        return _Loading(frame.peak, frame.position, frame.outside, tuple(self._wait_for(frame)))

    def _wait_for(self, frame: Frame) -> list[float]:
        """Seconds of each read of a panel."""
        tuning = self.tuning
        return [read_seconds({read: times}, tuning, tuning.hidden_transfer) for read, times in frame.reads.items()]

    def _added(self, box: Box, strip: int) -> int:
        """Bytes of products that are made to be added, where BLAS cannot add them itself."""
        if find_symbol("cblas_sgemm") and self.node.dtype.char in "fd" and self.working == self.node.dtype:
            return 0
        return 2 * min(strip, math.prod(box[self.batch : len(self.node.shape)]) * self.working.itemsize)

    def _packing(self, box: Box, strip: int) -> Packing:
        """What BLAS takes to multiply a panel."""
        middle, end = self.batch + self.m, len(self.node.shape)
        rows, columns, depth = math.prod(box[self.batch : middle]), math.prod(box[middle:end]), math.prod(box[end:])
        return packing(rows, columns, depth, self._element, strip)

    @remembered
    def _probe_left(self, rows: Region) -> Frame:
        """A dry run of reading whole rows of A."""
        found = self.frame()
        self._load_left(rows, found)
        return found

    def _load(self, tile: Region, panel: Region, frame: Frame, left: Block | None, stays: bool) -> tuple[Block, Block]:
        a_region, b_region = self._regions(tile, panel)
        if left is not None:
            (start, stop) = panel[0]
            a = left[:, start:stop]
        elif stays:  # a dry run: A is counted with the tile
            a = np.empty((0, 0), self.node.dtype)
        else:
            a = self._operand(self.node.inputs[0], a_region, (self.batch, self.m, self.node.summed), frame)
        return a, self._operand(self.node.inputs[1], b_region, (self.batch, self.node.summed, self.n), frame)

    def _load_left(self, rows: Region, frame: Frame) -> Block:
        region = (*rows, *((0, n) for n in self.lengths))
        return self._operand(self.node.inputs[0], region, (self.batch, self.m, self.node.summed), frame)

    def _operand(self, child: Node, region: Region, axes: tuple[int, int, int], frame: Frame) -> Block:
        """A region of an operand as a matrix (or a batch of them) that BLAS can take."""
        block = frame.evaluate(child, region)
        dtype = self._element
        shape = grouped(block.shape, axes)
        edges = itertools.pairwise(itertools.accumulate((0, *axes)))
        merges = all(runs_on(block, low, high) for low, high in edges)  # without a copy
        if block.dtype != dtype or not merges or not takes(block.reshape(shape)):
            packed = frame.array(block.shape, dtype)
            frame.copy(packed, block)
            block = packed
        return block.reshape(shape)

    def _rows(self, tile: Region) -> Region:
        return tile[: self.batch + self.m]

    @remembered
    def _slot(self, tile: Box, stays: bool) -> int:
        region = center(self.node.shape, tile)
        found = self.sink.room(region) + self.sink.extent(region)
        if self.working != self.sink.dtype or not self.plain():
            found += round_up(math.prod(tile) * self.working.itemsize)
        return found + (self._probe_left(self._rows(region)).peak if stays else 0)

    def plain(self) -> bool:
        """True where the sink's own block can be the accumulator: one matrix, rows as BLAS likes them."""
        return self.batch == 0 and self.m == 1 and self.n == 1 and self.sink.order in (None, (0, 1))

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> SizedProduct | None:
        split_at = len(self.node.shape)
        least = (*(max(1, min(g, n)) for g, n in zip(self.sink.granule, self.node.shape, strict=True)),
                 *(1 for _ in self.lengths))  # fmt: skip
        strip = max(self.tuning.shortest_strip, min(self.tuning.strip, room.host // 4))
        threads = max(1, min(cores(), room.host // self.tuning.thread_room))
        smallest = tuple(map(max, least, self._smallest_box()))
        if effort.bare:
            return self._settle(1, smallest, False, strip, threads, room)
        workers = min(2, effort.workers)

        def held(box: Box, stays: bool = False) -> int:
            peak, outside, _ = self._measure(box, stays)
            packed = max(room.packed, self._packing(box, strip).total(1, threads))
            return self._slot(box[:split_at], stays) + workers * (peak + max(outside, self._added(box, strip))) + packed

        stays, searched = False, self.plain() and len(self.lengths) == 1
        if held(smallest if searched else least) > room.host:
            return None
        if searched:
            box, stays = self._search(least, smallest, room.host, held)
        else:
            box, _ = grow(self.domain, least, self._seconds, lambda b: held(b) <= room.host, held, self.tuning)
        return self._settle(workers, balance(self.domain, box, least), stays, strip, threads, room)

    def efforts(self, room: int) -> list[Effort]:
        return [Effort(2, 0), Effort(1, 0), BARE]

    def _smallest_box(self) -> Box:
        """One matrix, whose edges are a few elements long whatever number of axes they are made of."""
        box = [1] * len(self.domain)
        middle, end = self.batch + self.m, len(self.node.shape)
        for first, count in ((self.batch, self.m), (middle, self.n), (end, len(self.lengths))):
            edge = self.tuning.edge
            for axis in reversed(range(first, first + count)):
                box[axis] = max(1, min(edge, self.domain[axis]))
                edge = max(1, edge // box[axis])
        return tuple(box)

    def _seconds(self, box: Box, stays: bool = False) -> float:
        """Disk time of one panel and of its share of C."""
        split_at = len(self.node.shape)
        tile = box[:split_at]
        panels = math.prod([-(-n // max(1, k)) for n, k in zip(self.lengths, box[split_at:], strict=True)])
        return self._measure(box, stays)[2] + self._written(tile) / max(panels, 1) + self.tuning.panel_seconds

    @remembered
    def _written(self, tile: Box) -> float:
        return write_seconds(self.sink, center(self.node.shape, tile), self.tuning)

    def _search(self, least: Box, smallest: Box, room: int, held: Callable[[Box, bool], int]) -> tuple[Box, bool]:
        """The best of even cuts of C and of panels in powers of two, with A streaming or staying; of equally good ones the
        smallest."""
        m, n, k = self.domain
        if held(self.domain, False) <= min(room, self.tuning.whole_product):
            return self.domain, False
        panels = [*sorted({n for n in (16, 64, 256, 1024, 2048, 4096, 8192, *self._pieces(k)) if n < k}), k]
        found = [(math.inf, 0, smallest, False)]
        best, hidden, (of_a, of_b) = math.inf, self.tuning.hidden_transfer, self._read_once()
        for rows, columns, stays in itertools.product(_cuts(m, least[0]), _cuts(n, least[1]), (False, True)):
            if rows * (columns + k * stays) * self.working.itemsize > room:
                continue
            down, across = -(-m // rows), -(-n // columns)
            tiles = down * across
            if tiles < self.tuning.spread and self.node.nbytes > self.tuning.small_result:
                continue  # every worker of a cluster has a tile; a small C is summed in parts instead
            least_reading = of_a * (1 if stays else across) + of_b * down
            once = None
            for panel in panels:
                pieces = -(-k // panel)
                if least_reading + tiles * pieces * self.tuning.panel_seconds > 1.001 * self.tuning.as_good * best:
                    continue  # it cannot be as good as what was found
                box = (rows, columns, panel)
                size = held(box, stays)
                if size > room:
                    break
                if once is None:
                    left = self._rows(center(self.node.shape, (rows, columns)))
                    once = tiles * read_seconds(self._probe_left(left).reads, self.tuning, hidden) if stays else 0.0
                found.append((once + self._seconds(box, stays) * tiles * pieces, size, box, stays))
                best = min(best, found[-1][0])
        good = best * self.tuning.as_good
        return min((size, box, stays) for cost, size, box, stays in found if cost <= good)[1:]

    def _read_once(self) -> tuple[float, float]:
        """Seconds of reading each operand once and in one piece, below which no search goes; 0 where they are not told apart."""
        if not self._apart:
            return 0.0, 0.0
        a, b = (tuple((0, length) for length in child.shape) for child in self.node.inputs)
        return sum(self._load_apart(0, a).waits), sum(self._load_apart(1, b).waits)

    def _pieces(self, length: int) -> set[int]:
        """Indices of the summed axis that some source is read in as a whole, where they are more than any panel: row groups of a
        table, which shorter panels would decode again and again."""
        nodes = nodes_below(self.node.inputs, self.bindings.__contains__)
        stores = [self.bindings.get(node) or getattr(node, "store", None) for node in nodes]
        axes = [
            (n, grain)
            for store in stores
            if store is not None
            for n, grain in zip(store.shape, store.granule, strict=True)
        ]
        return {grain for n, grain in axes if n == length and grain > 8192}

    def _settle(self, workers: int, box: Box, stays: bool, strip: int, threads: int, room: Room) -> SizedProduct:
        split_at, middle = len(self.node.shape), self.batch + self.m
        grid, panel = Grid(self.node.shape, box[:split_at]), box[split_at:]
        if min(math.prod(box[self.batch : middle]), math.prod(box[middle:split_at])) <= self.tuning.narrow:
            threads = 1
        frame = self.frame()
        for region, _ in self.kinds(grid, panel):
            seen = self._panel(region, stays, strip)
            frame.peak, frame.outside = max(frame.peak, seen.peak), max(frame.outside, seen.outside)
            frame.pack(seen.packing)
        slot = max((self._slot(region_shape(r), stays) for r, _ in grid.kinds()), default=0)
        return SizedProduct(
            work=self, grid=grid, chunk=panel, workers=min(workers, max(1, math.prod(Grid(self.domain, box).counts))),
            slots=1, worker_bytes=round_to_pages(frame.peak), slot_bytes=round_to_pages(slot),
            outside_bytes=frame.outside, packed=max(room.packed, frame.packing.total(1, threads)),  # one worker multiplies
            threads=threads, left_stays=stays, strip=strip,
        )  # fmt: skip

    def kinds(self, grid: Grid, chunk: Box) -> Iterator[tuple[Region, int]]:
        for tile, number in grid.kinds():
            for panel, times in Grid(self.lengths, chunk).kinds():
                yield (*tile, *panel), number * times

    def frames(self, sized: SizedProduct) -> list[tuple[Frame, int]]:
        """Of each kind of panel, and of the rows of A that stay."""
        kinds = self.kinds(sized.grid, sized.chunk)
        found = [(self._panel(region, sized.left_stays, sized.strip), number) for region, number in kinds]
        lefts = sized.grid.kinds() if sized.left_stays else ()
        return found + [(self._probe_left(self._rows(tile)), number) for tile, number in lefts]

    def cost(self, sized: Any) -> float:
        return self.reads(sized)

    def enough(self, sized: Any) -> float:
        return self.overlap * (self.floor(sized) or 0)

    def volume(self) -> int:
        return math.prod(self.node.shape) * max(1, math.prod(self.lengths))

    def floor(self, sized: Any) -> int | None:
        """2mnk/sqrt(S) words and C once; never less than reading A and B once."""
        size = self.node.dtype.itemsize
        least = super().floor(sized) or 0
        if self.sources(sized) == 0:
            return least
        words = max(1, sized.peak // size)
        m = math.prod(self.node.shape[self.batch : self.batch + self.m])
        n = math.prod(self.node.shape[self.batch + self.m :])
        work = 2 * math.prod(self.node.shape[: self.batch]) * m * n * math.prod(self.lengths)
        return max(least, int(work / math.sqrt(words)) * size + self.writes())

    def chunks(self, job: Job, tile: Region) -> Iterator[Region]:
        if math.prod(self.lengths) == 0:
            return iter([tuple((0, 0) for _ in self.lengths)])
        return iter(Grid(self.lengths, job.sized.chunk))

    def cut(self, sized: SizedProduct, tile: Region, pieces: int) -> list[Region]:
        """Stretches of whole panels along the first axis that is summed over. Where rows of A stay, all of them are read at
        once, and the tile is one piece."""
        if sized.left_stays or not self.lengths or math.prod(self.lengths) == 0 or self.node.dtype.kind == "b":
            return []
        panels = -(-self.lengths[0] // sized.chunk[0])
        step = sized.chunk[0] * -(-panels // max(1, pieces))
        cuts = [(low, min(self.lengths[0], low + step)) for low in range(0, self.lengths[0], step)]
        rest = tuple((0, n) for n in self.lengths[1:])
        return [(*tile, span, *rest) for span in cuts] if len(cuts) > 1 else []

    def tile_of(self, part: Region) -> Region:
        return part[: len(self.node.shape)]

    def part_chunks(self, job: Job, part: Region) -> Iterator[Region]:
        start, stop = part[len(self.node.shape)]
        return (panel for panel in Grid(self.lengths, job.sized.chunk) if start <= panel[0][0] < stop)

    def partial(self, state: _State) -> list[Block]:
        return [state.total]

    def join(self, job: Job, outer: Region, part: Region, state: _State, blocks: list[Block]) -> None:
        state.total += blocks[0]

    def open(self, job: Job, tile: Region, slot: Buffer) -> _State:
        state = self.lay_out(job, tile, slot)
        state.total[...] = 0
        return state

    def lay_out(self, job: Job, tile: Region, slot: Buffer) -> _State:
        """The state of a tile in its slot, C not yet written."""
        room = job.sink.room(tile)
        scratch = job.sink.extent(tile)
        place, rest, more = split(slot, room, scratch, slot.nbytes - room - scratch)
        out = job.sink.lay(tile, place)
        total = out
        if self.working != self.sink.dtype or not self.plain():
            size = math.prod(region_shape(tile)) * self.working.itemsize
            total = np.ndarray(region_shape(tile), self.working, more.data)
            more = more[round_up(size) :]
        if not job.sized.left_stays:
            return _State(total, out, rest, None)
        return _State(total, out, rest, self._load_left(self._rows(tile), Frame(more, job.bindings, self.tuning)))

    def load(self, job: Job, tile: Region, chunk: Region, state: _State, frame: Frame) -> Any:
        if math.prod(region_shape(chunk)) == 0:
            return None
        frame.reset()
        return self._load(tile, chunk, frame, state.left, False)

    def matrices(self, state: _State, a: Block, b: Block) -> tuple[Block, Block, Block]:
        """C and its panels, each as a batch of matrices."""
        c = state.total
        total = c if self.plain() else c.reshape(grouped(c.shape, (self.batch, self.m, self.n)))
        total, a, b = (block[None] if block.ndim == 2 else block for block in (total, a, b))
        return total, a, b

    def fold(self, job: Job, tile: Region, chunk: Region, state: _State, payload: Any) -> None:
        if payload is None:
            return
        total, a, b = self.matrices(state, *payload)
        for i in range(total.shape[0]):
            if total.dtype.kind == "b":
                total[i] |= a[i] @ b[i]
            else:
                multiply_add(a[i], b[i], total[i], job.sized.strip)
        job.progress(total.size * a.shape[2])

    def close(self, job: Job, tile: Region, state: _State) -> None:
        if state.out is not state.total:
            np.copyto(state.out, state.total, casting="unsafe")
        job.sink.write(tile, state.out, state.scratch)

    def notes(self, sized: Any) -> tuple[str, ...]:
        stays = "C tile and its rows of A stay" if sized.left_stays else "C tile stays"
        return (f"{stays}, panels of {sized.chunk} stream; BLAS on {sized.threads} cores",)


def _cuts(length: int, grain: int) -> list[int]:
    """Lengths of even cuts into 1, 2, 3, ... pieces, in whole granules."""
    pieces = [*range(1, 9), 12, 16, 32, 64, 256, 1024]
    cuts = {-(-length // count) for count in pieces if count <= length}
    return sorted({min(length, -(-cut // grain) * grain) for cut in cuts}, reverse=True)


def grouped(shape: tuple[int, ...], axes: tuple[int, int, int]) -> tuple[int, ...]:
    """(batch, rows, columns), or (rows, columns) without a batch."""
    first, second = axes[0], axes[0] + axes[1]
    matrix = (math.prod(shape[first:second]), math.prod(shape[second:]))
    return (math.prod(shape[:first]), *matrix) if axes[0] else matrix
