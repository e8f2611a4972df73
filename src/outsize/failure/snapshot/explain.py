"""A snapshot, or a file that may hold one -> `Diagnosis`; with a replay under other settings where the trace allows it.

A snapshot does not say how large the card is nor who else is on it. Where it was made on this machine the card is asked;
else what this process held and what the driver still had stand for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import outsize.allocator as allocator
from outsize.core.allocation import AllocationEvent
from outsize.core.errors import InputError
from outsize.core.failure import Cause, CauseName, Diagnosis, Evidence, Failure
from outsize.core.footprint import Moment
from outsize.core.memory import Part
from outsize.core.noun import Known
from outsize.core.outcomes.allocator_history import AllocatorHistory
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case
from outsize.failure.explain import diagnose, explain_text
from outsize.failure.snapshot.history import read_history
from outsize.failure.snapshot.load import check_snapshot, load_snapshot
from outsize.failure.snapshot.state import DeviceState, hold_by_line, read_state
from outsize.machine import memory

_LARGEST_LOG = 2**30


def explain_path(path: os.PathLike[str] | str, *, here: bool = False, after: Any = None) -> Diagnosis:
    """A file: a snapshot if it begins like a pickle, else text."""
    try:
        with open(path, "rb") as file:
            content = file.read(2)
            if content[:1] != b"\x80" and not os.fspath(path).endswith((".pickle", ".pkl")):
                content += file.read(_LARGEST_LOG)
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    if len(content) <= 2 and (content[:1] == b"\x80" or os.fspath(path).endswith((".pickle", ".pkl"))):
        return explain_snapshot(load_snapshot(path), here=here, after=after)
    if after is not None:
        raise InputError(f"{os.fspath(path)} is text, not a CUDA memory snapshot, so there is no growth to compare")
    return explain_text(content.decode("utf-8", "replace"), here=here)


def explain_snapshot(snapshot: Mapping[str, Any], *, here: bool = False, after: Any = None) -> Diagnosis:
    """A snapshot's diagnosis: what failed, why, who holds what, what other settings would have done."""
    snapshot = check_snapshot(snapshot)
    state = read_state(snapshot)
    total = _card(state.device) if here else None
    diagnosis = _with_failure(state, total) if state.failed else Diagnosis(failure=None, cause=None)
    history = read_history(snapshot, state.device)
    diagnosis = replace(
        diagnosis,
        holders=state.holders,
        timeline=_timeline(history),
        evidence=(*diagnosis.evidence, *_state_evidence(state), *_replays(snapshot, state)),
        history=history,
    )
    return diagnosis if after is None else _compare(diagnosis, snapshot, after, state.device)


def _with_failure(state: DeviceState, total: int | None) -> Diagnosis:
    assert state.failed is not None
    free = state.failed.free
    failure = Failure(
        framework="pytorch",
        requested_bytes=state.failed.requested,
        device=f"cuda:{state.device}",
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=state.allocated,
        reserved_bytes=state.reserved,
        extra={
            "format": "snapshot",
            "reserved_unallocated_bytes": state.unused,
            "largest_free_bytes": state.largest_unused,
            "private_pool_bytes": state.private,
            "line": state.failed.line,
        },
    )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if state.expandable else {}
    return diagnose(Case(failure=failure, settings=settings))


def _state_evidence(state: DeviceState) -> tuple[Evidence, ...]:
    rows = [
        f"cuda:{state.device}: {state.segments} segments of {said(state.reserved)} in all, "
        f"{said(state.allocated)} in use, "
        f"{said(state.unused)} unused in {state.unused_blocks} pieces, the largest {said(state.largest_unused)}"
    ]
    if state.private:
        rows.append(f"{said(state.private)} of it in private pools of CUDA graphs")
    if state.failed is not None:
        rows.append(f"the request that failed came from {state.failed.line}")
    return tuple(Evidence(kind="message", text=row) for row in rows)


def _replays(snapshot: Mapping[str, Any], state: DeviceState) -> tuple[Evidence, ...]:
    """What other settings would have made of the same requests."""
    if state.failed is None or state.failed.free is None:
        return ()
    answers = replay_settings(snapshot, state)
    rows = [
        f"with {name} the peak would have been {said(answer.peak)} instead of {said(answer.instead)}: it fits ({answer.known})"
        for name, answer in answers.items()
        if answer.fits
    ]
    if answers and "expandable_segments:True" in answers and not answers["expandable_segments:True"].fits:
        rows.append("replayed with expandable_segments:True the request fails as well")
    return tuple(Evidence(kind="inferred", text=row) for row in rows)


