"""Every way to make a step smaller, one small class each, in one list.

In: the facts of a step. Out: for each remedy its levels (the changes it makes to a `Choice`), the seconds that it adds, the bytes
that it changes, how exact it keeps the step, why it cannot be used, and how it is described. A new remedy is a class here (of a
model that lives on the host: in `hosted_remedies`), its line in `REMEDIES`, and a field of `Choice` that the runner obeys:
search, dry run and description know no remedy by its name.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

from outsize.core.failure import Exactness
from outsize.model.fitting.choice import PLAIN, REMEMBERED, Choice
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.move.evicted import check_movable
from outsize.model.fitting.plan import hosted_remedies as hosted
from outsize.model.fitting.plan.again_remedy import Again
from outsize.model.fitting.plan.facts import (
    Facts,
    InferenceFacts,
    Sizes,
    groups_at_once,
    in_flight,
    moved_bytes,
    order_blocks,
    passes_of,
    place,
    plain_sizes,
    undo_bytes,
)
from outsize.model.fitting.plan.narrow_remedies import FrozenBits, KeptBits, StateBits
from outsize.model.fitting.plan.projection import RATES, Projection
from outsize.model.fitting.plan.remedy_kind import Level, RemedyKind, UpdatedInGroups, shorten, why_not_in_groups
from outsize.model.fitting.plan.speeds import LAUNCH
from outsize.model.fitting.plan.tensor_remedies import (
    COPY,
    EARLY,
    FRACTIONS,
    Recipes,
    TensorsAway,
    computed_again,
    down_to,
    moved_and_back,
    some_of,
)
from outsize.model.fitting.run.runner import Work

CALL = 2e-4
"""Seconds of the processor that a module computed again takes beside its launches."""

IN_AND_OUT = {"cpu": 2.0, "cuda": 1.2}
"""Time to bring and send bytes over that of one way: a card's link goes both ways at once, but for the first and last group."""

MEANWHILE = 0.6
"""The same on a card where parameters are updated in the backward pass, which hides half of it (llama 1.3B in AMP on an H200)."""

ROUNDED = 0.01
"""Part of the passes' time that slices have to gain on remedies that change no bit."""

WORTHWHILE = 0.03
"""Part of the state for which room is used."""

TIES = 0.03
"""Room that a card's plan leaves where the allocator stops at the budget: addresses, which only the driver knows, decide ties."""

PAGE = 20 * 2**20
"""By so much a segment grows at least."""

CUTS = 3
"""Other cuts of a batch that are tried."""

FEW_SLICES = 4
"""Most slices of a batch that is cut otherwise."""


