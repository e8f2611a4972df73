"""Remedies for a host: limits, shared memory, and holding less."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import CONTAINER, ROUNDING


def raise_limit(case: Case) -> Iterator[Remedy]:
    """More of what the machine has."""
    failure = case.failure
    limit = failure.limit_bytes or (case.biting.bytes if case.biting else None)
    held = case.extra("anon_rss_bytes") or case.extra("usage_bytes") or case.need or limit
    want = None if held is None else (max(held, limit or 0) * 3 // 2 + 2**20 - 1) // 2**20
    mib = want or 16384
    if failure.framework == "openvino":  # the driver's largest buffer, which nobody raises
        return
    raising = case.framework.raising
    if limit is None and raising is None and not case.extra("anon_rss_bytes"):
        return
    name, how = raising or CONTAINER
    gives = None if want is None or limit is None else want * 2**20 - limit
    yield make_remedy(
        name, gives, how.format(mib=mib, bytes=mib << 20), "memory that others on the machine then do not have"
    )


def lift_ulimit(case: Case) -> Iterator[Remedy]:
    """`ulimit -v` counts address space, not memory."""
    limit = case.biting
    if limit is not None and limit.name.startswith("ulimit"):
        gives = None if case.reading is None else (case.reading.host.total or 0) - limit.bytes
        yield make_remedy(
            "lift the limit on address space",
            gives,
            f"{limit.name} unlimited   # in the shell or job script",
            "a runaway process is then stopped by the machine only",
            known=Known.EXACT,
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
    if case.growth is None and case.format != "dead child":
        yield make_remedy(
            "see who grows, with the line",
            None,
            "outsize run your_script.py   # peak, timeline and the growing line",
            "under 1 % of time",
        )
    if case.spec is None or case.spec.bytes < 2**26:
        yield make_remedy(
            "stream large arrays instead of holding them",
            None,
            'outsize.open("x.npy")   # then .save("y.zarr", budget="2GiB")',
            "time to read and write the disk",
            ROUNDING,
        )
