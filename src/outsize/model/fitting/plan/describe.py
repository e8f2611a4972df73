"""The plan as the user reads it: of a training step, of an inference, or of a model that lives on the host.

In: facts, a choice and its projection. Out: `FitPlan`, with the peak of each phase, what every remedy saves and
costs, the choices beside the one that was made, and what was found and decided on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from outsize.core.failure import Remedy
from outsize.core.fitting import FitPlan, Neighbour
from outsize.core.memory import DISK, HOST, Allowance
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.plan.facts import Facts, HostedFacts, InferenceFacts, place
from outsize.model.fitting.plan.foreign_tensors import note_beside
from outsize.model.fitting.plan.host_memory import filed_bytes, host_bytes
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import APPROXIMATE, TRAINING, describe, predict, remedies_on
from outsize.model.fitting.plan.remedy_kind import RemedyKind
from outsize.model.fitting.plan.search import Candidate
from outsize.model.fitting.plan.training_search import TrainingSearch, slow_down

WORTH = 0.95
"""A setting that leaves at most this part of what is reserved is worth naming."""

MARGIN = 0.03
"""What a card may reserve above the replay: ties between equal blocks go to the lower address, which only the driver knows."""

HOSTED_MARGIN = 0.05
"""The same for a model on the host: what is copied out is let go once the host sees that its copy has ended, at moments that no
replay knows. On an H200 with a budget of 8 GiB that was 3.1 % above the replay."""


def describe_training(
    search: TrainingSearch, found: Candidate, allowance: Allowance, findings: Findings, decided: Iterable[str]
) -> FitPlan:
    """The plan of a training step on the model's device."""
    facts, choice, projection = search.facts, found.choice, found.projection
    assert projection is not None
    steps = _steps(projection, allowance, search.limited, packed=choice != choice.unpacked)
    return FitPlan(
        name=f"training step of {facts.rows} samples", steps=steps,
        budgets=(allowance,), smallest=None, slow_down=slow_down(choice, facts), plain=facts.plain.peak, away=projection.away,
        remedies=tuple(
            _remedy(
                kind, choice, facts,
                saves=max(0, predict(replace(choice, **{kind.key: getattr(Choice(), kind.key)}), facts) - predict(choice, facts)),
                costs=f"+{100 * kind.seconds(choice, facts) / max(facts.seconds, 1e-9):.0f} % time",
                exactness=kind.exactness_of(bool(findings.random) and search.allow != "exact"),
            )
            for kind in remedies_on(choice)
        ),
        place=place(facts), cheaper=_neighbour(search, found, cheaper=True), smaller=_neighbour(search, found, cheaper=False),
        notes=(*_notes(facts, findings), *note_beside(facts.plain.beside), *say_absent(choice), *_setting(found), *decided),
    )  # fmt: skip


def _steps(
    projection: Projection, allowance: Allowance, limited: bool = False, beside: tuple[Peak, ...] = (),
    traffic: dict[str, tuple[int, int]] | None = None, packed: bool = False, margin: float = MARGIN,
) -> tuple[Step, ...]:  # fmt: skip
    """Phases with their peaks; `beside`: those of other pools, `traffic`: bytes that a phase reads and writes; `packed`: numbers
    are kept in fewer bits, and what packing takes beside is a bound.

    A card may reserve more than a replay does, but no more than allowed where its allocator is stopped there (`limited`).
    """
    peaks, moved, allowed = dict(projection.peaks), traffic or {}, allowance.bytes
    if projection.card:
        reserved = peaks["reserved"]
        peaks["reserved"] = min(int(reserved * (1 + margin)), allowed if limited else max(allowed, reserved))
    known = Known.ESTIMATE if projection.card else Known.BOUND if packed else Known.EXACT
    return tuple(
        Step(
            name=name, peaks=(Peak(pool=allowance.pool, bytes=size, known=known), *beside),
            read=moved.get(name, (0, 0))[0], written=moved.get(name, (0, 0))[1],
        )
        for name, size in peaks.items()
    )  # fmt: skip


def _remedy(kind: RemedyKind[Any], choice: Choice, facts: Any, **known: Any) -> Remedy:
    """What the user reads of one remedy; `known`: what is known better than the remedy itself says."""
    said = {"costs": kind.costs, "exactness": kind.exactness, **known}
    return Remedy(name=kind.name, known=Known.ESTIMATE, how=kind.how(choice, facts), **said)