class Slices(RemedyKind[Facts]):
    """Gradient accumulation over slices of the batch, with one normaliser for all."""

    key = "slices"
    compiled = True
    name = "slice the batch"
    inference = True
    costs = "small slices do not fill a card"
    missed = "the batch is not sliced"
    exactness = Exactness.ROUNDING
    only_saves = True

    def levels(self, facts: Facts | InferenceFacts) -> list[Level]:
        """1, 2, 3, 4, 6, 8, ... up to one sample a slice."""
        counts = sorted({n for p in range(20) for n in (2**p, 3 * 2**p) if n <= facts.rows} | {facts.rows})
        return [{"slices": count} for count in counts]

    def on(self, choice: Choice) -> bool:
        return choice.slices > 1

    def extent(self, choice: Choice) -> int:
        return choice.slices

    def variants(self, choice: Choice, facts: Facts, peak: int, budget: int) -> list[Choice]:
        """First slices up to the largest that may fit: cards take unequal times for samples, and the first slice has no
        gradients of others beside it. Of many slices none is much larger than the others."""
        if not 1 < choice.slices <= FEW_SLICES:
            return []
        rest = -(-facts.rows // choice.slices)
        fixed = facts.weights + int((1 - choice.state_away) * facts.state) + facts.plain.beside
        each = max(1, (peak - fixed - facts.gradients) // rest)
        largest = min(facts.rows - choice.slices + 1, int((budget / (1 + TIES) - fixed) // each))
        sizes = {rest + (largest - rest) * number // CUTS for number in range(1, CUTS + 1)}
        return [replace(choice, first=size) for size in sorted(sizes, reverse=True) if size > rest]

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        """The loss of a batch has to be known from those of its slices."""
        return findings.why_not if findings.normaliser is None else ""

    def exactness_of(self, random: bool) -> Exactness:
        """Slices draw other random numbers than the whole batch."""
        return Exactness.DISTRIBUTION if random else self.exactness

    def degree(self, choice: Choice) -> str:
        return f"{choice.slices}, the first of {choice.first}" if choice.first else str(choice.slices)

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Activations of the largest slice, beside the gradients of those before it."""
        largest = choice.first or -(-facts.rows // choice.slices)
        return replace(sizes, share=largest / facts.rows, accumulated=True)

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Slices too small to fill the device take as long as their launches; gradients are added once more a slice. What is
        equal only up to rounding has to gain something."""
        seen = facts.seeing if facts.replays else 0.0
        longer = max(0.0, facts.passes_in(choice.slices, calls=seen) - facts.passes)
        longer += (choice.slices - 1) * facts.redrawn
        return longer + 3 * (choice.slices - 1) * facts.gradients / RATES[facts.device][1] + ROUNDED * facts.passes

    def how(self, choice: Choice, facts: Facts | InferenceFacts) -> str:
        if choice.first:
            rest = -(-(facts.rows - choice.first) // (choice.slices - 1))
            return f"{choice.first} of {facts.rows} samples, then {choice.slices - 1} slices of {rest}"
        return f"{choice.slices} slices of {-(-facts.rows // choice.slices)} of {facts.rows} samples"


class Checkpoint(RemedyKind[Facts]):
    """Activations of some blocks are computed again."""

    key = "checkpoint"
    name = "compute activations again"
    graded = True

    def extent(self, choice: Choice) -> int:
        return len(choice.checkpoint)

    def levels(self, facts: Facts) -> list[Level]:
        """More and more modules, those first that free most bytes for their time; small ones only, or large ones too; and all
        blocks, as people do it."""
        every = tuple(name for name in order_blocks(facts) if name not in facts.writing)
        return [{"checkpoint": names} for names in dict.fromkeys(((), every, *some_of(facts.ladders)))]

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """What these modules keep is freed, and there again one module at a time."""
        parts = [facts.parts[name] for name in choice.checkpoint if name in facts.parts]
        freed, again = sum(part.freed for part in parts), max((part.kept for part in parts), default=0)
        return replace(sizes, activations=sizes.activations - freed, again=sizes.again + again)

    def gentler(self, choice: Choice, facts: Facts) -> list[Choice]:
        """Fewer modules, down its ladder; not where others are moved, of which there would be more."""
        down = [] if choice.offload else down_to(facts.ladders, choice.checkpoint)
        return [replace(choice, checkpoint=some) for some in down]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """One more forward pass of these modules, and a call for each."""
        parts = [facts.parts[name] for name in choice.checkpoint if name in facts.parts]
        again = sum(part.seconds for part in parts)
        calls = CALL * sum(part.runs for part in parts)
        return computed_again(choice, facts, again, calls)

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"{len(choice.checkpoint)} modules: {shorten(choice.checkpoint)}"


class Offload(RemedyKind[Facts]):
    """Activations of some blocks wait elsewhere."""

    key = "offload"
    name = "keep activations elsewhere"

    def levels(self, facts: Facts) -> list[Level]:
        """Off, the blocks whose copies take less time than they do, the first ones, or all.

        All are also those that keep only what another made.
        """
        order = tuple(block.name for block in facts.blocks if block.name not in facts.heads)
        worth = (name for name in order_blocks(facts, compound=False) if name not in facts.heads)
        blocks = {block.name: block for block in facts.blocks}
        quick = tuple(name for name in worth if 2 * blocks[name].kept / facts.link < blocks[name].seconds)
        if sum(blocks[name].kept for name in quick) < facts.activations // 20:
            quick = ()
        before = list(itertools.accumulate((blocks[name].kept for name in order), initial=0))
        first = (
            tuple(name for name, kept in zip(order, before, strict=False) if kept < part * facts.activations) for part in EARLY
        )  # fmt: skip
        return [{"offload": names} for names in dict.fromkeys(((), quick, *first, order))]

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """What moves is gone, but for what is on its way."""
        moved = moved_bytes(choice, facts)
        return replace(sizes, activations=sizes.activations - moved, again=sizes.again + in_flight(moved, facts))

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Copies out and in; on a card those out run beside the forward pass, those in come one ahead, which hides little."""
        return moved_and_back(moved_bytes(choice, facts), facts)

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"{len(choice.offload)} blocks to the {place(facts)}: {shorten(choice.offload)}"


class InBackward(UpdatedInGroups):
    """A few parameters are updated when their gradients are complete, and those let go."""

    key = "in_backward"
    compiled = True
    name = "update in the backward pass"

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        """An update before all gradients are known."""
        clipped = "clipping needs the norm of all gradients before the first update" if work.clip is not None else ""
        return why_not_in_groups(work, own_step) or (clipped if work.optimizer is not None else "")

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """Gradients are complete in the backward pass, and need not wait."""
        return choice.slices == 1 and not choice.gradients_away

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """A group waits for the next gradient; what it changes goes to the undo log first."""
        log = in_flight(facts.weights + facts.state, facts)
        waiting = facts.group + facts.largest + log
        return replace(
            sizes, gradients=waiting, visits_backward=1, update=waiting + facts.group, visits_update=1, early=sizes.early + log
        )  # fmt: skip

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """One call of the optimizer for a few parameters, and what it changes is kept aside until the step is done."""
        log = (facts.weights * (not choice.stream) + (1 - choice.state_away) * facts.state) / facts.link
        calls = facts.groups * 20 * LAUNCH[facts.device]
        copies = facts.parameters * (1 + round(facts.copies)) * COPY[facts.device]
        return calls + copies + log * (0.6 if facts.device == "cuda" else 1.0)

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"{facts.parameters} gradients are used and freed as they come, a few at a time"


class StateAway(UpdatedInGroups):
    """Optimizer state, or part of it, lives elsewhere and visits for the update."""

    key = "state_away"
    compiled = True
    name = "keep optimizer state elsewhere"

    def levels(self, facts: Facts) -> list[Level]:
        parts = FRACTIONS if facts.state else (1.0,)
        return [{self.key: part} for part in dict.fromkeys((0.0, *map(facts.share, parts)))]

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Only that of the groups that are being updated is there."""
        fixed = sizes.fixed - choice.state_away * facts.state
        return replace(sizes, fixed=fixed, visiting=sizes.visiting + facts.copies)

    def with_room(self, choice: Choice, facts: Facts, room: int) -> Choice | None:
        """Less of the state elsewhere, where nothing else needs it there."""
        if not choice.state_away or choice.stream or choice.gradients_away or room < WORTHWHILE * facts.state:
            return None
        part = facts.share(max(0.0, choice.state_away - room / max(1, facts.state)))
        return replace(choice, state_away=part) if part < choice.state_away else None

    def seconds(self, choice: Choice, facts: Facts) -> float:
        copies = 2 * facts.parameters * round(facts.copies) * COPY[facts.device]
        hidden = choice.in_backward and facts.device == "cuda"
        ways = MEANWHILE if hidden else IN_AND_OUT[facts.device]
        return choice.state_away * (ways * facts.state / facts.link + copies)

    def how(self, choice: Choice, facts: Facts) -> str:
        part = "" if choice.state_away >= 1 else f"{choice.state_away:.0%} of it, that of the largest parameters, "
        return f"{part}on the {place(facts)}; visits a few parameters at a time"


class GradientsAway(UpdatedInGroups):
    """Gradients live elsewhere until the update."""

    key = "gradients_away"
    compiled = True
    name = "keep gradients elsewhere"

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """State goes first: it is needed once a step."""
        return choice.state_away >= 1 or not facts.state

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Two gradients at a time, what is on its way, and in the update a group."""
        update = undo_bytes(facts) + groups_at_once(facts) * facts.group
        return replace(sizes, gradients=2 * facts.largest + in_flight(facts.gradients, facts), update=update)

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Out after each slice, in to add the next."""
        return 2 * choice.slices * (facts.gradients / facts.link + facts.parameters * COPY[facts.device])

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"on the {place(facts)} until the update"


class Stream(UpdatedInGroups):
    """Weights live elsewhere and visit while their module runs."""

    key = "stream"
    name = "stream weights"
    inference = True

    def levels(self, facts: Facts | InferenceFacts) -> list[Level]:
        return [{"stream": names} for names in dict.fromkeys(((), facts.streamable))]

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        """An update of a few parameters at a time, and memory that can be let go."""
        stuck = (check_movable(name, p) for name, p in work.model.named_parameters() if work.optimizer is not None)
        return why_not_in_groups(work, own_step) or next(filter(None, stuck), "")

    def is_sensible(self, choice: Choice, facts: Facts | InferenceFacts) -> bool:
        """In training state and gradients go first, and activations that are kept would hold weights."""
        if isinstance(facts, InferenceFacts):
            return True
        if choice.recipes or choice.tensors_away:
            return False
        if (choice.state_away < 1 and facts.state) or not (choice.in_backward or choice.gradients_away):
            return False
        return bool(choice.offload) or set(order_blocks(facts)) <= set(choice.checkpoint)

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Two of these modules are there at a time, and in the update a group."""
        weights = [block.weights for block in facts.blocks if block.name in choice.stream]
        fixed = sizes.fixed - (sum(weights) - 2 * max(weights))
        return replace(sizes, fixed=fixed, visiting=sizes.visiting + 1)

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """In for the forward pass, in for the backward pass, out and in for the update."""
        moved = sum(block.weights for block in facts.blocks if block.name in choice.stream)
        copies = (2 * choice.slices + 2) * facts.parameters * COPY[facts.device]
        return (2 * choice.slices + IN_AND_OUT[facts.device]) * moved / facts.link + copies

    def how(self, choice: Choice, facts: Facts | InferenceFacts) -> str:
        return f"{len(choice.stream)} modules from the {place(facts)}: {shorten(choice.stream)}"


class Chunks(RemedyKind[Facts]):
    """Output head and cross entropy in pieces."""

    key = "chunks"
    name = "loss in pieces"
    exactness = Exactness.ROUNDING
    only_saves = True

    def levels(self, facts: Facts) -> list[Level]:
        return [{"chunks": 0}, {"chunks": facts.chunks}]

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        return "" if work.heads else "no last linear layer whose output goes straight into a cross entropy was found"

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """The head itself runs once, at home."""
        return not set(facts.heads) & {*choice.stream, *choice.checkpoint, *choice.offload}

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """As in a trace of the plain step with its loss in pieces."""
        if facts.chunked is None:
            return sizes
        before, after = passes_of(facts.plain, facts), passes_of(facts.chunked, facts)
        return replace(
            sizes, fixed=sizes.fixed + after[0] - before[0], activations=sizes.activations + after[1] - before[1]
        )

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """The weight's gradient is added up once a piece; nothing is computed twice."""
        head = sum(block.weights for block in facts.blocks if block.name in facts.heads)
        return 1e-4 * facts.passes + 2 * max(choice.chunks, choice.slices) * head / RATES[facts.device][1]

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"{choice.chunks} pieces of {', '.join(facts.heads)} and its cross entropy"


class Autocast(RemedyKind[Facts]):
    """bfloat16 where torch's autocast says so. It is faster where the device has units for it, which is taken as no gain."""

    key = "autocast"
    name = "bfloat16 autocast"
    exactness = Exactness.APPROXIMATE
    only_saves = True

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Most activations have half the bytes."""
        return replace(sizes, precision=0.6)

    def how(self, choice: Choice, facts: Facts) -> str:
        return f'torch.autocast("{facts.device}", dtype=torch.bfloat16) around the forward pass'


class Expandable(RemedyKind[Facts]):
    """Segments of the card's allocator grow, so that free pieces between others join."""

    key = "expandable"
    compiled = True
    name = "let segments grow"
    done = "torch's allocator with expandable_segments:True until undo()"
    only_saves = True
    shown_without = True

    def shown_by(self, projection: Projection, facts: Facts) -> Projection | None:
        """A trace tells what is reserved either way."""
        return projection.growing() if facts.grows and projection.grown < projection.peak else None

    def needed(self, peak: int) -> int:
        """Segments that grow do so by a page, also beyond a limit."""
        return int(peak * (1 + TIES)) + PAGE

    def seconds(self, choice: Choice, facts: Facts) -> float:
        return 1e-4 * facts.passes


REMEDIES: tuple[RemedyKind[Any], ...] = (
    Slices(), Checkpoint(), Offload(), Recipes(), TensorsAway(), InBackward(), StateAway(), GradientsAway(), Stream(), Chunks(),
    Again(), Autocast(), StateBits(), FrozenBits(), KeptBits(), Expandable(),
    hosted.Visits(), hosted.VisitingState(), hosted.EarlyUpdate(), hosted.InputsOnly(), hosted.Disk(), hosted.InputsAway(),
    hosted.Pieces(), hosted.HeadInPieces(),
)  # fmt: skip
"""All of them: those of a model on its device, then those of one that lives on the host."""

TRAINING = tuple(kind for kind in REMEDIES if not kind.hosted)
"""Those of a training step on the model's device."""

OF_TENSORS = tuple(kind for kind in TRAINING if kind.of_tensors)
"""Those that treat saved tensors one by one: they come after those of modules, which cost less for each operator."""

APPROXIMATE = tuple(kind for kind in TRAINING if kind.exactness == Exactness.APPROXIMATE)
"""Those that change results by more than rounding: they come after all others."""

ALLOWED = {
    "exact": (Exactness.BITWISE, Exactness.ROUNDING),
    "distribution": (Exactness.BITWISE, Exactness.ROUNDING, Exactness.DISTRIBUTION),
    "approximate": tuple(Exactness),
}
"""What a user's `allow` opens."""


def find_forbidden(work: Work, findings: Findings, own_step: bool) -> dict[str, str]:
    """Remedy -> the reason why it cannot be used here."""
    fixed = [kind for kind in TRAINING if work.compiled and not kind.compiled]
    forbidden = dict.fromkeys(
        (kind.key for kind in fixed), "the model is compiled, and its modules are parts of graphs"
    )
    return forbidden | {kind.key: why for kind in TRAINING if (why := kind.why_not(work, findings, own_step))}


@functools.lru_cache(REMEMBERED)
def remedies_on(choice: Choice) -> tuple[RemedyKind[Any], ...]:
    hosted = choice.hosted
    return tuple(kind for kind in REMEDIES if kind.hosted == hosted and kind.on(choice))


def describe(choice: Choice) -> str:
    """The remedies of a choice, in a few words."""
    words = [(kind.name, kind.degree(choice)) for kind in remedies_on(choice)]
    return ", ".join(f"{name} ({degree})" if degree else name for name, degree in words) or "the plain step"


def predict(choice: Choice, facts: Facts) -> int:
    """Peak of a choice by arithmetic on the plain step."""
    if choice == PLAIN:
        return facts.plain.peak  # it is known
    sizes = plain_sizes(facts)
    for kind in remedies_on(choice):
        sizes = kind.bytes(sizes, choice, facts)
    return sizes.peak(facts)
