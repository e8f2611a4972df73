"""The plan of a fitted step: which remedies it uses, what the step then holds, and which other plans were close."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outsize.core.errors import InputError
from outsize.core.failure import Remedy
from outsize.core.noun import Noun, write_text
from outsize.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour(Noun):
    """A plan that was close to the chosen one."""

    name: str
    """Its remedies, in a few words."""
    peak: int
    """Projected peak on the device in bytes."""
    slow_down: float
    """Predicted time over that of the plain step."""
    traced: bool
    """True if the peak was traced, False if the planner only computed it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitPlan(Plan):
    """How a step runs inside its budget. `steps` are the phases of one training step."""

    remedies: tuple[Remedy, ...]
    """The remedies that are used; empty if the plain step fits."""
    slow_down: float
    """Predicted time over that of the plain step: an estimate."""
    plain: int
    """Projected peak of the plain step in bytes."""
    away: int
    """The most bytes that are moved away from the device at one time."""
    place: str
    """Where they are moved to: `host` or `disk`."""
    cheaper: Neighbour | None = None
    """The next faster plan, which does not fit or was not needed."""
    smaller: Neighbour | None = None
    moved: int = 0
    """Bytes that go over the link in a step, both ways; 0 where the model is on the device."""
    seconds: float | None = None
    """Predicted seconds of a step, None where only the ratio to the plain step is known."""
    tokens: int = 0
    notes: tuple[str, ...] = ()
    """What was found in the model and the loss, and which remedies this rules out."""
    origin: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    """What the plan was made for and what it decided, as plain data, by which another process takes it. None: no process can."""

    def with_note(self, note: str) -> FitPlan:
        """The same with one more note, where it is not there yet."""
        return self if note in self.notes else replace(self, notes=(*self.notes, note))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all: `outsize.fit(..., plan=path)` takes it without a search, and
        `outsize report` shows it."""
        if self.origin is None:
            raise InputError(f"{self.name}: only plans of torch steps on one device are saved; make this one anew")
        data = self.to_dict() | {"origin": dict(self.origin)}
        write_text(path, json.dumps(data | {"digest": digest_of(data)}))


def digest_of(data: Any) -> str:
    """By which a file that was changed on its way is told from the one that was written."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
