"""Private parts of `torch.distributed` and of DistributedDataParallel.

In: the default process group, a replica. Out: how long the group waits, how a replica of a model is told from a sharded one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from outsize.model.torch_port.parts import has_part, part


def group_timeout() -> timedelta | None:
    """How long the user's default group waits for a rank; None where this torch does not tell."""
    import torch.distributed as dist

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
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def is_old_sharding(model: Any) -> bool:
    """True for a model in FullyShardedDataParallel, the class before `fully_shard`."""
    import sys

    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())
