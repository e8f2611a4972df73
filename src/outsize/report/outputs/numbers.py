"""A `Sample` as named numbers: the same names in every logger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outsize.core.outcomes.recording import Sample


class Number(NamedTuple):
    """One number of a sample."""

    name: str
    """What it is: `host_anonymous_bytes`."""
    labels: tuple[tuple[str, str], ...]
    """Which one of several: the GPU, the allocator."""
    value: float

    @property
    def path(self) -> str:
        """Name and labels as loggers take them: `memory/torch/cuda:0/allocated_bytes`."""
        group, _, rest = self.name.partition("_")
        return "/".join(
            ("memory", *(value for _, value in self.labels), rest) if self.labels else ("memory", group, rest)
        )


_HOST = ("rss", "anonymous", "shared", "uss", "swap", "page_cache", "used", "limit")
_GPU = ("used", "free", "total")
_ALLOCATOR = ("requested", "allocated", "reserved", "fragments")

HELP = {
    "host_rss_bytes": "RAM that the processes have mapped, file pages included",
    "host_anonymous_bytes": "RAM of the processes that the kernel cannot take back",
    "host_shared_bytes": "shared memory of the processes, counted once",
    "host_uss_bytes": "RAM that would be free if the processes ended",
    "host_swap_bytes": "memory of the processes in swap",
    "host_page_cache_bytes": "file pages that the kernel frees before it kills",
    "host_used_bytes": "what counts against the limit",
    "host_limit_bytes": "the limit that is reached first",
    "host_processes": "processes of the tree",
    "gpu_used_bytes": "taken on the GPU, by whomever",
    "gpu_free_bytes": "left on the GPU",
    "gpu_total_bytes": "what the GPU has",
    "gpu_utilisation_ratio": "share of time in which a kernel ran",
    "allocator_requested_bytes": "asked for by the program and not given back",
    "allocator_allocated_bytes": "in blocks that the allocator has handed out",
    "allocator_reserved_bytes": "held by the allocator, used or not",
    "allocator_fragments_bytes": "free blocks that cannot be given back",
}
"""Every name, and what it means."""


def numbers(sample: Sample) -> Iterator[Number]:
    """Every number of a sample that is known. Allocators of several processes on one device are summed."""
    for field in _HOST:
        value = getattr(sample.host, field)
        if value is not None:
            yield Number(f"host_{field}_bytes", (), value)
    if sample.process_count:
        yield Number("host_processes", (), sample.process_count)
    for gpu in sample.gpus:
        which = (("gpu", str(gpu.index)),)
        for field in _GPU:
            if getattr(gpu, field) is not None:
                yield Number(f"gpu_{field}_bytes", which, getattr(gpu, field))
        if gpu.utilisation is not None:
            yield Number("gpu_utilisation_ratio", which, gpu.utilisation)
    sums: dict[tuple[str, str, str], int] = {}
    for one in sample.allocators:
        for field in _ALLOCATOR:
            if getattr(one, field) is not None:
                key = (field, one.framework, one.device)
                sums[key] = sums.get(key, 0) + getattr(one, field)
    for (field, framework, device), value in sums.items():
        yield Number(f"allocator_{field}_bytes", (("framework", framework), ("device", device)), value)
