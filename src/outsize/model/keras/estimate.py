"""`outsize.estimate` of a Keras model's training step, a `tf.function` or a function of TensorFlow code.

In: the step and its arguments, or a function that builds them. Out: a `Footprint`. The graph is followed in the orders that
TensorFlow's executor may take. For a card the events go through the BFC allocator, on the CPU tensors are counted as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from outsize.allocator import BfcSettings, replay
from outsize.core.allocation import Replay
from outsize.core.cards import CONTEXT_BYTES, Card, find_card
from outsize.core.errors import InputError
from outsize.core.footprint import Amount, Footprint, Largest
from outsize.core.memory import HOST, Pool
from outsize.core.noun import Known
from outsize.core.units import MiB, parse_bytes
from outsize.model.estimation import growth, moments
from outsize.model.estimation.replayed_steps import ReplayedSteps
from outsize.model.frameworks import FIRST
from outsize.model.keras import contentless, parts, port
from outsize.model.keras.executor import Order
from outsize.model.keras.trace import Followed, Traced, follow, trace_function, trace_model

MARGIN = 0.1
"""For scratch of kernels and what allocators round (benchmarks/keras_steps.py)."""
MARGIN_OF_THREADS = 0.5
"""The same where threads take operators in any order: scratch of several kernels is held at once, and loops are followed in one
order. TensorFlow counted up to 44 % more in 24 models (benchmarks/results/2026-11-19-frameworks.md)."""
ROOM = 2**18
ORDERS = "the bound holds in every order in which threads may take operators"
BASE = 525 * MiB
"""Resident bytes of a process that has imported TensorFlow 2.21 and run a small step: 525 MiB in three runs."""
MOST = 2**20
"""The largest batch that is looked for."""


class Played(NamedTuple):
    """A step followed in the likely order, and in the orders that may hold more."""

    traced: Traced
    followed: Followed
    likely: Replay
    bound: int
    """Requested bytes that no order passes (on a card: none of those that were tried), with a margin."""
    reserved: int
    """The same of bytes that the allocator holds, where nothing limits it."""
    worst: list[Followed]
    """The orders that may hold more."""


def estimate(
    step: Any, *args: Any, build: Callable[..., Any] | None = None, device: str = "cuda", card: str | None = None,
    budget: int | str | None = None, steps: int = 3, batch: Any = None, seq: int | None = None, loader: Any = None,
) -> Footprint:  # fmt: skip
    """The memory of a step; see `outsize.estimate`."""
    port.tensorflow()
    for name, given in (("seq", seq), ("loader", loader)):
        if given is not None:
            raise InputError(f"{name}= is not known for steps of TensorFlow: give a batch as example")
    chosen = None if card is None else find_card(card)
    capacity = parse_bytes(budget) if budget is not None else None if chosen is None else chosen.usable
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "gpu", "cpu"):
        raise InputError(f"cannot estimate for the device {device!r}: 'cuda' and 'cpu' are modelled")
    on_host = kind == "cpu"
    rows = batch if isinstance(batch, int) else None
    if batch is not None and rows is None:
        if args:
            raise InputError("give the batch as batch= or as arguments, not both")
        args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def at(size: int | None) -> Played:
        return play(_trace(step, args, build, size), on_host, min(steps, 3))

    played = at(rows)
    footprint = _footprint(played, on_host, chosen, capacity, steps, int(index or 0))
    return footprint if rows is None else _with_growth(footprint, played, at, rows, chosen, capacity)


def _trace(step: Any, args: tuple[Any, ...], build: Callable[..., Any] | None, rows: int | None) -> Traced:
    """The step at a number of samples, as a graph."""
    if build is not None:
        if args:
            raise InputError("give either build= or the step's arguments, not both")
        with contentless.empty_variables():
            made = build() if rows is None else build(rows)
            args = made if isinstance(made, tuple) else (made,)
            given = step is None or step is args[0] or getattr(step, FIRST, False) if args else False
            if given and port.is_model(args[0]):
                return _trace(args[0], args[1:], None, rows)
            return trace_function(step, args)
    if not port.is_model(step):
        if not callable(step):
            raise InputError(f"the step is a compiled Keras model or a function of TensorFlow code, not {step!r:.60}")
        tf = port.tensorflow()
        bound = args if rows is None else tf.nest.map_structure(lambda leaf: contentless.spec_of(leaf, rows), args)
        return trace_function(step, bound)
    if not args:
        if rows is None:
            raise InputError(
                f"the model {step.name} needs a batch: estimate(model, x, y) or batch= with a number of samples"
            )
        return trace_model(step, contentless.data_of(step, rows))
    tf = port.tensorflow()
    return trace_model(step, tf.nest.map_structure(lambda leaf: contentless.spec_of(leaf, rows), args))


def play(traced: Traced, on_host: bool, steps: int = 2) -> Played:
    """Follows a graph in the likely order and in others. On the host threads may take operators in every order that the graph
    allows; a card is given them in one."""
    threads = port.threads_of_operators()
    likely = [Order(0)] if not on_host else [Order(1), Order(min(4, threads))]
    one_by_one = not on_host or threads == 1
    others = [Order(likely[0].threads, in_place=False)]
    others += [Order(likely[0].threads, in_place=False, seed=seed) for seed in range(2 if one_by_one else 0)]
    runs = [follow(traced, order, steps) for order in likely]
    first = max(runs, key=lambda run: run.peak)
    replayed = _replay(first, on_host, samples=True)
    worst = [follow(traced, order, 2, any_order=not one_by_one) for order in others]
    bound = max(first.peak, *(run.peak if one_by_one else run.most for run in worst))
    reserved = bound if on_host else max(replayed.peak.reserved, *(_replay(run, False).peak.reserved for run in worst))
    margin = MARGIN if one_by_one else MARGIN_OF_THREADS
    return Played(traced, first, replayed, _more(bound, margin), _more(reserved, margin), worst)


def _more(size: int, margin: float = MARGIN) -> int:
    return int(size * (1 + margin)) + ROOM


def _replay(followed: Followed, on_host: bool, samples: bool = False) -> Replay:
    events = parts.as_events(followed)
    if on_host:
        return replay(events, allocator="exact", samples=samples)
    return replay(events, allocator="bfc", settings=BfcSettings(growth=True), samples=samples)


def _footprint(
    played: Played, on_host: bool, card: Card | None, capacity: int | None, steps: int, index: int
) -> Footprint:
    followed, peak = played.followed, played.likely.peak
    phases = parts.name_kinds(played.traced, followed)
    samples = played.likely.samples
    at = max(range(len(samples)), key=lambda number: samples[number].allocated, default=-1)
    alive, highest = moments.alive_at(followed.events, at), samples[at].allocated if samples else 0
    use, most = (BASE, BASE) if on_host else (CONTEXT_BYTES, CONTEXT_BYTES)
    reserved = Amount(bytes=peak.reserved, bound=played.reserved, known=Known.ESTIMATE)
    likely, bound = reserved.bytes, reserved.bound
    fits = None if capacity is None else _verdict(played, capacity, on_host)
    guesses = followed.guesses
    return Footprint(
        name=played.traced.name, pool=HOST if on_host else Pool(kind="device", index=index), steps=steps,
        peak_requested=Amount(bytes=peak.requested, bound=played.bound, known=Known.ESTIMATE),
        peak_allocated=Amount(bytes=peak.allocated, bound=max(played.bound, _more(peak.allocated)), known=Known.ESTIMATE),
        peak_reserved=reserved,
        device_use=Amount(bytes=likely + use, bound=bound + most, known=Known.ESTIMATE),
        parts=moments.by_kind(alive, parts.KINDS, highest, lambda kind: Known.ESTIMATE),
        modules=moments.largest(alive, parts.layer_of, Known.ESTIMATE),
        lines=moments.largest(alive, parts.line_of, Known.ESTIMATE), kinds=parts.KINDS,
        timeline=moments.timeline(
            followed.events, samples, parts.KINDS, lambda made: parts.moment(made, phases),
            lambda made: parts.line_of(made) or parts.layer_of(made),
        ),
        peak_label=parts.moment(followed.events[at][1], phases) if followed.events else "build",
        card=card, capacity=capacity, fits=fits if not guesses else (fits and None),
        notes=(*played.traced.notes, *_settings(on_host), *guesses), guesses=guesses,
    )  # fmt: skip


def _verdict(played: Played, capacity: int, on_host: bool) -> bool | None:
    """True if even the bound fits, False if the likely order does not, None in between. A card's allocator takes what is left
    where a region twice as large does not fit, so it is tried with that limit."""
    if on_host:
        return True if played.reserved <= capacity else (None if played.likely.peak.reserved <= capacity else False)

    def fits(followed: Followed, limit: int) -> bool:
        settings = BfcSettings(growth=True, limit=limit)
        return replay(parts.as_events(followed), allocator="bfc", settings=settings).out_of_memory is None

    if all(fits(each, int(capacity / (1 + MARGIN))) for each in (played.followed, *played.worst)):
        return True
    return None if fits(played.followed, capacity) else False


def _settings(on_host: bool) -> tuple[str, ...]:
    """What TensorFlow does beside the step."""
    if on_host:
        several = port.threads_of_operators() > 1
        return (
            (f"{ORDERS}: tf.config.threading.set_inter_op_parallelism_threads(1) leaves one order",) if several else ()
        )
    return (
        "TensorFlow takes the whole card at the start unless memory growth is on "
        "(tf.config.experimental.set_memory_growth): the numbers are those with growth",
        "scratch of cuDNN's convolutions is not counted",
    )


def _with_growth(
    footprint: Footprint, played: Played, trace: Callable[[int], Played], rows: int, card: Card | None,
    capacity: int | None,
) -> Footprint:  # fmt: skip
    """How the peak grows with the batch, and the largest batch that fits."""
    seen: dict[int, Played] = {rows: played}

    def at(size: int) -> Played:
        if size not in seen:
            seen[size] = trace(size)
        return seen[size]

    def likely(size: int) -> ReplayedSteps:
        return ReplayedSteps([], (), at(size).likely, at(size).likely)

    line = growth.fit("batch", likely, rows, played.likely.peak.reserved)
    grown = growth.with_growth(footprint, line, None, rows, card, None, likely)
    if line is None or capacity is None:
        return grown
    place = "the budget" if card is None else card.name
    size, needs = largest_batch(lambda size: at(size).reserved, capacity, rows)
    named = Largest(place=place, capacity=capacity, size="batch", largest=size, next_needs=needs, known=Known.BOUND)
    return dataclasses.replace(grown, largest=(named, *(row for row in grown.largest if row.place != place)))


def largest_batch(bound: Callable[[int], int], capacity: int, guess: int) -> tuple[int, int | None]:
    """(the largest number of samples whose bound fits, what one more would need), by tracing a few."""
    low, high, needs = 0, None, None
    size = max(1, guess)
    for _ in range(24):
        needed = bound(size)
        if needed <= capacity:
            low = size
        else:
            high, needs = size, needed
        if low >= MOST or (high is not None and high - low <= max(1, low // 64)):
            break
        size = 2 * low if high is None else (low + high) // 2
        if size == low:
            break
    return low, needs
