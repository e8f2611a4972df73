"""Remedies for saved tensors, one by one, whatever code made them; and what they share with those for whole modules.

In: the facts of a step. Out: two remedies in the list of `remedies`: saved tensors that are made again, and saved tensors
that wait elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.facts import Facts, Ladder, Sizes, in_flight, place
from outsize.model.fitting.plan.recipe_ladder import NOTE
from outsize.model.fitting.plan.remedy_kind import Level, RemedyKind, shorten
from outsize.model.fitting.recipes.forward_pass import ALL

COPY = {"cpu": 3e-5, "cuda": 4e-5}
"""Seconds of the processor to send one tensor elsewhere and to bring it back, however small it is."""

EARLY = (0.15, 0.5)
"""Parts of the activations, those of the first blocks, that may wait elsewhere: they wait longest."""

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Parts of a ladder that the search tries; the planner refines the number afterwards."""


class Recipes(RemedyKind[Facts]):
    """Saved tensors are made again by the operators that made them, whatever code called those."""

    key = "recipes"
    name = "make saved tensors again"
    of_tensors = True
    graded = True

    def extent(self, choice: Choice) -> int:
        return len(choice.recipes)

    def levels(self, facts: Facts) -> list[Level]:
        """More and more calls, those first that free most bytes for their time; with less or more of it at once."""
        return [{"recipes": sites} for sites in dict.fromkeys(((), *some_of(_sites(facts))))]

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """It takes the place of remedies for whole modules."""
        return not (choice.checkpoint or choice.offload or choice.kept_bits)

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """What these calls make is freed, but for what they start from, and there again a group of calls at a time."""
        rung = facts.rungs.get(choice.recipes)
        if rung is None:
            return sizes
        return replace(sizes, activations=sizes.activations - rung.freed, again=sizes.again + rung.again)

    def gentler(self, choice: Choice, facts: Facts) -> list[Choice]:
        """Fewer calls, down its ladder; not where the rest is moved, of which there would be more."""
        down = [] if choice.tensors_away else down_to(_sites(facts), choice.recipes)
        return [replace(choice, recipes=some) for some in down]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """These calls once more, and the processor's time to see every call and to note these."""
        rung = facts.rungs.get(choice.recipes)
        again = rung.seconds if rung is not None else 0.0
        return computed_again(choice, facts, again, facts.seeing + NOTE * len(choice.recipes))

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"{len(choice.recipes)} calls of operators run again: {shorten(choice.recipes)}"


class TensorsAway(RemedyKind[Facts]):
    """Saved tensors wait elsewhere, whatever code made them."""

    key = "tensors_away"
    name = "keep saved tensors elsewhere"
    of_tensors = True

    def levels(self, facts: Facts) -> list[Level]:
        """None, the first ones, which wait longest, or all that are not made again."""
        before = list(itertools.accumulate(facts.saved.values(), initial=0))
        first = (
            tuple(site for site, size in zip(facts.saved, before, strict=False) if size < part * facts.activations)
            for part in EARLY
        )  # fmt: skip
        return [{"tensors_away": sites} for sites in dict.fromkeys(((), *first, (ALL,) if facts.saved else ()))]

    def extent(self, choice: Choice) -> int:
        return 2 if ALL in choice.tensors_away else int(self.on(choice))

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """It takes the place of remedies for whole modules."""
        return not (choice.checkpoint or choice.offload or choice.kept_bits)

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """What moves is gone, but for what is on its way."""
        moved = moved_tensors(choice, facts)
        return replace(sizes, activations=sizes.activations - moved, again=sizes.again + in_flight(moved, facts))

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Copies out and in, and the processor's time to see every call."""
        noted = 0.0 if choice.recipes else choice.slices * facts.seeing
        return (
            moved_and_back(moved_tensors(choice, facts), facts)
            + choice.slices * COPY[facts.device] * len(_moved_sites(choice, facts))
            + noted
        )

    def how(self, choice: Choice, facts: Facts) -> str:
        if ALL in choice.tensors_away:
            return f"all that autograd saves to the {place(facts)}"
        return f"what autograd saves of {len(choice.tensors_away)} calls to the {place(facts)}: {shorten(choice.tensors_away)}"

    def degree(self, choice: Choice) -> str:
        return "all" if ALL in choice.tensors_away else str(len(choice.tensors_away))


def move_all(choice: Choice, facts: Facts) -> Choice | None:
    """The choice that cuts the batch alike and keeps elsewhere whatever need not be there; None where that is forbidden."""
    if {"tensors_away", "gradients_away", "state_away"} & facts.forbidden.keys():
        return None
    chunks = facts.chunks if facts.heads and "chunks" not in facts.forbidden else 0
    return replace(choice.cut, tensors_away=(ALL,), gradients_away=True, state_away=1.0, chunks=chunks)


def _sites(facts: Facts) -> tuple[Ladder, ...]:
    return tuple(tuple(rung.sites for rung in ladder) for ladder in facts.recipes)


def some_of(ladders: Iterable[Ladder]) -> Iterator[tuple[str, ...]]:
    """The sets of each ladder that the search tries."""
    for ladder in ladders:
        yield from (ladder[n - 1] for n in sorted({max(1, round(part * len(ladder))) for part in FRACTIONS}))


def down_to(ladders: Iterable[Ladder], now: tuple[str, ...]) -> list[tuple[str, ...]]:
    """From nothing up to this set, along its ladder; empty where it is on none."""
    names = next((names for names in ([(), *ladder] for ladder in ladders) if now in names), [])
    return names[: names.index(now) + 1] if names else []


def computed_again(choice: Choice, facts: Facts, again: float, calls: float) -> float:
    """Seconds that a step takes longer where part of its forward pass runs twice; `calls`: of the processor."""
    longer = facts.passes_in(choice.slices, again, calls) - facts.passes_in(choice.slices)
    return max(longer, 0.1 * again, 0.01 * calls)  # what the card has time for still costs something


def moved_and_back(moved: int, facts: Facts) -> float:
    """Seconds of copies of so many bytes of activations, out and in."""
    once = moved / facts.link
    beside = facts.timing.forward(facts.rows) if facts.device == "cuda" else 0.0
    return max(0.05 * once, once - beside) + once


def moved_tensors(choice: Choice, facts: Facts) -> int:
    """Bytes of saved tensors that wait elsewhere."""
    return sum(facts.saved[site] for site in _moved_sites(choice, facts))


def _moved_sites(choice: Choice, facts: Facts) -> list[str]:
    """Calls whose results are moved and not made again."""
    again = set(choice.recipes)
    sites = facts.saved if ALL in choice.tensors_away else choice.tensors_away
    return [site for site in sites if site not in again and site in facts.saved]
