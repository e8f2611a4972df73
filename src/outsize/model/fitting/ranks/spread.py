"""How a model is spread over ranks, and what that asks of a step.

In: a model in DistributedDataParallel, or one that `fully_shard` was called on (FSDP2, HSDP, with or without an offload policy).
Out: `Replicas` or `Shards`: what a pass does at its beginning, before each slice, after a failure and at its end.

Replicas talk to each other only at the end of a step: the passes run without DDP's own reduction, the ranks agree that all went
well, and then an empty backward pass carries the gradients through DDP, with its buckets, hooks and settings. So a rank that
fails leaves nobody waiting. Shards talk in every pass: weights are gathered, and gradients reduced in the last slice only.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch

from outsize.core.errors import InputError
from outsize.model.fitting.ranks.collectives import Collectives, Pausing
from outsize.model.torch_port.ranked import is_old_sharding, is_started
from outsize.model.torch_port.sharding import is_spread, reset_shards, shards_of, states_of


class Spread:
    """One model on many ranks."""

    kind: ClassVar[str]
    """As a user reads it."""
    forbidden: ClassVar[dict[str, str]]
    """Remedy -> why it cannot be used."""
    talks = False
    """The ranks talk during a pass, so that all have to run the same one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        """The module whose step is planned."""
        self.pausing: Pausing = contextlib.nullcontext
        """Around a collective call."""

    @property
    def held(self) -> int:
        """Bytes that are held all the time and belong to no tensor that Python sees."""
        return 0

    def settle(self) -> None:
        """Every parameter is as the optimizer knows it."""

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """While the slices of a step run."""
        return contextlib.nullcontext()

    def begin(self, slices: int) -> None:
        """A pass of so many slices begins."""

    def begin_slice(self) -> None:
        """Another slice begins."""

    def learn(self) -> None:
        """The pass was whole on this rank."""

    def answer_rest(self) -> None:
        """It failed on this rank: nobody may wait for it."""

    def reset(self) -> None:
        """It failed on some rank: nothing of it is left."""

    def reduce(self) -> None:
        """It was whole on all ranks: gradients become those of all."""


ON_ONE_RANK = {
    "in_backward": "every rank has to have all gradients before the first update",
    **dict.fromkeys(("state_bits", "frozen_bits", "kept_bits"), "fewer bits are for one rank"),
}
"""Remedy -> why no spread model can use it."""


class Replicas(Spread):
    """DistributedDataParallel: each rank has the whole model."""

    kind = "DDP"
    forbidden: ClassVar[dict[str, str]] = {
        **ON_ONE_RANK,
        "gradients_away": "DDP reduces gradients where they are",
        "stream": "DDP keeps the weights of its module",
    }

    def __init__(self, replica: Any) -> None:
        super().__init__(replica.module)
        self._replica = replica

    @property
    def held(self) -> int:
        """DDP's buckets: a second copy of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """A loss that calls the replica itself reduces nothing either."""
        return self._replica.no_sync()  # type: ignore[no-any-return]

    def reduce(self) -> None:
        """An empty pass through DDP, which adds zeros to the gradients and reduces them as it always does."""

        class Carry(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, *parameters: Any) -> Any:
                ctx.save_for_backward(*parameters)
                return parameters[0].new_zeros(())

            @staticmethod
            def backward(ctx: Any, given: Any) -> Any:
                zero = ctx.saved_tensors[0].new_zeros(())
                return tuple(zero.to(p.dtype).expand_as(p) for p in ctx.saved_tensors)  # no memory: one zero for all

        class Carrier(torch.nn.Module):  # type: ignore[misc]
            def forward(self, _: Any) -> Any:
                return Carry.apply(*parameters)

        parameters = [p for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        if not parameters:
            raise InputError("no parameter of the model got a gradient, so there is nothing to reduce over the ranks")
        replica = self._replica
        replica.module = Carrier()
        try:
            replica(parameters[0].new_zeros(())).backward()
        finally:
            replica.module = self.model


INSIDE = "its weights are shards, which are whole only while their module runs"


class Shards(Spread):
    """`fully_shard`: each rank has a part of every parameter."""

    kind = "FSDP2"
    talks = True
    forbidden: ClassVar[dict[str, str]] = {
        **ON_ONE_RANK,
        "gradients_away": "an OffloadPolicy of fully_shard does that for shards",
        "state_away": "an OffloadPolicy of fully_shard does that for shards",
        "stream": "shards are gathered when they are needed already",
        "chunks": INSIDE,
        "offload": INSIDE,
    }

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        from torch.distributed.fsdp import FSDPModule

        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.each = False
        """Gradients are reduced in every slice: more traffic, and no gradients of whole parameters wait for the last one."""
        self._known: dict[Any, Collectives] = {}
        """What slices call, by how they run: which modules are computed again, and when gradients are reduced."""
        self._calls = Collectives()
        self._slices = self._begun = 0
        self.settle()

    def settle(self) -> None:
        """A forward pass without gradients leaves the outermost weights gathered."""
        for module in self._modules:
            module.reshard()

    def use(self, how: Any) -> None:
        """The passes that follow run in this way."""
        self._calls = self._known.setdefault((how, self.each), Collectives())

    def passing(self) -> contextlib.AbstractContextManager[None]:
        return self._calls.noting(self.pausing)

    def begin(self, slices: int) -> None:
        self._slices, self._begun = slices, 0

    def begin_slice(self) -> None:
        """Gradients are reduced in the last slice."""
        self._begun += 1
        self._calls.begin_slice()
        for module in self._modules:
            module.set_requires_gradient_sync(self.each or self._begun == self._slices, recurse=False)

    def learn(self) -> None:
        self._calls.learn()

    def answer_rest(self) -> None:
        self._calls.answer_rest(self._slices)

    def reset(self) -> None:
        reset_shards(self.model)


def find_spread(model: Any) -> Spread | None:
    """How a model is spread over the ranks of a run; None where it is not."""
    if not isinstance(model, torch.nn.Module) or not is_started():
        return None
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return Replicas(model)
    if is_old_sharding(model):
        raise InputError(
            "the model is in FullyShardedDataParallel, which hides its parameters: shard it with "
            "torch.distributed.fsdp.fully_shard, which fit plans for"
        )
    inside = next(
        (n for n, m in model.named_modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel)), None
    )
    if inside is not None:
        raise InputError(
            f"{inside} is in DistributedDataParallel and the rest of the model is not: wrap the whole model"
        )
    if states_of(model):
        known = {id(shard.sharded_param) for shard in shards_of(model)}
        foreign = next((n for n, p in model.named_parameters() if is_spread(p) and id(p) not in known), None)
        layered = next((s for s in shards_of(model) if s.is_dtensor), None)
        if foreign is not None or layered is not None:
            raise InputError(
                "some parameters are spread by tensor parallelism as well, whose steps fit sizes and does not run: use "
                "outsize.estimate"
            )
        return Shards(model)
    if any(is_spread(parameter) for parameter in model.parameters()):
        raise InputError(
            "the model's parameters are DTensors that fully_shard did not make (tensor parallelism), whose steps fit does not "
            "run: use outsize.estimate"
        )
    return None
