"""What a step would hold, from the trace of one step.

In: the ledger of a traced step, its phases, its device. Out: `Projection`: peaks by phase, what each module keeps, and
whether an allocator with a limit gets through. One step is traced and played several times, since later steps find
optimizer state and a cache that earlier ones have left; what a step keeps for good (state, workspaces) comes once.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outsize.allocator import replay, settings_from_environment
from outsize.core.allocation import AllocationEvent, Replay
from outsize.core.noun import Noun
from outsize.model.ledger import Held, Ledger

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
    """Every allocation and free of several steps."""
    last: int
    """Where in them the last step begins."""
    card: bool
    """A card's allocator is played."""
    grown: int = 0
    """Bytes that a card's allocator would reserve with segments that grow."""
    beside: int = 0
    """Bytes of them all that are held by tensors which are not the step's."""

    @property
    def peak(self) -> int:
        """The highest moment in bytes."""
        return max(self.peaks.values())

    def growing(self) -> Projection:
        """The same step where segments grow."""
        return replace(self, peaks=peaks_of(self.moves, self.card, expandable=True))

    def settles(self, limit: int) -> bool:
        """True where an allocator that may not reserve more than `limit` gets through, in the end without clearing its cache."""
        if not self.card:
            return self.peak <= limit
        whole, before = (play(moves, limit) for moves in (self.moves, self.moves[: self.last]))
        return whole.out_of_memory is None and whole.retries == before.retries


def play(
    moves: tuple[Move, ...], limit: int | None = None, samples: bool = False, expandable: bool = False
) -> Replay:  # fmt: skip
    """The moves through a model of torch's allocator, as it is set in this process or with expandable segments."""
    settings = replace(settings_from_environment(os.environ), limit=limit)
    if expandable:
        settings = replace(settings, expandable_segments=True)
    allocator = "cuda-expandable" if settings.expandable_segments else "cuda"
    events = (AllocationEvent(i, move.alloc, move.id, move.bytes) for i, move in enumerate(moves))
    return replay(events, allocator=allocator, settings=settings, samples=samples)


def play_steps(
    ledger: Ledger, label: str, marks: list[tuple[int, str]], beside: int = 0
) -> tuple[tuple[Move, ...], int]:  # fmt: skip
    """The moves of several steps from the trace of one, and where the last step begins; `beside`: bytes that others hold.

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
        if held.label != label or not held.bytes:
            continue
        if number < begins:
            before.append(Move(alloc, held.id, held.bytes, "given"))
        else:
            step.append((Move(alloc, held.id, held.bytes, name), held.died is None or held.born < begins))
    moves, last = list(before), 0
    count = len(ledger.all)
    for played in range(PLAYED):
        last = len(moves)
        for move, once in step:
            if not once:
                moves.append(move._replace(id=move.id + played * count))
            elif not played:
                moves.append(move)
    return tuple(moves), last


def peaks_of(moves: tuple[Move, ...], card: bool, expandable: bool = False) -> dict[str, int]:
    """Peak of each phase, in bytes."""
    found: dict[str, int] = {}
    reserved = 0
    if card:
        played = play(moves, samples=True, expandable=expandable)
        course, reserved = [sample.allocated for sample in played.samples], played.peak.reserved
    else:
        course = list(itertools.accumulate(move.bytes if move.alloc else -move.bytes for move in moves))
    for move, held in zip(moves, course, strict=True):
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
