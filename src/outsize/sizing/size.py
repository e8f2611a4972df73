"""`size`: shapes and dtypes in, a `Sizing` out.

The bytes are exact. The models in `allocator` say what allocators take for them. Where they fit comes from a reading
of this machine and from the table of cards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from numbers import Integral
from typing import Any

from outsize.allocator import TAKERS, replay, take
from outsize.core.allocation import AllocationEvent, Take
from outsize.core.cards import CARDS, find_card
from outsize.core.dtypes import DTYPES
from outsize.core.errors import InputError
from outsize.core.memory import Part, PoolReading, Reading
from outsize.core.noun import Known
from outsize.core.sizing import Alternative, Place, Sizing
from outsize.core.spec import Spec
from outsize.core.units import format_bytes, parse_bytes
from outsize.machine import memory
from outsize.sizing.advice import choose_advice

OPTIMIZERS = {
    "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "amsgrad": 3, "adamax": 2, "nadam": 2, "radam": 2, "adadelta": 2,
    "adagrad": 1, "rmsprop": 1, "lion": 1,
}  # fmt: skip
"""Optimizer -> how many tensors of a parameter's own shape and dtype it keeps for each parameter."""

COMPARED = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8", "int4", "bool")
"""Dtypes of the comparison table."""

MOST_REPLAYED = 4096
"""Up to this many requests are replayed together; beyond it, each request is bounded on its own."""


def size(
    shape: Any,
    dtype: Any = None,
    *,
    count: int = 1,
    grad: bool = False,
    optimizer: str | None = None,
    budget: int | str | None = None,
    card: str | None = None,
) -> Sizing:
    """Exact bytes of tensors, what allocators really take for them, and where they fit.

    `shape` is a shape, anything with `.shape` and `.dtype`, or a list of these; `dtype` (float32 where nothing says
    otherwise) is for shapes. `count` copies of all; `grad` adds gradients, `optimizer` its state and the gradients too.
    With `budget` or `card` the verdict is about that, otherwise about this machine.

    >>> outsize.size((1, 256, 1024, 1021), "float32").bytes
    1070596096
    """
    specs = tuple(read_specs(shape, dtype))
    if count < 1:
        raise InputError(f"count is {count}: it must be at least 1")
    copies = _copies(grad, optimizer)
    reading = memory()
    parts = tuple(
        Part(name=name, bytes=number * count * sum(spec.bytes for spec in specs), known=Known.EXACT)
        for name, number in copies.items()
    )
    takes = tuple(_take(name, specs, count * sum(copies.values())) for name in TAKERS)
    asked = [*_asked_places(takes, budget, card)]
    sizing = Sizing(
        specs=specs, count=count, parts=parts, takes=takes,
        places=(*asked, *_places_here(takes, reading), *_places_elsewhere(takes, card and find_card(card).name)),
        dtypes=_other_dtypes(specs, count), halved=_halved(specs, count), advice=(),
    )  # fmt: skip
    return replace(sizing, advice=choose_advice(sizing, reading))


def read_specs(shape: Any, dtype: Any = None) -> Iterator[Spec]:
    """The specs that a user's first argument means."""
    if isinstance(shape, Spec):
        yield shape
    elif hasattr(shape, "shape") and hasattr(shape, "dtype") and not isinstance(shape, Integral):
        yield Spec.of(shape.shape, shape.dtype if dtype is None else dtype)
    elif isinstance(shape, list) and not all(isinstance(one, Integral) for one in shape):
        for one in shape:
            yield from read_specs(one, dtype)
    else:
        yield Spec.of(shape, "float32" if dtype is None else dtype)


def _copies(grad: bool, optimizer: str | None) -> dict[str, int]:
    """Part -> how many tensors of the given shapes it holds."""
    copies = {"data": 1}
    if optimizer is None:
        return copies | ({"gradients": 1} if grad else {})
    if optimizer.lower() not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    return copies | {"gradients": 1, f"{optimizer.lower()} state": OPTIMIZERS[optimizer.lower()]}


