"""Private parts of `torch.distributed`.

In: the default process group, or a number of ranks to pretend. Out: how long the group waits; a group of so many ranks in one
process, whose collective calls send nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outsize.model.torch_port.parts import has_part, part
from outsize.model.torch_port.patches import Row, replaced

COLLECTIVES = (
    "all_gather_single", "all_gather_into_tensor", "all_gather", "reduce_scatter_single", "reduce_scatter_tensor",
    "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all_single", "all_to_all", "barrier",
)  # fmt: skip
"""Functions of `torch.distributed` that all ranks call together; one calls another in some versions of torch."""


class Done:
    """A call that has nothing to wait for."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def silent_collectives() -> contextlib.AbstractContextManager[None]:
    return replaced([(dist, name, lambda *args, **kwargs: Done()) for name in COLLECTIVES])


@contextlib.contextmanager
def pretended_ranks(count: int, kind: str, rows: list[Row]) -> Iterator[None]:
    """This process believes to be the first of so many ranks, on a `kind` of device; `rows`: what else stands in the place of
    torch's own."""
    store = part("testing._internal.distributed.fake_pg.FakeStore")()
    said = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(min(count, 8))}
    before = {name: os.environ.get(name) for name in said}
    excepthook = sys.excepthook  # a group puts its rank before every line of an error
    dist.init_process_group("fake", rank=0, world_size=count, store=store)
    os.environ.update(said)
    there = lambda *args, **kwargs: None  # noqa: E731
    own: list[Row] = [(dist, name, there) for name in ("init_process_group", "destroy_process_group")]
    # fully_shard without a mesh asks for it
    own.append((part("_C"), "_get_accelerator", lambda *_: torch.device(kind)))
    try:
        with silent_collectives(), replaced([*own, *rows]):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        dist.destroy_process_group()
        sys.excepthook = excepthook


def group_timeout() -> timedelta | None:
    """How long the user's default group waits for a rank; None where this torch does not tell."""
    if not has_part("distributed.distributed_c10d._get_default_timeout"):
        return None
    group = dist.group.WORLD
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(part("device")(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return None


def is_started() -> bool:
    """True in a process of a group, as torchrun, accelerate and Ray Train start them."""
    return bool(dist.is_available() and dist.is_initialized())


def is_old_sharding(model: Any) -> bool:
    """True for a model in FullyShardedDataParallel, the class before `fully_shard`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())
