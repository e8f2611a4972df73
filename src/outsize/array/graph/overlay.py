"""An array with a part of it replaced: what `x[key] = value` makes of an array that cannot be written into.

In: an array, the part's new values, and where the part lies. Out: a node. A region is read from the array, and what the part
covers of it is laid over; a region that is covered whole is not read.
"""

from __future__ import annotations

from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.store.base import Block, Region, region_shape


class Overlay(Node):
    """The first input with the second laid over a part of it. Both have the same axes."""

    steps: tuple[tuple[int, int], ...]
    """(start, step) of the part along each axis: element j of the second input lies at start + step * j."""

    called = "update"

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        base, part = self.inputs
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        spans = [self._span(axis, span) for axis, span in enumerate(region)]
        covered = all(high > low for low, high in spans)
        whole = covered and all(abs(step) == 1 for _, step in self.steps)
        if not (whole and all(h - low == b - a for (low, h), (a, b) in zip(spans, region, strict=True))):
            frame.fill(block, base, region)
        if covered:
            frame.fill(self._view(block, region, spans), part, tuple(spans))
        if frame.dry:
            frame.suppose(base, region, block)
            axes = zip(region, part.shape, self.steps, strict=True)
            most = [(0, min(n, -(-(b - a) // abs(s)))) for (a, b), n, (_, s) in axes]
            view = block[tuple(slice(0, high) for _, high in most)]
            frame.suppose(part, tuple(most), view)
        return block

    def _span(self, axis: int, span: tuple[int, int]) -> tuple[int, int]:
        """Which elements of the part lie in a span of the array."""
        (start, step), length = self.steps[axis], self.inputs[1].shape[axis]
        near, far = span if step > 0 else (span[1] - 1, span[0] - 1)
        low, high = (max(0, -((start - edge) // step)) for edge in (near, far))
        return low, min(length, high)

    def _view(self, block: Block, region: Region, spans: list[tuple[int, int]]) -> Block:
        """Where these elements stand in the block of a region, in their own order."""
        picks = []
        for (low, high), (start, step), (begin, _) in zip(spans, self.steps, region, strict=True):
            first, last = (start + step * j - begin for j in (low, high - 1))
            end = last + (1 if step > 0 else -1)
            picks.append(slice(first, end if end >= 0 else None, step))
        return block[tuple(picks)]
