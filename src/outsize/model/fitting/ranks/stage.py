"""Runs a step of a model that is spread over ranks on tensors without contents.

In: the user's work and a choice. Out: a `Projection` of this rank. Of a sharded model FSDP2's own code runs, on shards without
contents, and its collective calls send nothing: so gathered weights, copies around collective calls, prefetched groups and
gradients that wait for the last slice are those of the installed torch. Beside a replica are DDP's buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import Store
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.foreign_tensors import Beside
from outsize.model.fitting.ranks.runner import open_sharded
from outsize.model.fitting.ranks.spread import Replicas, Shards, Spread
from outsize.model.fitting.run.resident import Resident
from outsize.model.fitting.run.runner import Runner, Work
from outsize.model.torch_port.ranked import silent_collectives
from outsize.model.torch_port.sharding import make_shard, shards_of, swapped_shards
from outsize.model.tracing.tracer import Tracer

ROW = 128
"""Bytes that one rank's word of itself takes at most, copies included."""


def stage_of(work: Work, batch: Any, spread: Spread, device: Any) -> Stage:
    """Where steps of a spread model are tried."""
    if isinstance(spread, Shards):
        return ShardedStage(work, batch, spread, device)
    assert isinstance(spread, Replicas)
    held = spread.held + _talk()
    return Stage(work, batch, beside=_Buckets(held) if work.device == "cpu" else None)  # a card's allocator tells


def _talk() -> int:
    """Bytes of host memory in which a rank tells the others of itself, and hears of them."""
    return ROW * (int(dist.get_world_size()) + 4)


class _Buckets(Beside):
    """So many bytes that no tensor of Python's holds, and that are no tensor of anybody else."""

    def __init__(self, size: int) -> None:
        super().__init__({-1: size})

    def without(self, met: Container[int]) -> int:
        return sum(self.blocks.values())


@dataclass(frozen=True, slots=True)
class _ShardOutline:
    """Makes a shard without contents."""

    shard: Any

    def known_to(self, tracer: Tracer, label: str) -> Any:
        """The parameter, in FSDP2's record of it too."""
        return make_shard(
            self.shard,
            lambda shape, dtype, on_host: torch.empty(shape, dtype=dtype, device="cpu" if on_host else label),
        )


class ShardedStage(Stage):
    """Projects choices for a model that `fully_shard` was called on."""

    def __init__(self, work: Work, batch: Any, spread: Shards, device: Any) -> None:
        super().__init__(work, batch)
        self.label = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self._spread = spread
        for shard in shards_of(work.model):
            self._outlines[id(shard.sharded_param)] = (shard.sharded_param, _ShardOutline(shard))  # type: ignore[assignment]

    def project(self, choice: Choice, **given: Any) -> Any:
        with swapped_shards(self.work.model):
            return super().project(choice, **given)

    def _open(self, work: Work, choice: Choice, store: Store) -> Runner[Resident]:
        weights, sink, own = open_sharded(work, choice, store, self._spread, real=False)
        return Runner(work, choice, weights, sink, own)

    @contextlib.contextmanager
    def _swapped(self, fakes: dict[int, Any]) -> Iterator[Any]:
        with super()._swapped(fakes) as model, silent_collectives(), swapped_shards(model):
            yield model

    def _numbers(self) -> int:
        return super()._numbers() + _talk()