def _take(allocator: str, specs: tuple[Spec, ...], copies: int) -> Take:
    """What an allocator takes for all tensors together, allocated one after another on an empty cache."""
    if len(specs) * copies == 1:
        return take(specs[0].bytes, allocator)
    requests = [spec.bytes for spec in specs if spec.bytes]
    asked = copies * sum(requests)
    if len(requests) * copies <= MOST_REPLAYED:
        numbered = enumerate(requests * copies)
        result = replay([AllocationEvent(i, True, i, n) for i, n in numbered], TAKERS[allocator].model)
        return Take(
            allocator=allocator, requested=asked, allocated=result.peak.allocated, reserved=result.peak.reserved,
            known=TAKERS[allocator].known, note=f"{len(requests) * copies} tensors packed",
        )  # fmt: skip
    alone = [take(n, allocator) for n in requests]
    return Take(
        allocator=allocator, requested=asked, allocated=copies * sum(one.allocated for one in alone),
        reserved=copies * sum(one.reserved for one in alone), known=Known.BOUND,
        note=f"{len(requests) * copies} tensors, each in a segment of its own",
    )  # fmt: skip


def _reserved(takes: tuple[Take, ...], allocator: str) -> int:
    return next(one.reserved for one in takes if one.allocator == allocator)


def _asked_places(takes: tuple[Take, ...], budget: int | str | None, card: str | None) -> Iterator[Place]:
    if budget is not None:
        yield Place(
            name="budget", where="asked", capacity=parse_bytes(budget), needed=_reserved(takes, "host"),
            known=Known.EXACT, reason="set by you",
        )  # fmt: skip
    if card is not None:
        found = find_card(card)
        yield Place(
            name=found.name, where="asked", capacity=found.usable, needed=_reserved(takes, "cuda"), known=Known.ESTIMATE,
            reason="its memory less driver and context",
        )  # fmt: skip


def _places_here(takes: tuple[Take, ...], reading: Reading) -> Iterator[Place]:
    yield _place_of(reading.host, "RAM here", _reserved(takes, "host"))
    for device in reading.devices:
        yield _place_of(device, f"GPU {device.pool.index} here, {device.name}", _reserved(takes, "cuda"))
    yield _place_of(reading.disk, "disk here", takes[0].requested)


def _place_of(reading: PoolReading, name: str, needed: int) -> Place:
    biting = reading.biting
    reason = f"{biting.name} of {format_bytes(biting.bytes)}" if biting else "available now"
    return Place(name=name, where="here", capacity=reading.available, needed=needed, known=Known.EXACT, reason=reason)


def _places_elsewhere(takes: tuple[Take, ...], asked: str | None) -> Iterator[Place]:
    needed = _reserved(takes, "cuda")
    for card in sorted(CARDS, key=lambda card: card.total):
        if card.common and card.name != asked:
            yield Place(name=card.name, where="card", capacity=card.usable, needed=needed, known=Known.ESTIMATE)


def _other_dtypes(specs: tuple[Spec, ...], count: int) -> tuple[Alternative, ...]:
    """The same shapes in every compared dtype; none where an element is not a number."""
    if any(spec.dtype.kind in ("text", "bytes", "time", "struct") for spec in specs):
        return ()
    now = count * sum(spec.bytes for spec in specs)
    names = dict.fromkeys([*(spec.dtype.name for spec in specs), *COMPARED])
    rows = []
    for name in names:
        other = count * sum(replace(spec, dtype=DTYPES[name]).bytes for spec in specs)
        rows.append(Alternative(name=name, bytes=other, saves=now - other))
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _halved(specs: tuple[Spec, ...], count: int) -> tuple[Alternative, ...]:
    """One tensor with each axis longer than one cut in half, rounded up."""
    if len(specs) != 1:
        return ()
    spec, rows = specs[0], []
    for axis, length in enumerate(spec.shape):
        if length > 1:
            half = math.ceil(length / 2)
            other = count * replace(spec, shape=(*spec.shape[:axis], half, *spec.shape[axis + 1 :])).bytes
            rows.append(
                Alternative(name=f"axis {axis}: {length} -> {half}", bytes=other, saves=count * spec.bytes - other)
            )
    return tuple(rows)
