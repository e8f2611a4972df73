"""What every remedy says of itself.

In: facts of a step and a choice. Out: `RemedyKind`, the base of the classes in `remedies` and `hosted_remedies`: for which steps
it is, levels, seconds, bytes, exactness, why not, and words for the user. (`core.failure.Remedy` is what a plan reports of one.)
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from outsize.core.failure import Exactness
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.plan.facts import Facts, HostedFacts, InferenceFacts, Sizes
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.optimizer_subset import why_not_one_by_one

Level = dict[str, Any]
"""Fields of a `Choice` and their values: how far a remedy is used."""

F = TypeVar("F", Facts, HostedFacts, InferenceFacts)


class RemedyKind(Generic[F]):
    """One remedy. The first methods are for every step, others for a model on the host, or for training on its device."""

    key: ClassVar[str]
    """Field of `Choice`, and the name under which facts forbid it."""
    name: ClassVar[str]
    """As a user reads it."""
    hosted: ClassVar[bool] = False
    """It is for a model that lives on the host; otherwise for one on its device."""
    compiled: ClassVar[bool] = False
    """On the device: also for a compiled model, whose modules cannot be changed one by one."""
    inference: ClassVar[bool] = False
    """On the device: also for an inference."""
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    costs: ClassVar[str] = "copies"
    """What it costs, in a word, where its seconds are not known."""
    done: ClassVar[str] = ""
    """What is done, for the user, where that is the same for every choice."""
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors with which a dry run shows that a model on the host cannot use it."""
    missed: ClassVar[str] = ""
    """What an error says, before the reason, where it is forbidden and nothing fits without it; empty: nothing."""
    only_saves: ClassVar[bool] = False
    """More of it never holds more, so that the smallest choice uses all of it."""
    of_tensors: ClassVar[bool] = False
    """It treats saved tensors one by one."""
    graded: ClassVar[bool] = False
    """Choices that use more or less of it are of one kind: the search finds the degree by itself."""
    shown_without: ClassVar[bool] = False
    """The trace of a step without it tells what the step holds with it (`shown_by`), so it has no trace of its own."""

    def levels(self, facts: F) -> list[Level]:
        """Changes to a choice, from off to full. Combinations of equal seconds are tried in the order of their levels."""
        return [{self.key: False}, {self.key: True}]

    def on(self, choice: Choice) -> bool:
        """True where a choice uses it."""
        return bool(getattr(choice, self.key))

    def is_sensible(self, choice: Choice, facts: F) -> bool:
        """False where a choice that uses it contradicts itself or pays for nothing.

        It is also asked of choices in which the remedies after it in the list are off yet: those can make a choice senseless,
        never sensible.
        """
        return True

    def seconds(self, choice: Choice, facts: F) -> float:
        """Time that it adds to a step; 0 where nobody knows."""
        return 0.0

    def saves(self, choice: Choice, facts: F, projection: Projection) -> int:
        """Bytes that the device (of what is on disk: the host) need not hold."""
        return 0

    def how(self, choice: Choice, facts: F) -> str:
        """What is done, for the user."""
        return self.done

    # a model on the host: what traces teach

    def is_ruled_out(self, choice: Choice, projection: Projection, facts: F) -> bool:
        """True where the trace of a choice shows that it cannot be used."""
        return False

    def stays(self, facts: F) -> tuple[str, ...]:
        """Modules that are on the device all the time where it is used."""
        return ()

    # training on the model's device

    def extent(self, choice: Choice) -> int:
        """How much it does to a step; a choice that does at least as much of everything as another is hardly faster."""
        return int(self.on(choice))

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        """Why it cannot be used for this work, empty where it can."""
        return ""

    def bytes(self, sizes: Sizes, choice: Choice, facts: F) -> Sizes:
        """The sizes of a step with it, from those without."""
        return sizes

    def gentler(self, choice: Choice, facts: F) -> list[Choice]:
        """Choices that use it less and less far down to nothing, the one given last; empty where there is no such order."""
        return []

    def with_room(self, choice: Choice, facts: F, room: int) -> Choice | None:
        """The choice that uses it as little as so many bytes of room allow; None where that is no other."""
        return None

    def variants(self, choice: Choice, facts: F, peak: int, budget: int) -> list[Choice]:
        """Choices that use it as far, but otherwise, and may be faster: only a run can tell; `peak`: of the one given."""
        return []

    def shown_by(self, projection: Projection, facts: F) -> Projection | None:
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


class UpdatedInGroups(RemedyKind[Facts]):
    """Needs an update of a few parameters at a time."""

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        return why_not_in_groups(work, own_step)


def why_not_in_groups(work: Work, own_step: bool) -> str:
    """Why parameters cannot be updated a few at a time, empty where they can."""
    if work.optimizer is None:
        return ""
    reason = "you step the optimizer yourself" if own_step else why_not_one_by_one(work.optimizer)
    return reason or ("a GradScaler looks at all gradients before the update" if work.scaler is not None else "")


def shorten(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
