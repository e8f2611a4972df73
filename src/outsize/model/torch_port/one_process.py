"""What torch spreads over several processes and cards, in one process on one card.

Out: rows for `patches.replaced`. `torch.distributed` answers as the only process of its group. A DataLoader makes its batches in
this process. DistributedDataParallel calls its module and holds the buckets into which it would copy the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.torch_port.fake_cuda import Stream, answer
from outsize.model.torch_port.parts import part
from outsize.model.torch_port.patches import Row

BUCKETS = (2**20, 25 * 2**20)
"""Bytes at which DistributedDataParallel closes its first bucket, and the others."""


def single_process_rows() -> list[Row]:
    """One process, whatever the script asks for."""
    return [*_group_rows(), (torch.multiprocessing, "spawn", _spawn), *replica_rows()]


def replica_rows() -> list[Row]:
    """DistributedDataParallel without peers."""
    replica = _make_replica()
    return [(owner, "DistributedDataParallel", replica) for owner in (torch.nn.parallel, torch.nn.parallel.distributed)]


def batches_in_process(loader: Any) -> Iterator[Any]:
    """The batches of a DataLoader, made here whatever its number of workers."""
    alone = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}
    before = {name: getattr(loader, name, None) for name in alone}
    vars(loader).update(alone)
    try:
        return part("utils.data.dataloader._SingleProcessDataLoaderIter")(loader)  # type: ignore[no-any-return]
    finally:
        vars(loader).update(before)


def _spawn(function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, **_: Any) -> None:
    function(0, *args)


def _group_rows() -> list[Row]:
    group = torch.distributed
    started: list[bool] = []
    done = Stream()  # a handle that has nothing to wait for
    fixed: dict[str, Any] = {
        "is_available": True, "is_nccl_available": True, "get_rank": 0, "get_world_size": 1, "get_backend": "nccl",
        "get_node_local_rank": 0, "new_group": None, "barrier": None, "monitored_barrier": None, "broadcast": done,
        "all_reduce": done, "reduce": done, "broadcast_object_list": None,
    }  # fmt: skip
    rows: list[Row] = [(group, name, answer(value)) for name, value in fixed.items()]

    def collect(out: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(out, list):
            out[0] = given
        else:
            out.copy_(given)
        return done

    rows += [(group, name, collect) for name in ("all_gather", "all_gather_object", "all_gather_into_tensor")]
    rows += [
        (group, "is_initialized", lambda: bool(started)),
        (group, "init_process_group", lambda *args, **kwargs: started.append(True)),
        (group, "destroy_process_group", lambda *args, **kwargs: started.clear()),
    ]
    return rows


def _make_replica() -> type:
    real = torch.nn.parallel.DistributedDataParallel

    class Answers(type):
        """What torch or a library asks of the class itself, its own class answers: no replica is at work."""

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    class DistributedDataParallel(torch.nn.Module, metaclass=Answers):  # type: ignore[misc]
        """One replica of one."""

        require_backward_grad_sync = True

        def __init__(self, module: Any, *args: Any, bucket_cap_mb: float | None = None, gradient_as_bucket_view: bool = False,
                     **kwargs: Any) -> None:  # fmt: skip
            super().__init__()
            self.module = module
            self.static_graph = False
            last = BUCKETS[1] if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
            self.flat = [] if gradient_as_bucket_view else list(make_buckets(module, last))

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*inputs, **kwargs)

        def no_sync(self) -> Any:
            return contextlib.nullcontext()

        join = no_sync

        def register_comm_hook(self, state: Any, hook: Any) -> None:
            pass

    return DistributedDataParallel


def make_buckets(module: Any, last: int = BUCKETS[1]) -> Iterator[Any]:
    """Flat tensors for the gradients, last parameters first."""
    sizes: dict[Any, int] = {}
    limits: dict[Any, int] = {}
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        key = (parameter.dtype, parameter.device)
        sizes[key] = sizes.get(key, 0) + parameter.numel()
        if sizes[key] * parameter.element_size() >= limits.get(key, BUCKETS[0]):
            yield torch.empty(sizes.pop(key), dtype=key[0], device=key[1])
            limits[key] = last
    for (dtype, device), elements in sizes.items():
        yield torch.empty(elements, dtype=dtype, device=device)
