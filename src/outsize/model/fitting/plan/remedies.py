"""Every way to make a step smaller, one small class each, in one list.

In: the facts of a plain step. Out: for each remedy its levels (the changes it makes to a `Choice`), what it costs in
seconds, how exact it keeps the step, and how it is told. A new remedy is a class here and a field of `Choice` that
the runner obeys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from outsize.core.failure import Exactness
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.dry_run import RATES
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.speeds import LAUNCH

Level = dict[str, Any]

CALL = 2e-4
"""Seconds of the processor that a module computed again takes beside its launches."""

COPY = {"cpu": 1e-5, "cuda": 4e-5}
"""Seconds of the processor to begin one copy to or from elsewhere."""

IN_AND_OUT = {"cpu": 2.0, "cuda": 1.2}
"""Time to bring and send bytes over that of one way: a card's link goes both ways at once, but for the first and last group."""

MEANWHILE = 0.6
"""The same on a card where parameters are updated in the backward pass, which hides half of it (llama 1.3B in AMP on an H200)."""

EARLY = (0.15, 0.5)
"""Parts of the activations, those of the first blocks, that may wait elsewhere: they wait longest."""

ROUNDED = 0.01
"""Part of the passes' time that slices have to gain on remedies that change no bit."""

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Parts of a ladder that the search tries; the planner refines the number afterwards."""


class Means:
    """One remedy."""

    key: ClassVar[str]
    """Field of `Choice`, and the name under which facts forbid it."""
    name: ClassVar[str]
    """As a user reads it."""
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def levels(self, facts: Facts) -> list[Level]:
        """Changes to a choice, from off to full."""
        return [{self.key: False}, {self.key: True}]

    def on(self, choice: Choice) -> bool:
        """True where a choice uses it."""
        return bool(getattr(choice, self.key))

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Time that it adds to a step."""
        raise AssertionError(self.key)

    def how(self, choice: Choice, facts: Facts) -> str:
        """What is done, for the user."""
        raise AssertionError(self.key)


class Slices(Means):
    """Gradient accumulation over slices of the batch, with one normaliser for all."""

    key = "slices"
    name = "slice the batch"
    exactness = Exactness.ROUNDING

    def levels(self, facts: Facts) -> list[Level]:
        """1, 2, 3, 4, 6, 8, ... up to one sample a slice."""
        counts = sorted({n for p in range(20) for n in (2**p, 3 * 2**p) if n <= facts.rows} | {facts.rows})
        return [{"slices": count} for count in counts]

    def on(self, choice: Choice) -> bool:
        """More than one slice."""
        return choice.slices > 1

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Slices too small to fill the device take as long as their launches; gradients are added once more a slice. What is
        equal only up to rounding has to gain something."""
        longer = max(0.0, facts.passes_in(choice.slices) - facts.passes)
        return longer + 3 * (choice.slices - 1) * facts.gradients / RATES[facts.device][1] + ROUNDED * facts.passes

    def how(self, choice: Choice, facts: Facts) -> str:
        """Sizes of the slices."""
        if choice.first:
            rest = -(-(facts.rows - choice.first) // (choice.slices - 1))
            return f"{choice.first} of {facts.rows} samples, then {choice.slices - 1} slices of {rest}"
        return f"{choice.slices} slices of {-(-facts.rows // choice.slices)} of {facts.rows} samples"


class Checkpoint(Means):
    """Activations of some blocks are computed again."""

    key = "checkpoint"
    name = "compute activations again"

    def levels(self, facts: Facts) -> list[Level]:
        """More and more modules, those first that free most bytes for their time; small ones only, or large ones too; and all
        blocks, as people do it."""
        every = tuple(name for name in order_blocks(facts) if name not in facts.writing)
        found: dict[tuple[str, ...], None] = {(): None, every: None}
        for ladder in facts.ladders:
            rungs = sorted({max(1, round(fraction * len(ladder))) for fraction in FRACTIONS})
            found |= {ladder[rung - 1].names: None for rung in rungs}
        return [{"checkpoint": names} for names in found]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """One more forward pass of these modules, and a call for each."""
        parts = [facts.parts[name] for name in choice.checkpoint if name in facts.parts]
        again = sum(part.seconds for part in parts)
        calls = CALL * sum(part.runs for part in parts)
        longer = facts.passes_in(choice.slices, again, calls) - facts.passes_in(choice.slices)
        return max(longer, 0.1 * again, 0.01 * calls)  # what the card has time for still costs something

    def how(self, choice: Choice, facts: Facts) -> str:
        """Which modules."""
        return f"{len(choice.checkpoint)} modules: {shorten(choice.checkpoint)}"


class Offload(Means):
    """Activations of some blocks wait elsewhere."""

    key = "offload"
    name = "keep activations elsewhere"

    def levels(self, facts: Facts) -> list[Level]:
        """Off, the blocks whose copies take less time than they do, the first ones, or all.

        All are also those that keep only what another made.
        """
        order = tuple(block.name for block in facts.blocks if block.name not in facts.heads)
        worth = (name for name in order_blocks(facts, compound=False) if name not in facts.heads)
        quick = tuple(n for n in worth if self._time(n, facts) < _block(n, facts).seconds)
        if sum(_block(name, facts).kept for name in quick) < facts.activations // 20:
            quick = ()
        first = (tuple(_up_to(order, facts, part)) for part in EARLY)
        return [{"offload": names} for names in dict.fromkeys(((), quick, *first, order))]

    @staticmethod
    def _time(name: str, facts: Facts) -> float:
        return 2.0 * float(_block(name, facts).kept) / facts.link

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Copies out and in; on a card those out run beside the forward pass, those in come one ahead, which hides little."""
        once = moved_bytes(choice, facts) / facts.link
        beside = facts.timing.forward(facts.rows) if facts.device == "cuda" else 0.0
        return max(0.05 * once, once - beside) + once

    def how(self, choice: Choice, facts: Facts) -> str:
        """Which blocks and where to."""
        return f"{len(choice.offload)} blocks to the {place(facts)}: {shorten(choice.offload)}"


