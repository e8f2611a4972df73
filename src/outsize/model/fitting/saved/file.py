"""A saved plan: what `FitPlan.save` wrote, read with every size and every name checked.

In: a file, or a plan of this process. Out: a `SavedPlan`, or one error that says why it is none. Nothing in a file is run: it is
JSON, its length is bounded, and a choice is made of known fields alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outsize.core.answers import parse_answer
from outsize.core.errors import InputError, OutsizeError, StoreError
from outsize.core.fitting import FitPlan, digest_of
from outsize.core.memory import Allowance
from outsize.core.units import format_bytes
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.out_of_memory import is_out_of_memory
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import ALLOWED, find_forbidden, remedies_on
from outsize.model.fitting.run.expandable_segments import can_grow
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.saved import decisions, learned
from outsize.model.fitting.saved.basis import Basis, find_difference
from outsize.model.fitting.user_errors import say

VERSION = 1
"""Of the data behind a plan."""

LARGEST = 64 * 2**20
"""Characters of the longest file that is read."""

ANEW = "make it anew: fit without plan=, then fitted.plan.save(path)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan from another process, before it is compared with the work that it is to be for."""

    name: str
    """Where it comes from, for errors."""
    plan: FitPlan
    basis: Basis
    """What it was made for."""
    choice: Mapping[str, Any]
    """What it decided."""
    work: Mapping[str, Any]
    """What was learned of the step."""
    peaks: Mapping[str, int]
    """What the trace of its choice held, by phase."""
    beside: int
    """Bytes of them that other tensors of the process took."""
    more: Mapping[str, Any]
    """What only a planner of its kind knows."""

    @property
    def compiled(self) -> bool:
        """The model was compiled because the plan was asked for so."""
        return self.more.get("compiled") is True

    def budget(self, number: int) -> int | None:
        """Bytes of its first budget, or of its second."""
        budgets = self.plan.budgets
        return budgets[number].bytes if number < len(budgets) else None

    def check_basis(self, basis: Basis) -> None:
        """An `InputError` where the plan was made for something else."""
        difference = find_difference(self.basis, basis)
        if difference:
            raise InputError(f"{self.name} was made for something else ({difference}): {ANEW}")

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """What fails in the block, fails because of this plan."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OutsizeError) or is_out_of_memory(error):
                raise
            raise self.refuse(f"a trace of its choice fails with {say(error)}") from error

    def refuse(self, why: str) -> StoreError:
        return StoreError(f"{self.name} cannot be used: {why}; {ANEW}", path=self.name)

    def read_work(self, request: Request) -> Work:
        """The work of a request with what was learned of it."""
        try:
            return learned.from_data(self.work, request.work, request.batch)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise self.refuse(f"what it says of the step is damaged ({error})") from None

    def read_choice(self, request: Request, work: Work, rows: int) -> Choice:
        """The choice, where all that it uses is known and allowed here."""
        try:
            choice = decisions.from_data(self.choice, decisions.Known.of(work.model, rows))
        except decisions.Unfit as error:
            raise self.refuse(str(error)) from None
        if choice.hosted != (request.host is not None):
            raise self.refuse("its weights live elsewhere than its model does")
        forbidden = dict.fromkeys(request.without, "you forbade it")
        if request.call is None and not choice.hosted:
            forbidden |= find_forbidden(work, learned.as_findings(work, rows), request.own_step)
        for kind in remedies_on(choice):
            why = forbidden.get(kind.key) if kind.key != "stream" or not choice.hosted else None
            if why is None and kind.exactness not in ALLOWED[request.allow]:
                why = f"allow={request.allow!r} does not permit it"
            if why is not None:
                raise self.refuse(f"it uses {kind.name}, and {why}")
        if choice.expandable and not can_grow():
            raise self.refuse("segments of this allocator cannot grow")
        return choice

    def require_fit(self, projection: Projection) -> FitPlan:
        """The plan, where a trace of its choice shows what it says; other tensors of the process may take more than then."""
        if set(self.peaks) != set(projection.peaks):
            raise self.refuse(
                f"its phases are {', '.join(self.peaks):.80} and those of the step {', '.join(projection.peaks)}"
            )
        name = max(projection.peaks, key=lambda one: projection.peaks[one] - self.peaks[one])
        now, then = projection.peaks[name], self.peaks[name]
        if now > then:
            others = (
                f", of which other tensors of the process take {format_bytes(projection.beside)} and took "
                f"{format_bytes(self.beside)}" if projection.beside > self.beside else ""
            )  # fmt: skip
            raise InputError(
                f"{self.name} says {format_bytes(then)} for the {name} phase, and a trace of the step as it is now says "
                f"{format_bytes(now)}{others}: {ANEW}"
            )
        said = {step.name: step.peak(self.plan.pool) for step in self.plan.steps}
        if any(said.get(phase, 0) < size for phase, size in self.peaks.items()):
            raise self.refuse("its phases say less than the trace that it was made from")
        note = f"taken from {self.name}: one trace of it was compared, its gradients were when it was made"
        return self.plan.with_note(note)


def describe_origin(
    basis: Basis, choice: Choice, work: Work, peaks: Mapping[str, int], beside: int, **more: Any
) -> dict[str, Any]:
    """What lies behind a plan, as plain data; `more`: what only a planner of its kind knows."""
    return {
        "version": VERSION, "basis": basis, "choice": decisions.to_data(choice), "work": learned.to_data(work),
        "peaks": dict(peaks), "beside": beside, "more": more,
    }  # fmt: skip


def read_saved(plan: Any) -> SavedPlan:
    """The plan behind a path, or behind a `FitPlan` of this process."""
    if isinstance(plan, FitPlan):
        return _take_apart(plan, "the plan")
    if not isinstance(plan, str | os.PathLike):
        raise InputError(
            f"plan={plan!r:.60} is no plan: give fitted.plan, or the path of one that fitted.plan.save wrote"
        )
    name = os.fspath(plan)
    if not isinstance(name, str):
        raise InputError(f"plan={plan!r:.60} is no text: give the path of a plan as text")
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            text = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > LARGEST:
        raise StoreError(f"{name} has more than {LARGEST:,} characters: no plan is that long", path=name)
    noun = parse_answer(text, name)
    if not isinstance(noun, FitPlan):
        raise StoreError(f"{name} is a {type(noun).__name__} and no plan of outsize.fit", path=name)
    data = json.loads(text)
    if noun.origin is None or "digest" not in data:
        raise StoreError(f"{name} is a plan to be read, and not one that fitted.plan.save wrote", path=name)
    if data.pop("digest") != digest_of(data):
        raise StoreError(f"{name} is damaged: it is not what was written; {ANEW}", path=name)
    return _take_apart(noun, name)


def _take_apart(plan: FitPlan, name: str) -> SavedPlan:
    origin = plan.origin
    if origin is None:
        raise InputError(f"{name} cannot be taken again: only plans of torch steps on one device can; {ANEW}")
    if origin.get("version") != VERSION:
        raise StoreError(
            f"{name} has version {origin.get('version')!r:.20} and this Outsize reads {VERSION}; {ANEW}", path=name
        )
    try:
        basis = {str(section): {str(k): str(v) for k, v in lines.items()} for section, lines in origin["basis"].items()}
        peaks = {str(phase): int(size) for phase, size in origin["peaks"].items()}
        tables = [origin[part] for part in ("choice", "work", "more")]
        budgets_are = all(isinstance(one, Allowance) and 0 < one.bytes < decisions.LARGEST for one in plan.budgets)
        if not (all(isinstance(one, dict) for one in tables) and plan.budgets and budgets_are and peaks):
            raise ValueError("a part of it is missing")
        if not all(0 <= size < decisions.LARGEST for size in peaks.values()) or not plan.fits:
            raise ValueError("its peaks are none")
        return SavedPlan(
            name=name, plan=plan, basis=basis, choice=tables[0], work=tables[1], peaks=peaks, beside=int(origin["beside"]),
            more=tables[2],
        )  # fmt: skip
    except OutsizeError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise StoreError(f"{name} is damaged: {error}; {ANEW}", path=name) from None