class Answer(NamedTuple):
    """What a setting would have made of the recorded requests."""

    peak: int
    instead: int
    """Most bytes it would have held as it was, had there been no end."""
    fits: bool
    """True where the failed request would have been served."""
    known: Known


def replay_settings(snapshot: Mapping[str, Any], state: DeviceState) -> dict[str, Answer]:
    """Setting -> what it would have made of the same requests."""
    assert state.failed is not None
    try:
        recording = allocator.read_snapshot(snapshot, state.device, keep_releases=False)
    except (KeyError, TypeError, InputError):
        return {}
    last = AllocationEvent(
        0, True, 1 + max((event.id for event in recording.events), default=0), state.failed.requested
    )
    events = (*recording.events, last)
    capacity = state.reserved + (state.failed.free or 0)
    was = "cuda-expandable" if state.expandable else "cuda"
    instead = allocator.replay(events, was, addresses=recording.addresses).peak.reserved
    tries = (
        ("expandable_segments:True", "cuda-expandable", events),
        ("half the batch (what was freed again is half as large)", was, _halved(events)),
        ("no fragmentation at all", "exact", events),
    )
    answers = {}
    for name, model, requests in tries:
        if model == "cuda-expandable" and state.expandable and requests is events:
            continue
        answer = allocator.replay(requests, model, capacity=capacity)
        known = Known.ESTIMATE if recording.alive_before or requests is not events else answer.known
        answers[name] = Answer(answer.peak.reserved, instead, answer.out_of_memory is None, known)
    return answers


def _halved(events: tuple[AllocationEvent, ...]) -> tuple[AllocationEvent, ...]:
    """The same requests with half the bytes for what does not stay: activations and temporaries, and the one that failed."""
    freed = {event.id for event in events if not event.alloc}
    last = events[-1]
    return tuple(
        event._replace(bytes=-(-event.bytes // 2)) if event.alloc and (event.id in freed or event is last) else event
        for event in events
    )


def _timeline(history: AllocatorHistory, most: int = 60) -> tuple[Moment, ...]:
    """Bytes in use over the recorded history: the highest of each stretch."""
    totals = [sum(column) for column in zip(*(layer.bytes for layer in history.layers), strict=True)]
    width = max(1, -(-len(totals) // most))
    stretches = (range(begin, min(begin + width, len(totals))) for begin in range(0, len(totals), width))
    highest = [max(stretch, key=totals.__getitem__) for stretch in stretches]
    return tuple(
        Moment(time=history.times[at], bytes=totals[at]) for at in dict.fromkeys((*highest, len(totals) - 1)) if totals
    )


def _compare(diagnosis: Diagnosis, before: Mapping[str, Any], after: Any, device: int) -> Diagnosis:
    """What a later snapshot holds more, by line."""
    later = check_snapshot(after) if isinstance(after, Mapping) else load_snapshot(after)
    old, new = hold_by_line(before, device), hold_by_line(later, device)
    grown = sorted(((new[line] - old.get(line, 0), line) for line in new if new[line] > old.get(line, 0)), reverse=True)
    total = sum(new.values()) - sum(old.values())
    rows = tuple(Part(name=f"grew at {line}", bytes=size, known=Known.EXACT) for size, line in grown[:8])
    text = Evidence(
        kind="inferred",
        text=f"between the two snapshots the bytes in use {'grew' if total >= 0 else 'shrank'} by {said(abs(total))}",
    )
    leak = Cause(
        name=CauseName.LEAK,
        certain=False,
        text=f"{said(grown[0][0])} more are held by {grown[0][1]} than before."
        if grown
        else "Nothing is held that was not held before.",
        decide="a third snapshot one step later: the same growth again is a leak, none is warm-up",
    )
    evidence, holders = (*diagnosis.evidence, text), rows or diagnosis.holders
    if diagnosis.cause is None:
        return replace(diagnosis, cause=leak if grown else None, evidence=evidence, holders=holders)
    candidates = (*diagnosis.candidates, leak) if grown else diagnosis.candidates
    return replace(diagnosis, candidates=candidates, evidence=evidence, holders=holders)


def _card(index: int) -> int | None:
    return next((device.total for device in memory().devices if device.pool.index == index), None)