def _setting(found: Candidate) -> list[str]:
    """What another setting of torch's allocator would reserve, where that is worth a restart."""
    projection = found.projection
    if projection is None or not projection.card or projection.grown > WORTH * projection.peak:
        return []
    return [
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start would reserve {format_bytes(projection.grown)} "
        f"instead of {format_bytes(projection.peak)}"
    ]


def say_absent(choice: Choice) -> list[str]:
    """What a user should know who reads weights between steps."""
    if not choice.stream:
        return []
    return [
        "streamed weights have no memory between steps: reading them brings all of them home, saving too where they have room"
    ]


def _not_used(facts: Facts | InferenceFacts) -> list[str]:
    kinds = [kind for kind in TRAINING if kind.key in facts.forbidden and kind not in APPROXIMATE]
    return [f"not used: {kind.name}: {facts.forbidden[kind.key]}" for kind in kinds]


def _notes(facts: Facts, findings: Findings) -> list[str]:
    notes = _not_used(facts)
    if findings.normaliser is not None:
        notes.append(f"the loss is {findings.normaliser}")
    if findings.written:
        notes.append(
            f"{len(findings.written)} modules write buffers in a forward pass; a second run does not write them again"
        )
    if facts.timing.measured:
        said = "; ".join(f"{n} samples {1e3 * (a + b):.1f} ms" for n, a, b in facts.timing.points)
        notes.append(f"measured here, forward and backward: {said}; link to the host {facts.link / 1e9:.0f} GB/s")
    return notes


def _neighbour(search: TrainingSearch, found: Candidate, cheaper: bool) -> Neighbour | None:
    """The next faster choice that is larger, or the next smaller one that is slower."""
    rows = [c for c in (*search.candidates, *search.tried) if c.choice != found.choice]
    if cheaper:
        beside = [c for c in rows if c.seconds < found.seconds and search.thought(c) > found.peak]
        best = max(beside, key=lambda c: (c.seconds, -c.peak), default=None)
    else:
        best = search.smaller(found, [c for c in rows if c.seconds >= found.seconds])
    if best is None:
        return None
    traced, slower = best.projection is not None, slow_down(best.choice, search.facts)
    return Neighbour(name=describe(best.choice), peak=search.thought(best), slow_down=slower, traced=traced)


def describe_inference(facts: InferenceFacts, found: Candidate, allowance: Allowance, plain: int) -> FitPlan:
    """The plan of an inference on the model's device."""
    choice, projection = found.choice, found.projection
    assert projection is not None
    return FitPlan(
        name=f"inference of {facts.rows} samples", budgets=(allowance,), smallest=None, plain=plain, away=projection.away,
        steps=_steps(projection, allowance),
        remedies=tuple(
            _remedy(kind, choice, facts, saves=max(0, plain - found.peak)) for kind in remedies_on(choice)
        ),
        slow_down=1.0, place=place(facts),
        notes=(*_not_used(facts), *note_beside(projection.beside), *say_absent(choice)),
    )  # fmt: skip


