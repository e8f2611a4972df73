"""Runs a step of a model that is spread over ranks on tensors without contents.

In: the user's work and a choice. Out: a `Projection` of this rank. Of a sharded model FSDP2's own code runs, on shards without
contents, and its collective calls send nothing: so gathered weights, copies around collective calls, prefetched groups and
gradients that wait for the last slice are those of the installed torch. Beside a replica are DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import torch

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import IN_FLIGHT, NoStore
from outsize.model.fitting.plan.dry_run import NUMBERS, Call, Outline, Stage, copy_optimizer
from outsize.model.fitting.plan.foreign_tensors import Beside
from outsize.model.fitting.plan.projection import Watch
from outsize.model.fitting.ranks.runner import open_sharded
from outsize.model.fitting.ranks.spread import Replicas, Shards, Spread
from outsize.model.fitting.run.runner import Runner, Work
from outsize.model.fitting.update.optimizer_subset import copy_all, state_of
from outsize.model.fitting.update.undo_log import written_buffers
from outsize.model.torch_port.ranked import silent_collectives
from outsize.model.torch_port.sharding import (
    is_spread,
    local_part,
    make_shard,
    shards_of,
    spread_like,
    swapped_shards,
)
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
    import torch.distributed as dist

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
        return make_shard(self.shard, _maker(label))


def _maker(label: str) -> Callable[[tuple[int, ...], Any, bool], Any]:
    return lambda shape, dtype, on_host: torch.empty(shape, dtype=dtype, device="cpu" if on_host else label)


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

    def _run_resident(
        self, watch: Watch, choice: Choice, batch: Any, call: Call | None, fakes: dict[int, Any]
    ) -> tuple[dict[str, Any], Any]:
        store = NoStore(0 if self.label == "cpu" else IN_FLIGHT)
        optimizer = None if self.work.optimizer is None else self._optimizer(fakes, self.label)
        with self._swapped(fakes) as model, silent_collectives(), swapped_shards(model):
            watch.begin(model)
            work = replace(self.work, optimizer=optimizer, scaler=None)
            weights, sink, own = open_sharded(work, choice, store, self._spread, real=False)
            runner = Runner(work, choice, weights, sink, own)
            runner.phase = watch.phase
            before = [*copy_all(written_buffers(self.work.written)), torch.empty(NUMBERS + _talk(), dtype=torch.uint8)]
            if self.work.backwards:
                runner.users_step(batch)
            else:
                runner.step(batch) if optimizer is not None else runner.backward(batch)
        values = (
            [] if optimizer is None else [v for v in state_of(optimizer) if isinstance(v, torch.Tensor) and v.dim()]
        )
        state = sum(local_part(v).numel() * v.element_size() for v in values)
        return {"away": store.peak, "state": state, "taken_apart": True}, (runner, optimizer, before)

    def _optimizer(self, fakes: dict[int, Any], label: str) -> Any:
        """The user's optimizer over shards without contents, with the state that it has."""
        real = self.work.optimizer
        made = copy_optimizer(
            real, [{**group, "params": [fakes[id(p)] for p in group["params"]]} for group in real.param_groups]
        )
        make = _maker(label)

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if is_spread(value) and value.dim():
                local = local_part(value)
                return spread_like(
                    value, make(tuple(local.shape), value.dtype, local.device.type != label.split(":")[0])
                )
            return Outline.of(value).make(label) if value.dim() else local_part(value).detach().clone()

        for parameter, values in real.state.items():
            if id(parameter) in fakes:
                made.state[fakes[id(parameter)]] = {name: copied(value) for name, value in values.items()}
        return made
