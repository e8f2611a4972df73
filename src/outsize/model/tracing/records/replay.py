"""From a ledger to allocator events: what an allocator takes for a traced step.

In: a ledger and the label of a device. Out: allocation events for the models in `outsize.allocator`, and the peaks of repeated
steps. `fit` traces one step and replays it several times, because later steps begin with the optimizer state and the
cache of earlier ones. What a step keeps forever (state, workspaces) is allocated once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

from outsize.allocator import PhaseEvent, StepsReplay, replay_steps, settings_from_environment
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent
from outsize.model.tracing.records.ledger import Held, Ledger

Happened = list[tuple[bool, Held]]
"""(True at an allocation, False at a free; what), in order."""

Steps = tuple[tuple[PhaseEvent, ...], tuple[PhaseEvent, ...]]
"""The events of a first step, and those of every later one."""

GIVEN = "given"
"""The phase before the step: what is there when it begins."""


def happened_on(ledger: Ledger, label: str) -> Happened:
    """What the ledger saw on a device, without empty blocks."""
    return [(alloc, held) for alloc, held in ledger.events if held.label == label and held.most]


def likely_size(held: Held) -> int:
    return held.bytes


def largest_size(held: Held) -> int:
    return held.most


def as_events(
    happened: Iterable[tuple[bool, Held]], size: Callable[[Held], int] = likely_size
) -> list[AllocationEvent]:
    """The events in the form that an allocator's model takes; `size` gives the bytes of a block."""
    return [AllocationEvent(number, alloc, held.id, size(held)) for number, (alloc, held) in enumerate(happened)]


BESIDE = EMPTY_CACHE - 1
"""Id of what others hold: no storage of a ledger has it, and it is not the mark of an emptied cache."""


def split_steps(ledger: Ledger, label: str, marks: list[tuple[int, str]], beside: int = 0) -> Steps:
    """The events of a first step and of every later one, from the trace of one; `beside`: bytes that others hold.

    What the traced step leaves alive is kept by the steps that follow. A record that existed before the step and is
    freed in it (a weight that moves elsewhere) is freed once.
    """
    begins = marks[0][0]
    phases = iter([*marks, (len(ledger.events), "")])
    _, name = next(phases)
    following = next(phases)
    before = [PhaseEvent(True, BESIDE, beside, GIVEN)] if beside else []
    step: list[tuple[PhaseEvent, bool]] = []
    size_of = largest_size if label == "cpu" else likely_size  # what CPU kernels take inside is known within bounds
    for number, (alloc, held) in enumerate(ledger.events):
        while number >= following[0] and following[1]:
            name, following = following[1], next(phases)
        size = size_of(held)
        if held.label != label or not size:
            continue
        if number < begins:
            before.append(PhaseEvent(alloc, held.id, size, GIVEN))
        else:
            step.append((PhaseEvent(alloc, held.id, size, name), held.died is None or held.born < begins))
    return (*before, *(event for event, _ in step)), tuple(event for event, once in step if not once)


def replay_on_card(
    first: tuple[PhaseEvent, ...], later: tuple[PhaseEvent, ...], limit: int | None = None, expandable: bool = False
) -> StepsReplay:  # fmt: skip
    """Steps through a model of torch's allocator, as it is set in this process or with expandable segments."""
    settings = replace(settings_from_environment(os.environ), limit=limit)
    name = "cuda-expandable" if expandable or settings.expandable_segments else "cuda"
    return replay_steps(first, later, name, settings)


def peaks_of(
    first: tuple[PhaseEvent, ...], later: tuple[PhaseEvent, ...], card: bool, expandable: bool = False
) -> dict[str, int]:  # fmt: skip
    """Peak of each phase over several steps, in bytes: of a card's allocator, or of the storages on a CPU."""
    replayed = replay_on_card(first, later, expandable=expandable) if card else replay_steps(first, later, "exact")
    peaks = dict(replayed.peaks)
    given = peaks.pop(GIVEN, 0)
    phases = {name: size for name, size in peaks.items() if name != "done"} or {"forward": given}
    return phases | ({"reserved": replayed.reserved} if card else {})
