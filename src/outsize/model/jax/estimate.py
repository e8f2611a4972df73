"""`outsize.estimate` for a step of JAX: what XLA takes for it, or a bound where its device is not here.

In: what the verb was given. Out: a `Footprint`. Nothing of the step runs, and nothing is allocated. One step is looked at:
XLA allocates the same for every call of a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.core.cards import Card, find_card
from outsize.core.errors import InputError
from outsize.core.events import told
from outsize.core.footprint import Footprint
from outsize.core.units import parse_bytes
from outsize.model.estimation import growth
from outsize.model.jax import arena, footprint
from outsize.model.jax.arguments import bytes_on_one, guarded, read_call
from outsize.model.jax.compiled import PLATFORMS, compile_for, find_device
from outsize.model.jax.liveness import follow
from outsize.model.jax.private_parts import require_jax


def estimate(
    step: Callable[..., Any], *args: Any, build: Callable[..., Any] | None = None, device: str = "cuda",
    card: str | None = None, budget: int | str | None = None, steps: int = 3, batch: int | None = None,
    seq: int | None = None, loader: Any = None,
) -> Footprint:  # fmt: skip
    """The memory that a step of JAX takes on a device; the arguments are those of `outsize.estimate`."""
    require_jax()
    if loader is not None:
        raise InputError("loader= is for torch's DataLoader: a step of JAX is estimated without it")
    if str(device).partition(":")[0] not in PLATFORMS:
        raise InputError(f"cannot estimate for the device {device!r}: one of {', '.join(PLATFORMS)}")
    if batch is None and seq is not None:
        raise InputError("seq= needs batch= too: build is called as build(batch, seq)")
    if batch is not None and build is None:
        raise InputError("batch= needs build=, which is called with the batch size")
    chosen = None if card is None else find_card(card)
    capacity = parse_bytes(budget) if budget is not None else None if chosen is None else arena.arena_of(chosen)
    job = _Job(step, args, build, str(device), chosen, capacity)
    with told("tracing", "steps") as job.traced:
        sizes = [size for size in (batch, seq) if size is not None]
        found = job.footprint(*sizes)
        return found if batch is None else _grown(job, found, batch, seq)


@dataclass(slots=True)
class _Job:
    """A step with all that is needed to look at it, once or for several sizes."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    build: Callable[..., Any] | None
    device: str
    card: Card | None
    capacity: int | None
    traced: Callable[[], None] = lambda: None
    known: dict[tuple[int, ...], Footprint] = field(default_factory=dict)

    def footprint(self, *sizes: int) -> Footprint:
        """The footprint at these sizes; they go to the builder."""
        if sizes not in self.known:
            call = read_call(self.step, self.args, self.build, *sizes)
            lived = follow(call.jaxpr, call.donated)
            lived.arguments = [bytes_on_one(shape) for shape in call.shapes]
            there = find_device(self.device)
            donated = [number for number, given in enumerate(call.donated) if given]
            compiled = None
            if there is not None:
                compiled = guarded(call.name, lambda: compile_for(there, call.function, call.shapes, donated))
            self.known[sizes] = footprint.make(call, lived, compiled, self.device, self.card, self.capacity)
            self.traced()
        return self.known[sizes]


def _grown(job: _Job, found: Footprint, batch: int, seq: int | None) -> Footprint:
    """The footprint with how it grows, and the largest batch."""
    after = [] if seq is None else [seq]

    def at(size: int) -> int:
        return job.footprint(size, *after).peak_reserved.bound

    line = growth.fit("batch", at, batch, at(batch))
    grown = None
    if seq is not None:
        grown = growth.fit("sequence", lambda size: job.footprint(batch, size).peak_reserved.bound, seq, at(batch))
    return growth.with_growth(found, line, grown, batch, job.card, job.capacity, at, room=arena.arena_of)
