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

    def levels(self, facts: Facts) -> list[Level]:
        """Changes to a choice, from off to full."""
        return [{self.key: False}, {self.key: True}]

    def on(self, choice: Choice) -> bool:
        """True where a choice uses it."""
        return bool(getattr(choice, self.key))

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
