"""Host memory of a step: resident bytes of a step on the CPU, and host tensors of a step on a card.

In: a trace. Out: amounts. glibc gives large blocks back to the system and keeps small ones. So the host's tensors are
replayed through its model. What the interpreter and torch hold before any tensor exists is added. Tensors are aligned,
so glibc cuts a few bytes off before each. Small objects take some of these bytes, and the free blocks on both sides
can then not be joined.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from outsize.allocator import GlibcSettings, replay
from outsize.core.footprint import Amount, Loading
from outsize.core.noun import Known
from outsize.core.units import KiB, MiB
from outsize.model.estimation.replayed_steps import ReplayedSteps, follow
from outsize.model.tracing.records.replay import as_events, largest_size, likely_size

if TYPE_CHECKING:
    from outsize.model.tracing.tracer import Tracer

BASE_SPREAD = 32 * MiB
"""Bytes by which two starts of one program differ."""

SMALL = 64 * KiB
"""Bytes of small tensors that are not looked at."""

STRAYS = (4, 3)
"""One in this many large chunks of the heap is separated from the chunk before it by a small object: likely, and for
the bound."""


HEAVY = (
    "transformers", "torchvision", "scipy", "pandas", "sklearn", "datasets", "accelerate", "peft", "timm", "diffusers",
)  # fmt: skip
"""Libraries that a training program loads and that hold tens of MiB each."""

CODE = """
import importlib, resource, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        pass
import torch
m = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 4))
o = torch.optim.AdamW(m.parameters())
for _ in range(2):
    m(torch.rand(2, 3, 8, 8)).sum().backward()
    o.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def base() -> int:
    """Resident bytes of a process with the libraries that are loaded here, after a small step; measured in a new
    process."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in HEAVY]
    return _measure_base(tuple(sorted(loaded, key=lambda name: name.count("."))))


@functools.cache
def _measure_base(names: tuple[str, ...]) -> int:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", CODE, *names]
    answer = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(answer.stdout.split()[-1])


def requested(replayed: ReplayedSteps) -> Amount:
    """What a step on the CPU requests. Small differences between runs are within the bound."""
    likely, most = replayed.likely.peak.requested, replayed.most.peak.requested
    return Amount(bytes=likely, bound=int(most * 1.02) + SMALL, known=Known.ESTIMATE)


def amounts(tracer: Tracer, replayed: ReplayedSteps) -> tuple[Amount, Amount, Amount]:
    """(allocated, held from the system, resident) of a step on the CPU."""
    kept, worst = (
        replay(as_events(replayed.events, size), allocator="glibc", settings=GlibcSettings(strays=strays)).peak
        for size, strays in zip((likely_size, largest_size), STRAYS, strict=True)
    )
    known = Known.ESTIMATE
    start = base()
    allocated = Amount(
        bytes=kept.requested, bound=int(max(kept.requested, worst.requested) * 1.02) + 2 * MiB, known=known
    )
    reserved = Amount(bytes=kept.reserved, bound=int(max(kept.reserved, worst.reserved) * 1.1) + 16 * MiB, known=known)
    use = Amount(bytes=start + kept.reserved, bound=start + reserved.bound + BASE_SPREAD, known=known)
    return allocated, reserved, use


def side(tracer: Tracer, loaded: Loading | None) -> Amount:
    """Host tensors of a step that runs on a card: plain ones, pinned ones as their allocator rounds them, and the loader's."""
    plain = follow(tracer.ledger, "cpu", "exact").likely.peak.requested
    pinned = follow(tracer.ledger, "pinned", "pinned").likely.peak.reserved
    likely = plain + pinned + (0 if loaded is None else loaded.total)
    return Amount(bytes=likely, bound=likely + (0 if loaded is None else loaded.batch), known=Known.ESTIMATE)
