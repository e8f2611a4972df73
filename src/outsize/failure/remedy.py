"""What would mend it, ranked by the bytes each gives back.

In: a `Case` and its causes. Out: remedies with predicted bytes and the exact line to use. One already on is never offered,
nor one that cannot help: `empty_cache()` (the allocator has emptied its cache before it raised), expandable segments where
the unused memory is smaller than what is missing, pruning masks (they remove no byte), `file_system` sharing for a full
`/dev/shm` (it lives there too). Each maker below is one remedy; `REMEDIES` says which cause asks for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outsize.core.failure import Cause, Remedy
from outsize.failure.case import Case
from outsize.failure.remedy_device import (
    expandable,
    fewer_graphs,
    fit_training,
    growth,
    jax_room,
    library_handle,
    raise_fraction,
    serving,
    smaller_batch,
    steady_sizes,
    stop_others,
    tf_async,
    watermark,
)
from outsize.failure.remedy_host import less_in_ram, lift_ulimit, more_shm, raise_limit
from outsize.failure.remedy_tensor import check_length, pairwise_in_blocks, reshape_operands, smaller_tensor

Maker = Callable[[Case], Iterator[Remedy]]

REMEDIES: dict[str, tuple[Maker, ...]] = {
    "impossible request": (check_length,),
    "warning only": (),
    "broadcast explosion": (reshape_operands, pairwise_in_blocks),
    "request larger than the device": (smaller_tensor, fit_training, serving),
    "request larger than the machine": (smaller_tensor, less_in_ram),
    "request larger than the limit": (smaller_tensor, raise_fraction, raise_limit),
    "fragmentation": (expandable, steady_sizes, tf_async),
    "memory fraction": (raise_fraction, fit_training),
    "other process": (stop_others, growth, serving),
    "other allocations": (watermark,),
    "CUDA graph pools": (fewer_graphs, fit_training),
    "refused though free": (stop_others,),
    "preallocation": (growth,),
    "shared memory": (more_shm,),
    "limit": (raise_limit, less_in_ram),
    "machine out of memory": (less_in_ram,),
    "address space": (lift_ulimit, smaller_tensor),
    "killed": (less_in_ram,),
    "leak": (less_in_ram,),
    "memory already full": (smaller_batch, jax_room, less_in_ram),
    "true need": (
        smaller_tensor,
        expandable,
        fit_training,
        smaller_batch,
        watermark,
        growth,
        serving,
        library_handle,
        less_in_ram,
    ),
}
"""Cause -> the remedies worth trying."""

_DEVICE_ONLY = {expandable, steady_sizes, fewer_graphs, fit_training, raise_fraction}
_HOST_ONLY = {less_in_ram, lift_ulimit}


def find_remedies(case: Case, causes: tuple[Cause, ...]) -> tuple[Remedy, ...]:
    """Every remedy that can help, most bytes first; those whose bytes cannot be told keep the order of the table."""
    on_device = not case.on_host and (case.failure.device or "") not in ("", "cpu")
    found: dict[str, Remedy] = {}
    for cause in causes[: 1 if causes[0].name == "broadcast explosion" else 2]:
        for maker in REMEDIES.get(cause.name, ()):
            if (maker in _HOST_ONLY and on_device) or (maker is watermark and case.failure.device != "mps"):
                continue
            if maker in _DEVICE_ONLY and case.on_host:
                continue
            for remedy in maker(case):
                if remedy.saves is None or remedy.saves > 0:
                    found.setdefault(remedy.name, remedy)
    return tuple(sorted(found.values(), key=lambda remedy: -(remedy.saves or 0)))