class InBackward(Means):
    """A few parameters are updated when their gradients are complete, and those let go."""

    key = "in_backward"
    name = "update in the backward pass"

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """One call of the optimizer for a few parameters, and what it changes is kept aside until the step is done."""
        log = (facts.weights * (not choice.stream) + (1 - choice.state_away) * facts.state) / facts.link
        calls = facts.groups * 20 * LAUNCH[facts.device]
        copies = facts.parameters * (1 + round(facts.copies)) * COPY[facts.device]
        return calls + copies + log * (0.6 if facts.device == "cuda" else 1.0)

    def how(self, choice: Choice, facts: Facts) -> str:
        """What happens to gradients."""
        return f"{facts.parameters} gradients are used and freed as they come, a few at a time"


class StateAway(Means):
    """Optimizer state, or part of it, lives elsewhere and visits for the update."""

    key = "state_away"
    name = "keep optimizer state elsewhere"

    def levels(self, facts: Facts) -> list[Level]:
        """None, parts of it, all."""
        parts = FRACTIONS if facts.state else (1.0,)
        return [{self.key: part} for part in dict.fromkeys((0.0, *map(facts.share, parts)))]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """State in and out once a step."""
        copies = 2 * facts.parameters * round(facts.copies) * COPY[facts.device]
        hidden = choice.in_backward and facts.device == "cuda"
        ways = MEANWHILE if hidden else IN_AND_OUT[facts.device]
        return choice.state_away * (ways * facts.state / facts.link + copies)

    def how(self, choice: Choice, facts: Facts) -> str:
        """How much and where to."""
        part = "" if choice.state_away >= 1 else f"{choice.state_away:.0%} of it, that of the largest parameters, "
        return f"{part}on the {place(facts)}; visits a few parameters at a time"


