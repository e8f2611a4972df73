"""Plans a training step of a model on its device.

In: a `Request`. Out: plans. A few samples are looked at, the plain step is traced and taken apart, choices are projected, the
cheapest that fits is run on a card beside others of nearly the same price, and its gradients are compared with the plain ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outsize.core.errors import BudgetError, OutsizeError
from outsize.core.events import told
from outsize.core.fitting import FitPlan
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import (
    NOISY,
    Findings,
    find_sources,
    leave_out,
    look,
    preserved,
    why_not_cut,
)
from outsize.model.fitting.learn.gradients_equal import EQUAL, FAR_BELOW, TINY, compare, find_noise, find_rounding
from outsize.model.fitting.move.evicted import ReadWhileEvicted, is_home
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory, where_room
from outsize.model.fitting.plan.describe import describe_training
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import describe, remedies_on
from outsize.model.fitting.plan.search import Candidate
from outsize.model.fitting.plan.speeds import Timing, estimate_times, measure_times, try_out
from outsize.model.fitting.plan.take_apart import gather_facts
from outsize.model.fitting.plan.training_search import TrainingSearch, as_traced
from outsize.model.fitting.planner import Planner
from outsize.model.fitting.run.expandable_segments import let_grow
from outsize.model.fitting.run.loss import Normaliser
from outsize.model.fitting.run.replayed_draws import Replay
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.saved.file import SavedPlan, describe_origin
from outsize.model.fitting.user_errors import in_users_code, say
from outsize.model.torch_port.compiler import uncompiled
from outsize.model.torch_port.patches import without_autocast

TRIED = 3
"""Most plans of different kinds that are run on a card, so that the fastest is known and not guessed."""

CLOSE = 1.1
"""A plan that is predicted to take up to this many times what the fastest one took is worth a run: predictions err."""

ROUNDING = 0.5
"""Largest relative difference under autocast that may be rounding: small slices have other kernels than large ones."""

ROUNDED = (
    "under autocast the gradients of small slices differ from those of the whole batch by up to {:.0e}, without autocast they do "
    "not: this is the rounding of sums in bfloat16; "
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False makes both more exact"
)


class TrainingPlanner(Planner):
    """Plans for one request: what is known from a few samples and from one trace of the plain step, then searches."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.project: Callable[[Choice], Projection]
        self.facts: Facts
        self.findings: Findings
        self.rounding = 0.0
        """Largest difference that was autocast's rounding."""
        self._readings = list(request.readings)
        """Readings of the batch that are still to be tried."""
        self._looked = False
        """A few samples have been looked at, and the plain step was taken apart."""

    def take(self, saved: SavedPlan) -> tuple[FitPlan, Choice]:
        request, work = self.request, saved.read_work(self.request)
        if saved.work.get("own_sources"):
            work = replace(work, sources=find_sources(work, request.batch))
        self.work = work
        self.request = request = replace(
            request, rows=work.axes.count(request.batch), work=replace(request.work, backwards=work.backwards)
        )
        choice = saved.read_choice(request, work, request.rows)
        if choice.slices > 1 and (why := why_not_cut(work, request.batch)):
            raise saved.refuse(why)
        stage = self._stage(work)
        stage.take_over(saved.more.get("reads") is True)
        with saved.followed():
            projection = stage.project(as_traced(choice))
        return saved.require_fit(projection.growing() if choice.expandable else projection), choice

    def look_once(self) -> None:
        """Look at the step, unless that was done."""
        if not self._looked:
            with told("looking at the step", "parts"):
                self._learn()
            self._looked = True

    def _learn(self, again: bool = False) -> bool:
        """Look at the step by the next readings of the batch, up to the first that can be cut; where none can, the first counts,
        or, `again`, what is known already. Out: True where one can."""
        request = self.request
        looked: list[tuple[Work, Findings]] = []
        while self._readings:
            work = replace(request.work, axes=self._readings.pop(0))
            looked.append((work, self._look(work)))
            if not looked[-1][1].misread:
                break
        cut = [pair for pair in looked if pair[1].normaliser is not None]
        if again and not cut:
            return False
        work, findings = (cut or looked)[0]
        self.findings = findings
        self.work = work = replace(
            work,
            written=findings.written,
            normaliser=findings.normaliser or Normaliser(),
            splits=findings.normaliser is not None,
            heads=findings.heads,
            sources=findings.sources,
            replay=Replay(findings.draws)
            if findings.draws and request.allow == "exact" and not work.compiled
            else None,
        )
        self.request = replace(request, rows=findings.rows)
        self._traces = stage = self._stage(work)
        self.project = stage.project
        before = {key: why for key, why in self.facts.forbidden.items() if key != "slices"} if again else {}
        facts = self._take_apart(stage)
        self.facts = replace(facts, forbidden=before | facts.forbidden | self._forbid(facts))
        few = batches.transform(work.axes.take(request.batch, 0, findings.few), lambda _, tensor: tensor.clone())
        if work.splits and work.normaliser.rule == "labels":
            few = leave_out(work.normaliser, few, work.axes)  # terms that do not weigh by labels show
        self._few = few
        """Samples to compare gradients on."""
        return True

    def _look(self, work: Work) -> Findings:
        if not work.compiled:
            return look(work, self.request.batch)
        with uncompiled():  # a head inside a graph has no loss in pieces
            return replace(look(work, self.request.batch), heads=())

    def _stage(self, work: Work) -> Stage:
        """Where choices are tried without contents."""
        return Stage(work, self.request.batch)

    def _take_apart(self, stage: Stage) -> Facts:
        """Facts of the plain step, with times measured where a card is."""
        work, findings, request = self.work, self.findings, self.request
        with in_users_code("the step, followed without contents (values that it reads are chosen),"):
            plain = _surveyed(stage)
        chunked = stage.project(Choice(chunks=8)) if findings.heads else None
        timing: Timing | None = None
        if work.device == "cuda" and not work.compiled:  # every size would be compiled
            with preserved(work.model, work.sources):
                timing = measure_times(work, request.batch, plain, request.budgets[0].bytes)
            clear_up()
        timing = timing or estimate_times(work.device, plain, findings.rows)
        return gather_facts(work, findings, plain, request.own_step, timing, chunked, stage.surveyed)

    def _forbid(self, facts: Facts) -> dict[str, str]:
        """What the user and the samples forbid beside what the work itself does."""
        forbidden, random = dict.fromkeys(self.request.without, "you forbade it"), self.findings.random
        exact = self.request.allow == "exact" and self.work.replay is None
        if random and exact and "slices" not in facts.forbidden:
            names = ", ".join(random[:2]) + (", ..." if len(random) > 2 else "")
            forbidden["slices"] = (
                f"random numbers are drawn ({names}): slices would draw others; allow='distribution' permits it"
            )
        return forbidden

    def plan(self, limit: int, batch: Any, without: tuple[str, ...] = ()) -> tuple[FitPlan, Choice]:
        """The cheapest choice that fits and whose gradients are right; a remedy that changes them is forbidden by name, as are
        those `without` which plans are made from now on."""
        self.look_once()
        self._leave_out(without)
        allowance = replace(self.request.budgets[0], bytes=limit)
        while True:
            few = self._few
            limited = self.work.device == "cuda" and is_limited(limit)
            search = TrainingSearch(self.facts, self.project, self.request.allow, limit, limited)
            decided: list[str] = []
            try:
                with told("tracing plans", "plans") as search.traced:
                    found = search.run()
                if self.work.device == "cuda" and batch is not None and not self.work.compiled:
                    found, decided = self._fastest(search, found, batch)
            except BudgetError:
                if self._is_right(search.least, few):  # the budget that it names has a plan
                    raise
                continue
            except OutsizeError:
                raise
            except Exception as error:
                if is_out_of_memory(error) or self._is_right(search.tracing, few):  # not a remedy's fault
                    raise
                continue
            if self._is_right(found.choice, few):
                decided += self._say_packed(found.choice, few)
                decided += [ROUNDED.format(self.rounding)] if self.rounding else []
                plan = describe_training(search, found, allowance, self.findings, decided)
                return replace(plan, origin=self._origin(found)), found.choice

    def _leave_out(self, keys: tuple[str, ...]) -> None:
        """No plan uses these remedies from now on."""
        held = dict.fromkeys(keys, "a step with it held more than projected")
        self.facts = replace(self.facts, forbidden=self.facts.forbidden | held)

    def _origin(self, found: Candidate) -> dict[str, Any]:
        projection = found.projection
        assert projection is not None
        return describe_origin(
            self.basis,
            found.choice,
            self.work,
            projection.peaks,
            projection.beside,
            reads=self._traces.reads,
            compiled=self.request.compiled_here,
        )

    def _is_right(self, choice: Choice, few: Any) -> bool:
        """True where the gradients are the plain ones; a remedy that changes them is forbidden from now on."""
        with told("comparing gradients", "plans"):
            wrong = "" if choice.plain else self._differs(choice, few)
        if wrong:
            key = self._blame(choice, few)
            if key != "slices" or not self._learn(again=True):
                self.facts = replace(self.facts, forbidden=self.facts.forbidden | {key: wrong})
        return not wrong

    def _fastest(self, search: TrainingSearch, first: Candidate, batch: Any) -> tuple[Candidate, list[str]]:
        """Run the cheapest, and others for as long as one is predicted to take little longer than the fastest that ran."""
        ran: list[tuple[Candidate, float]] = []
        found: list[Candidate] = []
        candidate: Candidate | None = first
        with contextlib.closing(self.open_store()) as store, told("running plans", "plans") as done:
            while candidate is not None and not candidate.choice.elsewhere:
                found.append(candidate)
                seconds = self._try_out(candidate.choice, store, batch)
                done()
                if seconds is not None:
                    ran.append((candidate, seconds))
                if len(found) == TRIED:
                    break
                best, took = min(ran, key=lambda pair: pair[1], default=(first, 0.0))
                candidate = search.another(found, CLOSE * max(took, best.seconds + self.facts.passes))
            if ran:
                ran += self._try_variants(search, ran, store, batch)
        if not ran:
            return first, []
        said = ", ".join(f"{describe(c.choice)}: {1e3 * took:.1f} ms" for c, took in ran)
        return min(ran, key=lambda pair: pair[1])[0], [f"run to compare, forward and backward: {said}"]

    def _try_variants(
        self, search: TrainingSearch, ran: list[tuple[Candidate, float]], store: Any, batch: Any
    ) -> list[tuple[Candidate, float]]:
        """The first variant that is faster than all that ran, and fits; those of the fastest plan that has any are run."""
        fastest = min(took for _, took in ran)
        near = sorted((pair for pair in ran if pair[1] < CLOSE * fastest), key=lambda pair: pair[1])
        variants = next(filter(None, (search.variants(candidate) for candidate, _ in near)), [])
        timed = [(c, s) for c in variants if (s := self._try_out(c, store, batch)) is not None]
        for choice, seconds in sorted(timed, key=lambda pair: pair[1]):
            if seconds < fastest and (found := search.trace(choice)) is not None:
                return [(found, seconds)]
        return []

    def _try_out(self, choice: Choice, store: Any, batch: Any) -> float | None:
        """Seconds of the passes, None where memory does not suffice."""
        with preserved(self.work.model, self.work.sources):
            let_grow(self, choice.expandable)
            try:
                return try_out(open_resident(self.work, choice, store), batch)
            finally:
                let_grow(self, False)

    def _differs(self, choice: Choice, few: Any) -> str:
        """Why the fitted gradients are not the plain ones, empty where they are or weights have no room for the plain step."""
        if not is_home(self.work.model):
            return ""
        choice = choice.unpacked  # what is rounded differs: the rest of the plan must not
        store = self.open_store()
        worst, name = 0.0, ""
        try:
            worst, name = compare(self.work, choice, few, store)
            if EQUAL[choice.autocast or self.findings.lower] < worst <= TINY / FAR_BELOW:
                worst, name = compare(self.work, choice, few, store, find_rounding(self.work, few, store))
            if choice.slices > 1 and EQUAL[choice.autocast or self.findings.lower] < worst <= NOISY:
                noise = where_room(lambda: find_noise(self.work, few, store)) or {}
                worst, name = compare(self.work, choice, few, store, noise, NOISY)
            if self.findings.lower and not choice.autocast and EQUAL[True] < worst < ROUNDING:
                with without_autocast():  # is it rounding? then it goes where nothing is rounded to fewer bits
                    exact, name = compare(self.work, choice, few, store)
                if exact <= EQUAL[False]:
                    self.rounding = max(self.rounding, worst)
                    worst = 0.0
        except ReadWhileEvicted as error:
            return str(error)
        except OutsizeError:
            raise
        except Exception as error:  # the plain step has run, whatever this is
            if not is_out_of_memory(error):
                return f"it fails on this model: {say(error)}"
            short = True
        else:
            short = False
        finally:
            store.close()
        if short:  # the plain gradients of so many samples have no room: of fewer they may
            clear_up()
            rows = self.work.axes.count(few)
            return self._differs(choice, self.work.axes.take(few, 0, rows - 1)) if rows > 1 else ""
        if worst <= EQUAL[choice.autocast or self.findings.lower]:
            return ""
        return f"the gradient of {name} differs from the plain one by {worst:.1e} of its size"

    def _say_packed(self, choice: Choice, few: Any) -> list[str]:
        """How far gradients are off where activations are kept in fewer bits, measured on a few samples."""
        if not choice.kept_bits or not is_home(self.work.model):
            return []
        with contextlib.closing(self.open_store()) as store:
            found = where_room(lambda: compare(self.work, replace(choice, frozen_bits=0), few, store))
        if found is None:
            return []
        return [f"activations in 8 bits: the gradient of {found[1]}, the worst, differs by {found[0]:.1e} of its size"]

    def _blame(self, choice: Choice, few: Any) -> str:
        """The remedy that alone makes the gradients differ, or the last one."""
        on = [kind.key for kind in remedies_on(choice)]
        for key in on:
            if self._differs(replace(Choice(), **{key: getattr(choice, key)}), few):
                return key
        return on[-1]


def _surveyed(stage: Stage) -> Projection:
    """The plain step, with a survey of its calls where torch allows hooks on saved tensors: `torch.func` forbids them.

    A survey is a mode for operators, under which nothing is compiled.
    """
    try:
        if not stage.work.compiled:
            return stage.project(Choice(), survey=True)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error) and "saved_tensors_hooks" not in str(error):
            raise
    stage.surveyed = None
    return stage.project(Choice())


def is_limited(budget: int) -> bool:
    """True where torch's allocator stops at the budget or before it."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if ask is None:
        return False
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return bool(ask() * total <= budget * 1.001)
