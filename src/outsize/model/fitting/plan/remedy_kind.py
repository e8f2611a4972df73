"""What every remedy says of itself.

In: facts of a plain step and a choice. Out: `RemedyKind`, the base of the classes in `remedies`: levels, seconds, bytes,
exactness, why not, and words for the user. (`core.failure.Remedy` is what a plan reports of one.)
"""

from __future__ import annotations

from typing import Any, ClassVar

from outsize.core.failure import Exactness
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.sizes import Sizes
from outsize.model.fitting.run.runner import Work

Level = dict[str, Any]
"""Fields of a `Choice` and their values: how far a remedy is used."""


class RemedyKind:
    """One remedy."""

    key: ClassVar[str]
    """Field of `Choice`, and the name under which facts forbid it."""
    name: ClassVar[str]
    """As a user reads it."""
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    missed: ClassVar[str] = ""
    """What an error says, before the reason, where it is forbidden and nothing fits without it; empty: nothing."""
    only_saves: ClassVar[bool] = False
    """More of it never holds more, so that the smallest choice uses all of it."""
    graded: ClassVar[bool] = False
    """Choices that use more or less of it are of one kind: the search finds the degree by itself."""
    shown_without: ClassVar[bool] = False
    """The trace of a step without it tells what the step holds with it (`shown_by`), so it has no trace of its own."""

    def levels(self, facts: Facts) -> list[Level]:
        """Changes to a choice, from off to full."""
        return [{self.key: False}, {self.key: True}]

    def on(self, choice: Choice) -> bool:
        """True where a choice uses it."""
        return bool(getattr(choice, self.key))

    def extent(self, choice: Choice) -> int:
        """How much it does to a step; a choice that does at least as much of everything as another is hardly faster."""
        return int(self.on(choice))

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        """Why it cannot be used for this work, empty where it can."""
        return ""

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """False where a choice that uses it contradicts itself or pays for nothing."""
        return True

    def seconds(self, choice: Choice, facts: Facts) -> float:
        """Time that it adds to a step."""
        raise AssertionError(self.key)

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """The sizes of a step with it, from those without."""
        return sizes

    def gentler(self, choice: Choice, facts: Facts) -> list[Choice]:
        """Choices that use it less and less far down to nothing, the one given last; empty where there is no such order."""
        return []

    def with_room(self, choice: Choice, facts: Facts, room: int) -> Choice | None:
        """The choice that uses it as little as so many bytes of room allow; None where that is no other."""
        return None

    def variants(self, choice: Choice, facts: Facts, peak: int, budget: int) -> list[Choice]:
        """Choices that use it as far, but otherwise, and may be faster: only a run can tell; `peak`: of the one given."""
        return []

    def shown_by(self, projection: Projection, facts: Facts) -> Projection | None:
        """The step with it, from the trace of the step without; None where it holds no less, or cannot be used."""
        return None

    def needed(self, peak: int) -> int | None:
        """The budget of a card for a traced peak, None where it needs no other than the rest."""
        return None

    def exactness_of(self, random: bool) -> Exactness:
        """How exact a step stays; `random`: it draws random numbers."""
        return self.exactness

    def degree(self, choice: Choice) -> str:
        """How far a choice uses it, in a word; empty where it is on or off."""
        value = getattr(choice, self.key)
        if isinstance(value, tuple):
            return str(len(value))
        return "" if value == 1 else f"{value:.0%}" if isinstance(value, float) else str(value)

    def how(self, choice: Choice, facts: Facts) -> str:
        """What is done, for the user."""
        raise AssertionError(self.key)
