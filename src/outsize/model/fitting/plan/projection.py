"""What a step would hold, from the trace of one step.

In: the ledger of a traced step, its phases, its device. Out: `Projection`: peaks by phase, what each module keeps, and
whether an allocator with a limit gets through. One step is traced and played several times, since later steps find
optimizer state and a cache that earlier ones have left; what a step keeps for good (state, workspaces) comes once.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outsize.allocator import MODELS, settings_from_environment
from outsize.core.noun import Noun
from outsize.model.tracing.ledger import Held, Ledger

PLAYED = 3
"""Steps that are played: the first makes state, the second meets it, the third shows whether it settles."""


Ends = tuple[set[Held], set[Held]]
"""Records that a module took in the forward pass, and those that it made and gave out."""


class Move(NamedTuple):
    """One allocation or free."""

    alloc: bool
    id: int
    bytes: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(Noun):
    """What a step would hold."""

    peaks: dict[str, int]
    """Bytes on the device, by phase: of storages on a CPU; on a card of what torch's allocator has handed out, and what
    it has `reserved` for that, which only grows."""
    away: int
    """Most bytes that wait elsewhere."""
    kept: dict[str, int]
    """Bytes alive at the end of the forward pass, by the module that made them; empty for inference."""
    stays: dict[str, int]
    """Bytes that stay where a module keeps its input only: what it gives out, and inputs that nobody else keeps."""
    gives: dict[str, int]
    """Those of them that it gives out."""
    fixed: int
    """Bytes that are there before every step but the first: weights, buffers, batch, state."""
    state: int
    """Bytes of optimizer state on the device."""
    calls: dict[str, int]
    """How often each module ran in the forward pass, 0 for those that the user's own code runs again in the backward pass."""
    seconds: dict[tuple[str, str], float]
    """Estimated time by (phase, module)."""
    operators: dict[str, int]
    """Operators by phase."""
    moves: tuple[Move, ...] = field(repr=False)
    """Every allocation and free of the first step and before it."""
    again: tuple[Move, ...] = field(repr=False)
    """Those of every later step: what the first one keeps comes once."""
    card: bool
    """A card's allocator is played."""
    grown_peaks: dict[str, int] = field(default_factory=dict, repr=False)
    """On a card the peaks where segments grow."""
    beside: int = 0
    """Bytes of them all that are held by tensors which are not the step's."""
    brought: int = 0
    """Of a model on the host: bytes of weights and state that come to the device in a step."""
    order: tuple[str, ...] = ()
    """Of a model on the host: its units, as a forward pass meets them."""
    outside: tuple[str, ...] = ()
    """Of a model on the host: parameters that are used while their unit is not there."""
    random: tuple[str, ...] = ()
    """Of a model on the host: operators and generators that draw random numbers."""
    sources: tuple[Any, ...] = ()
    """Of a model on the host: generators beside torch's that were drawn from."""
    written: dict[Any, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Of a model on the host: buffers that a forward pass writes, by module."""
    heads_taken: bool = False
    """Of a model on the host: output head and loss ran in pieces, as planned."""

    @property
    def peak(self) -> int:
        """The highest moment in bytes."""
        return max(self.peaks.values())

    @property
    def computing(self) -> float:
        """Estimated seconds of all operators."""
        return sum(self.seconds.values())

    @property
    def grown(self) -> int:
        """Bytes that a card's allocator would reserve with segments that grow."""
        return self.grown_peaks.get("reserved", 0)

    def growing(self) -> Projection:
        """The same step where segments grow."""
        return replace(self, peaks=self.grown_peaks)

    def settles(self, limit: int) -> bool:
        """True where an allocator that may not reserve more than `limit` gets through, in the end without clearing its cache."""
        if not self.card:
            return self.peak <= limit
        played = play(self.moves, self.again, limit)
        return not played.failed and not played.retries


class Played(NamedTuple):
    """What an allocator made of moves."""

    peaks: dict[str, int]
    """Most bytes that were handed out, by phase."""
    reserved: int
    """Most bytes that it had reserved."""
    retries: int
    """How often it cleared its cache in the last step."""
    failed: bool
    """Memory ran out."""


def play(
    moves: tuple[Move, ...], again: tuple[Move, ...], limit: int | None = None, expandable: bool = False
) -> Played:  # fmt: skip
    """Steps through a model of torch's allocator, as it is set in this process or with expandable segments.

    A later step lets go what it takes, and free neighbours join: where it neither gets memory from the driver nor gives any
    back, it ends where it began, and so would the next, which is not played then.
    """
    settings = replace(settings_from_environment(os.environ), limit=limit)
    name = "cuda-expandable" if expandable or settings.expandable_segments else "cuda"
    model = MODELS[name].make(None, settings, ())
    peaks: dict[str, int] = {}
    failed = not _play(model, moves, peaks)
    retries = 0
    for _ in range(1, PLAYED):
        calls, before = model.driver.calls, model.retries
        failed = failed or not _play(model, again, peaks)
        retries = model.retries - before
        if failed or model.driver.calls == calls:
            break
    return Played(peaks, model.reserved_peak, retries, failed)


def _play(model: Any, moves: tuple[Move, ...], peaks: dict[str, int]) -> bool:
    """Play some moves and write down how much each phase had; False where memory ran out."""
    malloc, free = model.malloc, model.free
    phase, peak = "", 0
    for alloc, id, size, name in moves:
        if alloc:
            if not malloc(id, size, 0):
                return False
        else:
            free(id)
            if name == phase:
                continue
        if name != phase:
            peaks[phase] = peak
            phase, peak = name, peaks.get(name, 0)
        if model.allocated > peak:
            peak = model.allocated
    peaks[phase] = peak
    peaks.pop("", None)
    return True


def play_steps(
    ledger: Ledger, label: str, marks: list[tuple[int, str]], beside: int = 0
) -> tuple[tuple[Move, ...], tuple[Move, ...]]:  # fmt: skip
    """The moves of a first step and of every later one, from the trace of one; `beside`: bytes that others hold.

    What the traced step leaves alive is kept by the steps that follow; a record that was there before the step and is
    let go in it (a weight that goes to its place elsewhere) is let go once.
    """
    begins = marks[0][0]
    phases = iter([*marks, (len(ledger.events), "")])
    _, name = next(phases)
    following = next(phases)
    before = [Move(True, -1, beside, "given")] if beside else []
    step: list[tuple[Move, bool]] = []
    for number, (alloc, held) in enumerate(ledger.events):
        while number >= following[0] and following[1]:
            name, following = following[1], next(phases)
        size = held.most if label == "cpu" else held.bytes  # what its kernels take inside is known within bounds
        if held.label != label or not size:
            continue
        if number < begins:
            before.append(Move(alloc, held.id, size, "given"))
        else:
            step.append((Move(alloc, held.id, size, name), held.died is None or held.born < begins))
    return (*before, *(move for move, _ in step)), tuple(move for move, once in step if not once)


def peaks_of(
    moves: tuple[Move, ...], again: tuple[Move, ...], card: bool, expandable: bool = False
) -> dict[str, int]:  # fmt: skip
    """Peak of each phase over several steps, in bytes."""
    found: dict[str, int] = {}
    reserved = 0
    if card:
        played = play(moves, again, expandable=expandable)
        found, reserved = played.peaks, played.reserved
    else:
        both = (*moves, *again)  # the third step is the second once more
        course = itertools.accumulate(move.bytes if move.alloc else -move.bytes for move in both)
        for move, held in zip(both, course, strict=True):
            found[move.phase] = max(found.get(move.phase, 0), held)
    given = found.pop("given", 0)
    phases = {name: size for name, size in found.items() if name != "done"} or {"forward": given}
    return phases | ({"reserved": reserved} if card else {})


def kept_by(
    ledger: Ledger, label: str, marks: list[tuple[int, str]], names: set[str], ends: dict[str, Ends]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes alive at the end of the first forward pass by the module that made them, what stays of a module with its input
    alone, and what of that it gave out."""
    start = next(index for index, name in marks if name == "forward")
    stop = next((index for index, name in marks if name == "backward"), start)
    sizes: dict[str, int] = {}
    alive: dict[int, int] = {}
    for held in ledger.all:
        if held.label == label and start <= held.born < stop and (held.died is None or held.died >= stop):
            name = held.module if held.module in names else ""
            sizes[name] = sizes.get(name, 0) + held.bytes
            alive[held.id] = held.bytes
    stays, gives = {}, {}
    for name, (taken, gave) in ends.items():
        alone = sum(h.bytes for h in taken if h.label == label and h.died is not None and h.died < stop)
        gives[name] = sum(alive.get(held.id, 0) for held in gave)
        stays[name] = alone + gives[name]
    return sizes, stays, gives
