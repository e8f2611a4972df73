"""What would mend it, ranked by the bytes each gives back.

In: a `Case` and its causes. Out: remedies with predicted bytes and the exact line to use. One already on is never offered,
nor one that cannot help: `empty_cache()` (the allocator has emptied its cache before it raised), expandable segments where
the unused memory is smaller than what is missing, pruning masks (they remove no byte), `file_system` sharing for a full
`/dev/shm` (it lives there too). Each maker below is one remedy; `REMEDIES` says which cause asks for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outsize.core.failure import Cause, CauseName, Remedy
from outsize.core.noun import Known
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import framework
from outsize.failure.remedy_device import (
    expandable,
    fewer_graphs,
    raise_fraction,
    shorter_requests,
    steady_sizes,
    stop_others,
    train_smaller,
)
from outsize.failure.remedy_host import add_swap, less_in_ram, lift_ulimit, more_shm, raise_limit
from outsize.failure.remedy_tensor import check_length, pairwise_in_blocks, reshape_operands, smaller_tensor

Maker = Callable[[Case], Iterator[Remedy]]

REMEDIES: dict[CauseName, tuple[Maker, ...]] = {
    CauseName.IMPOSSIBLE: (check_length,),
    CauseName.WARNING: (),
    CauseName.BROADCAST: (reshape_operands, pairwise_in_blocks),
    CauseName.LARGER_THAN_DEVICE: (smaller_tensor, train_smaller, shorter_requests),
    CauseName.LARGER_THAN_MACHINE: (smaller_tensor, train_smaller, less_in_ram),
    CauseName.LARGER_THAN_LIMIT: (smaller_tensor, raise_fraction, raise_limit, train_smaller),
    CauseName.FRAGMENTATION: (expandable, steady_sizes),
    CauseName.MEMORY_FRACTION: (raise_fraction, train_smaller),
    CauseName.OTHER_PROCESS: (stop_others, shorter_requests),
    CauseName.OTHER_ALLOCATIONS: (),
    CauseName.GRAPH_POOLS: (fewer_graphs, train_smaller),
    CauseName.REFUSED: (stop_others,),
    CauseName.PREALLOCATION: (),
    CauseName.SHARED_MEMORY: (more_shm,),
    CauseName.LIMIT: (raise_limit, train_smaller, less_in_ram),
    CauseName.MACHINE: (train_smaller, less_in_ram, add_swap),
    CauseName.ADDRESS_SPACE: (lift_ulimit, smaller_tensor, train_smaller),
    CauseName.KILLED: (train_smaller, less_in_ram),
    CauseName.LEAK: (train_smaller, less_in_ram),
    CauseName.ALREADY_FULL: (train_smaller, less_in_ram),
    CauseName.TRUE_NEED: (smaller_tensor, expandable, train_smaller, shorter_requests, less_in_ram),
}
"""Cause -> the remedies worth trying; what the framework itself offers comes before those for any program on a host."""

_DEVICE_ONLY = {expandable, steady_sizes, fewer_graphs, raise_fraction}
_HOST_ONLY = {less_in_ram, lift_ulimit, add_swap}


def find_remedies(case: Case, causes: tuple[Cause, ...]) -> tuple[Remedy, ...]:
    """Every remedy that can help, most bytes first; those whose bytes cannot be told keep the order of the table."""
    found: dict[str, Remedy] = {}
    for cause in causes[: 1 if causes[0].name == CauseName.BROADCAST else 2]:
        for remedy in _remedies(case, cause.name):
            if remedy.saves is None or remedy.saves > 0:
                found.setdefault(remedy.name, remedy)
    return tuple(sorted(found.values(), key=lambda remedy: -(remedy.saves or 0)))


def _remedies(case: Case, cause: CauseName) -> Iterator[Remedy]:
    """What the table has for one cause."""
    makers = [maker for maker in REMEDIES[cause] if maker not in (_DEVICE_ONLY if case.on_host else ())]
    for maker in makers:
        if maker not in _HOST_ONLY:
            yield from maker(case)
    yield from _advice(case, cause)
    for maker in makers:
        if maker in _HOST_ONLY and not case.on_device:
            yield from maker(case)


def _advice(case: Case, cause: CauseName) -> Iterator[Remedy]:
    """What the framework that failed, or that the process had loaded, offers, where it is not on already."""
    place = (case.failure.device or ("cpu" if case.on_host else "cuda")).partition(":")[0]
    library = () if case.library is None else framework(case.library).advice
    for row in (*case.framework.advice, *library):
        value = case.settings.get(row.variable)
        if (
            cause in row.causes
            and row.place in ("", place)
            and (not row.formats or case.format in row.formats)
            and row.process in ("", case.failure.process)
            and (value is None or (row.done and value.lower() != row.done))
        ):
            gives = getattr(case, row.gives) if row.gives else None
            yield make_remedy(
                row.name, gives, row.how, row.costs, row.exactness, Known.BOUND if row.gives else Known.ESTIMATE
            )
