"""Folds a region of a node into what reductions keep of it: for a pass that reduces, and for reductions of whole lanes inside
another pass.

In: a node, a region, accumulators with their partials. Out: the partials, filled. A dry frame only counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.accumulators import Accumulator, ArgExtreme, Moments, States
from outsize.array.kernels.fused import run_program
from outsize.array.kernels.ranks import Rule
from outsize.array.store.base import Block, Region, region_shape

Taker = tuple[Accumulator, States, Sequence[Block]]
"""An accumulator, its partial, and what earlier reductions found for the lanes of the region."""


def takes_block(accumulator: Accumulator) -> bool:
    """True where it wants a region at once; others take it slice by slice."""
    return isinstance(accumulator, ArgExtreme | Rule)


def load(source: Node, region: Region, accumulators: Sequence[Accumulator], frame: Frame) -> None:
    """Read what `fold` will want: it stays for others that read the same."""
    if any(takes_block(accumulator) for accumulator in accumulators):
        frame.evaluate(source, region)
    if not all(takes_block(accumulator) for accumulator in accumulators):
        frame.load_leaves(frame.program(source), region)


def fold(source: Node, region: Region, takers: Sequence[Taker], frame: Frame) -> int:
    """Fill the partials; returns the bytes that NumPy takes meanwhile for temporaries."""
    at_once = [taker for taker in takers if takes_block(taker[0])]
    if at_once:
        block = frame.evaluate(source, region)
        for accumulator, partial, rows in at_once if not frame.dry else ():
            accumulator.take_block(block, region, partial, *rows)  # type: ignore[attr-defined]
    sliced = [(accumulator, partial) for accumulator, partial, _ in takers if not takes_block(accumulator)]
    elements = _run_slices(source, region, sliced, frame) if sliced else 0
    return sum(accumulator.temporaries(elements, region) for accumulator, _, _ in takers)


def count(accumulator: Accumulator, shape: tuple[int, ...]) -> int:
    """Elements that are reduced to one, in a block of this shape."""
    return math.prod(shape[axis] for axis in accumulator.axes)


def _run_slices(source: Node, region: Region, takers: Sequence[tuple[Accumulator, States]], frame: Frame) -> int:
    program = frame.program(source)
    shape = region_shape(region)
    blocks = frame.load_leaves(program, region)
    scratch, elements = frame.bytes(program.scratch(shape)), min(program.slice_elements(), math.prod(shape))
    rooms = [(frame.array((elements,), one.narrow),) if isinstance(one, Moments) else () for one, _ in takers]
    if frame.dry:
        return elements
    consumers = [
        accumulator.consumer(partial, *room)  # type: ignore[attr-defined]
        for (accumulator, partial), room in zip(takers, rooms, strict=True)
    ]
    run_program(program, blocks, shape, None, scratch, consumers)
    poor = []
    for one in consumers:
        if hasattr(one, "close") and not one.close(count(one.owner, shape)):
            poor.append(type(one)(one.owner, one.partial, one.room, one.partial[1]))
    if poor:
        run_program(program, blocks, shape, None, scratch, poor)
        for one in poor:
            one.close(count(one.owner, shape))
    return 0
