"""Remedies for a host: limits, shared memory, and holding less."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import CONTAINER, ROUNDING


def raise_limit(case: Case) -> Iterator[Remedy]:
    """More of what the machine has, at least what is known to be needed, and not more than there is."""
    failure, raising = case.failure, case.framework.raising
    limit = failure.limit_bytes or (case.biting.bytes if case.biting else None)
    if failure.framework == "openvino":  # the driver's largest buffer, which nobody raises
        return
    known = case.known_need
    in_group = case.failure.extra.get("scope") == "cgroup" or case.extra("anon_rss_bytes")
    if limit is None and raising is None and not in_group:
        return
    most = case.reading.host.total if case.reading is not None else None
    want = max(known or 0, limit or 0) * 3 // 2
    if limit is None and want < 2**28:  # what one small victim held says little about the limit
        want = 16 * 2**30
    if most is not None and want > most:
        want = most
    if (limit is not None and want <= limit) or (known is not None and want < known):
        return
    mib = -(-want // 2**20)
    name, how = raising or CONTAINER
    gives = None if limit is None else mib * 2**20 - limit
    yield make_remedy(
        name,
        gives,
        how.format(mib=mib, bytes=mib << 20),
        "memory that others on the machine then do not have",
    )


def lift_ulimit(case: Case) -> Iterator[Remedy]:
    """`ulimit -v` counts address space, not memory."""
    limit = case.biting
    if limit is not None and limit.name.startswith("ulimit"):
        gives = 0 if case.reading is None else (case.reading.host.total or 0) - limit.bytes
        yield make_remedy(
            "lift the limit on address space",
            gives if gives > 0 else None,
            f"{limit.name} unlimited   # in the shell or job script",
            "a runaway process is then stopped by the machine only",
            known=Known.EXACT,
        )


def add_swap(case: Case) -> Iterator[Remedy]:
    """A short peak then ends in slowness instead of a kill."""
    yield make_remedy(
        "add swap, so that a short peak is slow instead of deadly",
        None,
        "fallocate -l 16G /swapfile && chmod 600 /swapfile && mkswap /swapfile && swapon /swapfile",
        "disk, and time while it is used",
    )


def more_shm(case: Case) -> Iterator[Remedy]:
    """Room for batches in flight."""
    shm = case.reading.shm if case.reading else None
    now = shm.total if shm is not None and shm.total is not None else 64 * 2**20
    yield make_remedy(
        "give the container shared memory",
        8 * 2**30 - now if now < 8 * 2**30 else None,
        "docker run --shm-size=8g ...   # Kubernetes: emptyDir, medium: Memory",
        "counts as RAM of the container",
    )
    yield make_remedy(
        "fewer batches in flight",
        None,
        "DataLoader(..., num_workers=2, prefetch_factor=1)   # workers x prefetch_factor batches live there",
        "slower loading",
    )
    yield make_remedy(
        "no workers: no shared memory at all",
        None,
        "DataLoader(..., num_workers=0)",
        "loading no longer overlaps the work",
    )


def less_in_ram(case: Case) -> Iterator[Remedy]:
    """A process that holds too much of the host."""
    if not case.may_be_python or case.on_torch or case.failure.process == "DataLoader worker":
        return
    if not case.watched:
        yield make_remedy(
            "see who grows, with the line",
            None,
            "outsize run your_script.py   # peak, timeline and the growing line",
            "under 1 % of time",
        )
    mib = min(2**31, (case.host_room or 2**32) // 2) // 2**20
    if mib and case.library is None and (case.spec is None or case.spec.bytes < 2**26):
        yield make_remedy(
            "stream large arrays instead of holding them",
            None,
            f'outsize.open("x.npy")   # then .save("y.zarr", budget="{mib}MiB")',
            "time to read and write the disk",
            ROUNDING,
        )
