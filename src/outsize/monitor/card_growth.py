"""Memory of a card that torch's allocator reserves and no tensor asks for: pools of CUDA graphs, and fragments.

A leak of tensors shows in what is requested, and `growth` finds it. Where only what is reserved grows, there are two
reasons. A captured CUDA graph keeps a pool of its own, which nothing else may use: a program that captures again and again
grows for good. Else the free memory is in pieces that do not fit what is asked for: fragments, and no leak. Tested with
scripted allocators; unproven on a card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from outsize.core.outcomes.recording import Finding, Note, Sample
from outsize.core.units import format_bytes
from outsize.monitor.trend import FEWEST, Point, Trend, find_trend

_POINTS = 2048
_LEAST = 64 * 2**20
"""Bytes of growth of what is reserved that are looked at: the allocator reserves 20 MiB at a time."""
_OWN = 0.5
"""Part of the growth that the pools of graphs must hold to be its reason."""

Pools = Mapping[tuple[int, int], int]
"""Pool -> bytes of its segments; (0, 0) is the one that tensors share."""


class CardGrowth:
    """Follows the allocators of cards in the samples of a watch."""

    def __init__(self, read_pools: Callable[[int], Pools]) -> None:
        self._read_pools = read_pools
        self._reserved: dict[str, list[Point]] = {}
        self._requested: dict[str, list[Point]] = {}
        self._next_check: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def add(self, sample: Sample) -> Iterator[Finding | Note]:
        """Take one sample; gives what is to be said."""
        for one in sample.allocators:
            if one.framework != "torch" or one.reserved is None or one.requested is None:
                continue
            if not one.device.startswith("cuda:"):
                continue
            step = sample.step if sample.step is not None else len(self._reserved.get(one.device, ()))
            for series, held in ((self._reserved, one.reserved), (self._requested, one.requested)):
                points = series.setdefault(one.device, [])
                points.append(Point(sample.time, step, held))
                if len(points) > _POINTS:
                    del points[::2]
            yield from self._check(one.device, sample)

    def _check(self, device: str, sample: Sample) -> Iterator[Finding | Note]:
        """Look for a trend each time there are an eighth more points."""
        count = len(self._reserved[device])
        if count < max(FEWEST, min(self._next_check.get(device, 0), _POINTS)):
            return
        self._next_check[device] = count + max(4, count // 8) if count < _POINTS // 2 else _POINTS
        trend = find_trend(self._reserved[device], _LEAST)
        asked = find_trend(self._requested[device])
        if trend is None or (asked is not None and asked.grown > 0.5 * trend.grown):
            return
        if trend.grown <= self._said.get(device, 0):
            return
        self._said[device] = 2 * trend.grown
        pools = self._read_pools(int(device.partition(":")[2]))
        own = {pool: held for pool, held in pools.items() if pool != (0, 0)}
        if sum(own.values()) >= _OWN * trend.grown:
            yield _describe_graphs(device, trend, own, sample)
        else:
            yield _describe_fragments(device, trend, sample)


def _describe_graphs(device: str, trend: Trend, own: Pools, sample: Sample) -> Finding:
    stepwise = sample.step is not None
    return trend.finding(
        stepwise,
        kind="CUDA graphs",
        device=device,
        text=f"{len(own):,} pools of CUDA graphs hold {format_bytes(sum(own.values()))} of {device} that no tensor outside "
        f"them can use: {trend.rate(stepwise)}",
        advice="capture each shape once and replay it, drop graphs that are not used again, or let them share a pool "
        "(`torch.cuda.graph(graph, pool=...)`)",
        count=len(own),
        time=sample.time,
    )


def _describe_fragments(device: str, trend: Trend, sample: Sample) -> Note:
    return Note(
        time=sample.time,
        text=f"fragmentation on {device}: the allocator has reserved {format_bytes(trend.grown)} more and tensors ask for no "
        "more: no leak; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use fewer sizes of tensors",
    )


def read_pools(index: int) -> Pools:
    """The pools of a card, from torch's list of segments; empty where torch does not say."""
    memory: Any = getattr(getattr(sys.modules.get("torch"), "cuda", None), "memory_snapshot", None)
    found: dict[tuple[int, int], int] = {}
    try:
        segments = memory() if memory is not None else []
    except RuntimeError:
        return found
    for segment in segments:
        if segment.get("device", 0) == index:
            first, second = segment.get("segment_pool_id", (0, 0))
            found[first, second] = found.get((first, second), 0) + int(segment.get("total_size", 0))
    return found