class GradientsAway(Means):
    """Gradients live elsewhere until the update."""

    key = "gradients_away"
    name = "keep gradients elsewhere"

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Out after each slice, in to add the next."""
        return 2 * choice.slices * (facts.gradients / facts.link + facts.parameters * COPY[facts.device])

    def how(self, choice: Choice, facts: Facts) -> str:
        """Where to."""
        return f"on the {place(facts)} until the update"


class Stream(Means):
    """Weights live elsewhere and visit while their module runs."""

    key = "stream"
    name = "stream weights"

    def levels(self, facts: Facts) -> list[Level]:
        """All that run once, or nothing."""
        names = tuple(block.name for block in facts.blocks if block.weights and block.runs == 1)
        return [{"stream": ()}, {"stream": names}] if names else [{"stream": ()}]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """In for the forward pass, in for the backward pass, out and in for the update."""
        moved = sum(block.weights for block in facts.blocks if block.name in choice.stream)
        copies = (2 * choice.slices + 2) * facts.parameters * COPY[facts.device]
        return (2 * choice.slices + IN_AND_OUT[facts.device]) * moved / facts.link + copies

    def how(self, choice: Choice, facts: Facts) -> str:
        """Where from."""
        return f"{len(choice.stream)} modules from the {place(facts)}: {shorten(choice.stream)}"


class Chunks(Means):
    """Output head and cross entropy in pieces."""

    key = "chunks"
    name = "loss in pieces"
    exactness = Exactness.ROUNDING

    def levels(self, facts: Facts) -> list[Level]:
        """Off, or pieces small enough."""
        return [{"chunks": 0}, {"chunks": facts.pieces_of_loss()}]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """The weight's gradient is added up once a piece; nothing is computed twice."""
        head = sum(block.weights for block in facts.blocks if block.name in facts.heads)
        return 1e-4 * facts.passes + 2 * max(choice.chunks, choice.slices) * head / RATES[facts.device][1]

    def how(self, choice: Choice, facts: Facts) -> str:
        """Which head."""
        return f"{choice.chunks} pieces of {', '.join(facts.heads)} and its cross entropy"


class Autocast(Means):
    """bfloat16 where torch's autocast says so."""

    key = "autocast"
    name = "bfloat16 autocast"
    exactness = Exactness.APPROXIMATE

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Faster where the device has units for it; taken as no gain."""
        return 0.0

    def how(self, choice: Choice, facts: Facts) -> str:
        """The setting."""
        return f'torch.autocast("{facts.device}", dtype=torch.bfloat16) around the forward pass'


class Expandable(Means):
    """Segments of the card's allocator grow, so that free pieces between others join."""

    key = "expandable"
    name = "let segments grow"

    def levels(self, facts: Facts) -> list[Level]:
        """A trace tells what is reserved either way: the search turns it on where that is less."""
        return [{self.key: False}]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Next to nothing."""
        return 1e-4 * facts.passes

    def how(self, choice: Choice, facts: Facts) -> str:
        """The setting."""
        return "torch's allocator with expandable_segments:True until undo()"


REMEDIES: tuple[Means, ...] = (
    Slices(), Checkpoint(), Offload(), InBackward(), StateAway(), GradientsAway(), Stream(), Chunks(), Autocast(), Expandable(),
)  # fmt: skip
"""All of them."""

ALLOWED = {
    "exact": (Exactness.BITWISE, Exactness.ROUNDING),
    "distribution": (Exactness.BITWISE, Exactness.ROUNDING, Exactness.DISTRIBUTION),
    "approximate": tuple(Exactness),
}
"""What a user's `allow` opens."""


def order_blocks(facts: Facts, compound: bool = True) -> tuple[str, ...]:
    """Blocks worth computing again (or, not only compound ones, worth moving), in the order of the model."""
    least = facts.activations // 200
    worth = [block for block in facts.blocks if block.kept > least and (block.compound or not compound)]
    return tuple(block.name for block in worth)


def _up_to(order: tuple[str, ...], facts: Facts, part: float) -> Iterator[str]:
    """The first blocks, which together keep that part of the activations."""
    kept = 0
    for name in order:
        if kept >= part * facts.activations:
            return
        kept += _block(name, facts).kept
        yield name


def _block(name: str, facts: Facts) -> Any:
    return next(block for block in facts.blocks if block.name == name)


def moved_bytes(choice: Choice, facts: Facts) -> int:
    """Bytes of activations that wait elsewhere: what offloaded blocks keep and do not compute again."""
    if not choice.offload:
        return 0
    kept = sum(block.kept for block in facts.blocks if block.name in choice.offload)
    inside = tuple(f"{name}." for name in choice.offload)
    moved = {*choice.offload}
    again = [n for n in choice.checkpoint if n.partition(":")[0] in moved or n.startswith(inside)]
    return max(0, kept - sum(facts.parts[name].freed for name in again if name in facts.parts))


def place(facts: Facts) -> str:
    """Where things wait."""
    return "host" if facts.device == "cuda" else "disk"


def shorten(names: tuple[str, ...]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