def describe_hosted(
    batch: Any, budgets: tuple[Allowance, ...], facts: HostedFacts, choice: Choice, projection: Projection
) -> FitPlan:
    """The plan of a model that lives on the host."""
    there, rows = budgets[0], facts.rows
    host = Peak(pool=HOST, bytes=host_bytes(facts, choice, projection), known=Known.ESTIMATE)
    filed = filed_bytes(facts, choice)
    beside = (host, *([Peak(pool=DISK, bytes=sum(filed.values()), known=Known.EXACT)] if choice.transfer_bytes else ()))
    traffic = _traffic(choice, filed)
    steps = _steps(projection, there, beside=beside, traffic=traffic, margin=HOSTED_MARGIN)
    weights, state = facts.weights, facts.state
    back = _sent(choice, weights, state, projection.away)
    moved = projection.brought + projection.away + back
    link = max(projection.brought + projection.away, back) / facts.rates.both
    if choice.update == "host":
        link = max(link, weights / facts.rates.host)
    elif choice.update == "kept":
        link += (2 * weights + state) / facts.rates.both if choice.state_ring else weights / facts.rates.host
    read, written = (sum(row[way] for row in traffic.values()) for way in (0, 1))
    disk = read / facts.rates.read + written / facts.rates.write if choice.transfer_bytes else 0.0
    seconds = max(projection.computing, link, disk)
    plain = weights + (0 if choice.update == "none" else weights + state)
    return FitPlan(
        name=f"{'inference' if choice.update == 'none' else 'training step'} of {rows} samples on {there.pool}", steps=steps,
        budgets=budgets if not choice.transfer_bytes or facts.side.disk is None else (*budgets, facts.side.disk), smallest=None,
        plain=plain,
        remedies=tuple(
            _remedy(kind, choice, facts, saves=kind.saves(choice, facts, projection)) for kind in remedies_on(choice)
        ),
        slow_down=seconds / max(projection.computing * (0.75 if choice.update != "none" else 1.0), 1e-9),
        away=host.bytes, place="disk" if facts.side.files is not None else "host", moved=moved, seconds=seconds,
        tokens=_tokens(batch, rows),
        notes=tuple(_hosted_notes(facts, choice, projection, filed, (read, written, disk))),
    )  # fmt: skip


def _hosted_notes(
    facts: HostedFacts, choice: Choice, projection: Projection, filed: dict[str, int], disk: tuple[int, int, float]
) -> list[str]:
    """What was found and decided; `disk`: bytes read and written in a step, and the seconds of both."""
    rates, cut = facts.rates, facts.cut(choice)
    read, written, seconds = disk
    measured = "measured" if rates.measured else "assumed"
    notes = [
        f"{len(cut.units)} units of at most {format_bytes(cut.largest)} visit the device through {format_bytes(choice.ring)}; "
        f"{format_bytes(cut.held.size)} stay on it",
        f"link: {rates.bring / 1e9:.1f} GB/s in, {rates.send / 1e9:.1f} GB/s out, {rates.both / 1e9:.1f} GB/s each way at once "
        f"({measured})",
    ]
    if choice.update != "none":
        notes.append(f"the optimizer on the host: {rates.host / 1e9:.1f} GB/s of parameters ({measured})")
        if facts.side.forced:
            after = "on the device, a few parameters at a time" if choice.state_ring else "on the host"
            notes.append(f"gradients wait on the host: {facts.side.forced}; the update follows {after}")
        else:
            where = {
                "card": "parameters are updated on the device as their gradients come; state visits",
                "host": "parameters are updated on the host, beside the backward pass",
            }
            notes.append(where[choice.update])
    if choice.transfer_bytes:
        parts = ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in filed.items() if size)
        notes.append(
            f"the host has no room for all of it: {parts} in a file in {facts.folder}, {format_bytes(read)} read and "
            f"{format_bytes(written)} written a step ({rates.read / 1e9:.1f} and {rates.write / 1e9:.1f} GB/s measured, "
            f"{seconds:.2g} s)"
        )
    if projection.random:
        notes.append(f"random numbers are drawn ({', '.join(projection.random[:3])}) and drawn again alike")
    return notes + note_beside(projection.beside)


def _traffic(choice: Choice, filed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Bytes that each phase reads from the scratch file and writes to it."""
    weights, state, gradients = (filed[kind] for kind in ("weights", "state", "gradients"))
    if choice.update == "none":
        return {"forward": (weights, 0)}
    if choice.update == "kept":
        after = (weights + state + gradients, weights + state)
        return {"forward": (weights, 0), "backward": (weights, gradients), "optimizer": after}
    return {"forward": (weights, 0), "backward": (weights + state, weights + state)}


def _sent(choice: Choice, weights: int, state: int, inputs: int) -> int:
    """Bytes that go from the device to the host in a step."""
    if choice.update == "none":
        return 0
    if choice.update == "kept" and choice.state_ring:
        return inputs + 2 * weights + state
    return inputs + weights + (state if choice.update == "card" else 0)


def _tokens(batch: Any, rows: int) -> int:
    """Elements of the first tensor of whole numbers with two axes, else samples."""
    for tensor in batches.tensors_of(batch).values():
        if tensor.dim() == 2 and not tensor.dtype.is_floating_point:
            return int(tensor.numel())
    return rows
