"""A footprint from what is known of a step: its compilation, or the bound of its jaxpr.

In: a call, what lives in it, perhaps a compilation. Out: `Footprint`, with the nouns that torch's steps have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outsize.core.cards import CONTEXT_BYTES, Card
from outsize.core.footprint import Amount, Footprint, Layers
from outsize.core.memory import HOST, Part, Pool
from outsize.core.noun import Known
from outsize.core.units import MiB
from outsize.model.estimation.moments import STRETCHES
from outsize.model.jax import arena
from outsize.model.jax.arguments import INPUTS, STATE, WEIGHTS, Call, is_spread
from outsize.model.jax.compiled import Compiled
from outsize.model.jax.liveness import Lived, Moment

KINDS = (WEIGHTS, "outputs", "constants", STATE, INPUTS, "code", "temporaries")
RUNTIME = 220 * MiB
"""Resident bytes of a process that has imported JAX and compiled a step for the CPU: 221 MiB with 0.10.2."""


def make(
    call: Call, lived: Lived, compiled: Compiled | None, device: str, card: Card | None, capacity: int | None
) -> Footprint:
    """All that is known, in one noun."""
    on_host = device.partition(":")[0] == "cpu"
    guesses = [f"{what} is in the step, whose own memory nobody knows before it runs" for what in sorted(lived.unknown)]
    if not on_host and compiled is None and any(moment.name == "conv_general_dilated" for moment in lived.moments):
        guesses.append("convolutions take workspaces on a card that only its library knows")
    parts = _parts(call, lived, compiled)
    total = sum(part.bytes for part in parts)
    bound = total if compiled is not None else lived.bound + total - lived.peak
    known = Known.EXACT if compiled is not None else Known.BOUND
    if guesses:
        known = Known.ESTIMATE
    requested = Amount(bytes=total, bound=bound, known=known)
    lost = 0 if on_host else _lost(lived, compiled)
    allocated = (
        requested
        if on_host
        else Amount(bytes=total, bound=bound + lost, known=Known.ESTIMATE if guesses else Known.BOUND)
    )
    return Footprint(
        name=call.name, pool=HOST if on_host else Pool(kind="device", index=int(device.partition(":")[2] or 0)), steps=1,
        peak_requested=requested, peak_allocated=allocated, peak_reserved=allocated,
        device_use=_use(allocated, on_host, card), parts=parts, modules=_largest(lived, by="name"),
        lines=_largest(lived, by="line"), kinds=KINDS, timeline=_timeline(call, lived), peak_label=_peak_label(lived),
        card=card, capacity=capacity, fits=_verdict(allocated, capacity, sure=not guesses),
        notes=(*call.notes, *_notes(call, compiled, device, card), *guesses), guesses=tuple(guesses),
    )  # fmt: skip


def _lost(lived: Lived, compiled: Compiled | None) -> int:
    """What the arena may give above what is asked of it. Sharded arguments lose less than whole ones do."""
    if compiled is None:
        temporaries = lived.bound - lived.held
        return arena.most_lost(lived.arguments, lived.outputs, lived.aliased, temporaries)
    donated = sum(lived.outputs) - compiled.outputs + compiled.aliased
    return arena.most_lost(lived.arguments, lived.outputs, donated, compiled.temporaries, compiled.code)


def _parts(call: Call, lived: Lived, compiled: Compiled | None) -> tuple[Part, ...]:
    """What is held at the peak, by kind."""
    exact, known = Known.EXACT, Known.EXACT if compiled is not None else Known.BOUND
    sizes: dict[str, int] = defaultdict(int)
    for kind, size in zip(call.kinds, lived.arguments, strict=True):
        sizes[kind] += size
    outputs, aliased = (sum(lived.outputs), lived.aliased) if compiled is None else (compiled.outputs, compiled.aliased)
    sizes["outputs"] = outputs - aliased
    sizes["constants"] = lived.constants if compiled is None else compiled.constants
    sizes["temporaries"] = lived.temporaries if compiled is None else compiled.temporaries
    sizes["code"] = 0 if compiled is None else compiled.code
    if compiled is not None:  # sharded arguments are smaller on each device than as a whole
        whole = sum(sizes[kind] for kind in (WEIGHTS, STATE, INPUTS))
        for kind in (WEIGHTS, STATE, INPUTS):
            sizes[kind] = sizes[kind] * compiled.arguments // whole if whole else 0
        sizes[INPUTS] += compiled.arguments - sum(sizes[kind] for kind in (WEIGHTS, STATE, INPUTS))
    unsure = ("temporaries", "constants")
    return tuple(
        Part(name=kind, bytes=sizes[kind], known=known if kind in unsure else exact) for kind in KINDS if sizes[kind]
    )


def _use(allocated: Amount, on_host: bool, card: Card | None) -> Amount:
    """What tools outside see."""
    if on_host:
        return Amount(bytes=allocated.bytes + RUNTIME, bound=allocated.bound + RUNTIME + 64 * MiB, known=Known.ESTIMATE)
    least = arena.arena_of(card) if card is not None and arena.preallocates() else 0
    return Amount(
        bytes=max(allocated.bytes, least) + CONTEXT_BYTES, bound=max(allocated.bound, least) + CONTEXT_BYTES,
        known=Known.ESTIMATE,
    )  # fmt: skip


def _largest(lived: Lived, by: str) -> tuple[Part, ...]:
    """Temporaries at the highest moment by operator or by line, largest first."""
    sums: dict[str, int] = defaultdict(int)
    for value in lived.alive:
        sums[str(getattr(value, by)) or "unknown line"] += value.bytes
    rows = sorted(sums.items(), key=lambda row: -row[1])
    return tuple(Part(name=name, bytes=size, known=Known.BOUND) for name, size in rows[:20] if size)


def _timeline(call: Call, lived: Lived) -> tuple[Layers, ...]:
    """Memory over the operators of the jaxpr; of several in one stretch the highest."""
    fixed: dict[str, int] = defaultdict(int)
    for kind, size in zip(call.kinds, lived.arguments, strict=True):
        fixed[kind] += size
    fixed["outputs"], fixed["constants"] = sum(lived.outputs) - lived.aliased, lived.constants
    moments: Sequence[Moment] = lived.moments
    count = len(moments)
    stretches = min(count, STRETCHES)
    chosen = [
        max(range(count * i // stretches, count * (i + 1) // stretches), key=lambda number: moments[number].bytes)
        for i in range(stretches)
    ]
    return tuple(
        Layers(
            time=number, label="step", line=moments[number].line, reserved=lived.peak,
            bytes=tuple(moments[number].bytes if kind == "temporaries" else fixed[kind] for kind in KINDS),
        )
        for number in chosen
    )  # fmt: skip


def _peak_label(lived: Lived) -> str:
    highest = max(lived.moments, key=lambda moment: moment.bytes, default=None)
    if highest is None:
        return "step"
    return f"step, {highest.name}" + (f" at {highest.line}" if highest.line else "")


def _verdict(allocated: Amount, capacity: int | None, sure: bool) -> bool | None:
    if capacity is None:
        return None
    found = True if allocated.bound <= capacity else (None if allocated.bytes <= capacity else False)
    return found if sure else (found and None)


def _notes(call: Call, compiled: Compiled | None, device: str, card: Card | None) -> list[str]:
    notes = []
    if any(map(is_spread, call.shapes)):
        notes.append("the numbers are those of one device: its part of spread arguments")
        if compiled is None:
            notes.append(
                "how XLA spreads temporaries is not known without the devices: they are counted as if each held all"
            )
    if compiled is None:
        notes.append(
            f"jax has no {device.partition(':')[0]} device here, so this is a bound: every array of the jaxpr from its first "
            "write to its last read. Where the device is, XLA's own numbers are given"
        )
    else:
        notes.append(
            "exact for what XLA compiled here: arguments, results and temporaries of its own assignment; the picture and "
            "the lines are those of the jaxpr"
        )
    if card is not None and not device.startswith("cpu"):
        notes.append(arena.explain(card))
    return notes
