"""`outsize.estimate`: how much memory a step will take, found without a card and without running it.

In: the user's step, and either a function that builds its arguments or the arguments themselves. Out: a `Footprint`. Several
steps are traced, because optimizer state and kept gradients appear only after the first. The ledger is replayed
through a model of the allocator. The CUDA context is added as a constant of the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outsize.core.cards import Card, find_card
from outsize.core.errors import InputError
from outsize.core.events import told
from outsize.core.footprint import Footprint, Loading
from outsize.core.units import parse_bytes
from outsize.model.estimation import growth, replayed_steps
from outsize.model.estimation import loaders as loading
from outsize.model.frameworks import adapter_of
from outsize.model.torch_port.parts import require_torch

if TYPE_CHECKING:
    from outsize.model.estimation.job import Job
    from outsize.model.estimation.ranks import Spreading

DEFAULT_CARD = "H200"
"""The card that is assumed if none is named: the one on which the kernels were measured."""


def estimate(
    step: Callable[..., Any], *args: Any, build: Callable[..., Any] | None = None, device: str = "cuda",
    card: str | None = None, budget: int | str | None = None, steps: int = 3, batch: int | None = None,
    seq: int | None = None, loader: Any = None, ranks: int | str | None = None, sharding: str | None = None,
) -> Footprint:  # fmt: skip
    """The memory that `step(*build())` takes on `device`. It is traced on tensors without contents: nothing is
    allocated, and no card is needed.

    `args` may be given instead of `build`: real modules, optimizers and tensors are copied without their contents and
    not changed. `card` (`rtx4090`) or `budget` (bytes) says where it should fit. With `batch`, `build` is called as
    `build(batch)`; the footprint then also says how memory grows and the largest batch per card. With `seq` too it is
    called as `build(batch, seq)`, and the footprint also says how memory grows with the sequence. `loader` is the
    DataLoader that will feed the step: its workers, prefetched batches and pinned copies are counted on the host.

    `ranks` (8) is the number of processes that train together, of which the one that holds most is followed. `sharding` spreads
    the model over them: `ddp`, `zero1`, `zero2`, `fsdp`, `hsdp`, `offload`; left out, your own code does. `ranks="fewest"` also
    says how many cards train it, for each way to spread it.
    """
    other = adapter_of(step, args, build)
    if other is not None and (ranks is not None or sharding is not None):
        raise InputError("ranks= and sharding= are for steps of PyTorch")
    if other is not None:
        found: Footprint = other.estimate(
            step, *args, build=build, device=device, card=card, budget=budget, steps=steps, batch=batch, seq=seq, loader=loader,
        )  # fmt: skip
        return found
    require_torch("outsize.estimate")
    from outsize.model.estimation.job import Job
    from outsize.model.estimation.ranks import read_spreading

    chosen = None if card is None else find_card(card)
    capacity = capacity_of(chosen, budget)
    label = label_of(device)
    job = Job(step, args, build, label, chosen or find_card(DEFAULT_CARD), steps)
    job.spreading = read_spreading(ranks, sharding)
    job.shape = (1.0, 0) if ranks == "fewest" else None
    loaded = None if loader is None else loading.of(loader)
    with told("tracing", "steps") as job.traced:
        footprint = _estimate(job, batch, seq, chosen, capacity, loaded)
        return footprint if ranks != "fewest" else _with_fewest(job, footprint, batch, seq, sharding)


def _with_fewest(job: Job, plain: Footprint, batch: int | None, seq: int | None, sharding: str | None) -> Footprint:
    """How many cards the step takes, spread in each way."""
    from outsize.model.estimation.ranks import find_fewest

    if plain.capacity is None:
        raise InputError("ranks='fewest' needs a card, such as card='a100-80gb', or a budget")
    sizes = [size for size in (batch, seq) if size is not None]

    def trace(spreading: Spreading) -> Footprint:
        job.spreading = spreading
        tracer = job.trace(*sizes)
        return job.footprint(tracer, job.replay(tracer), plain.card, plain.capacity, None)

    assert job.shape is not None
    rows = find_fewest(trace, sharding, plain, *job.shape)
    return dataclasses.replace(plain, fewest=rows)


def _estimate(
    job: Job, batch: int | None, seq: int | None, chosen: Card | None, capacity: int | None, loaded: Loading | None
) -> Footprint:
    """Traces the step as given, and at other sizes if `batch` or `seq` is given."""
    sizes = [size for size in (batch, seq) if size is not None]
    tracer = job.trace(*sizes)
    replayed = job.replay(tracer)
    footprint = job.footprint(tracer, replayed, chosen, capacity, loaded)
    peak = replayed_steps.peak_within(replayed, growth.STEPS)
    grown = None
    if seq is not None:
        before = [] if batch is None else [batch]
        grown = growth.fit("sequence", lambda size: job.play(*before, size, steps=growth.STEPS), seq, peak)
    if batch is None:
        return footprint if grown is None else dataclasses.replace(footprint, growth=(grown,))
    after = [] if seq is None else [seq]
    line = growth.fit("batch", lambda size: job.play(size, *after, steps=growth.STEPS), batch, peak)
    return growth.with_growth(
        footprint, line, grown, batch, chosen, capacity, lambda size: replayed if size == batch else job.play(size, *after)
    )  # fmt: skip


def capacity_of(card: Card | None, budget: int | str | None) -> int | None:
    """Bytes that a step may reserve: the budget, else what the card has."""
    if budget is not None:
        return parse_bytes(budget)
    return None if card is None else card.usable


def label_of(device: str) -> str:
    """`cuda`, `cuda:1`, `cpu` as the ledger names them."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "cpu"):
        raise InputError(f"cannot estimate for the device {device!r}: 'cuda', 'cuda:1' and 'cpu' are modelled")
    return "cpu" if kind == "cpu" else f"cuda:{index or 0}"
