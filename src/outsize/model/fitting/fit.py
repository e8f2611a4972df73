"""`outsize.fit`: the user's model, loss, optimizer, one batch and a budget in; a step that stays inside it out.

Nothing is changed until a plan is found and its gradients are shown to be the plain ones: mistakes in what was given
are named first, then a few samples are looked at, then choices are projected, then the chosen one is compared with
the plain step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError, InputError, OutsizeError
from outsize.core.events import told
from outsize.core.fitting import FitPlan
from outsize.core.memory import HOST, Allowance, Pool
from outsize.core.units import parse_bytes
from outsize.machine import current_budget
from outsize.machine.budget import current_wishes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import check_optimizer, check_words
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.hosted_fit import fit_hosted
from outsize.model.fitting.inference import fit_inference
from outsize.model.fitting.learn.findings import Findings, leave_out, look, preserved
from outsize.model.fitting.learn.gradients_equal import FAR_BELOW, TINY, compare, find_rounding
from outsize.model.fitting.learn.normaliser import Normaliser
from outsize.model.fitting.move.evicted import ReadWhileEvicted, is_home, require_home
from outsize.model.fitting.move.stores import open_store
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.describe import tell
from outsize.model.fitting.plan.dry_run import Stage, open_stage
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.foreign_tensors import held_on
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import describe, remedies_on
from outsize.model.fitting.plan.search import Candidate, Search
from outsize.model.fitting.plan.speeds import Timing, estimate_times, measure_times, try_out
from outsize.model.fitting.plan.take_apart import gather_facts, inclusive
from outsize.model.fitting.run.expandable_segments import let_grow
from outsize.model.fitting.run.out_of_memory import clear_up, is_out_of_memory
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.user_errors import in_users_code, say
from outsize.model.torch_port.patches import without_autocast

TRIED = 3
"""Most plans of different kinds that are run on a card, so that the fastest is known and not guessed."""

CLOSE = 1.1
"""A plan that is predicted to take up to this many times what the fastest one took is worth a run: predictions err."""

CUTS = 3
"""Other cuts of a batch that are run."""

FEW = 4
"""Most slices of a batch that is cut otherwise: of many, none is much larger than the others."""

ROUNDING = 0.5
"""Largest relative difference under autocast that may be rounding: small slices have other kernels than large ones."""

ROUNDED = (
    "under autocast gradients of small slices differ from the whole batch's by up to {:.0e}, without it they do not: products "
    "add up in few bits; torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False makes both more exact"
)

EQUAL = {False: 1e-4, True: 5e-2}
"""Largest relative difference of a gradient that counts as equal, without and with autocast."""


def fit(
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    batch: Any,
    *,
    budget: int | str | None = None,
    device: Any = None,
    host: int | str | None = None,
    weights: Any = None,
    allow: str = "exact",
    own_step: bool = False,
    clip: float | None = None,
    scaler: Any = None,
    without: tuple[str, ...] = (),
    dry_run: bool = False,
) -> Any:
    """Make a training step run inside `budget` bytes of the memory of the model's device.

    `loss(model, batch)` gives a scalar, or (total, count) whose quotient is the loss. `allow` is `"exact"` (the
    same gradient up to rounding), `"distribution"` (other dropout masks) or `"approximate"` (lower precision too).
    Without an optimizer (and without `own_step`) an inference is planned: `loss(model, batch)` then is how the model is
    called and gives its output, None calls it with the batch.
    `own_step`: you call `backward` and step the optimizer yourself. `clip` is the norm to which `step` clips gradients,
    `scaler` your GradScaler. `without` names remedies not to use: slices, checkpoint, offload, in_backward, state_away,
    gradients_away, stream, chunks, autocast. `dry_run` only plans.

    `device`: the model stays in host memory and visits that device unit by unit; `budget` is then the device's and `host`
    the host's; what that does not hold goes to a file in the scratch folder. `weights`: the model is on the meta device, and
    its weights are read from this file for inference.
    """
    check_words(model, loss, optimizer, allow, without, own_step, clip, scaler)
    if device is not None or weights is not None or host is not None:
        return fit_hosted(
            model, loss, optimizer, batch, device=device, budget=budget, host=host, weights=weights, allow=allow,
            own_step=own_step, clip=clip, scaler=scaler, without=without, dry_run=dry_run,
        )  # fmt: skip
    answers = optimizer is None and not own_step
    work = check_given(model, None if answers else loss, optimizer, batch, clip, scaler)
    allowance = _allowance(budget, model)
    if answers:
        return fit_inference(work, loss, batch, allowance, without, current_budget().scratch, dry_run)
    with told("looking at the step", "parts"):
        planning = _prepare(work, batch, own_step, allowance, allow, without)
    work, rows = planning.work, planning.findings.rows
    few = batches.transform(batches.take(batch, 0, planning.findings.few), lambda _, tensor: tensor.clone())
    if work.splits and work.normaliser.rule == "labels":
        few = leave_out(work.normaliser, few)  # terms that do not weigh by labels show

    def plan_for(limit: int, samples: Any = None) -> tuple[FitPlan, Choice]:
        return planning.run(replace(allowance, bytes=limit), few, samples)

    plan, choice = plan_for(allowance.bytes, batch)
    runner = None if dry_run else open_resident(work, choice, planning.open_store(), rows=rows)
    if work.device == "cuda":
        clear_up()  # what planning left in the allocator's cache is not the step's
    return Fitted(plan, choice, runner, plan_for, rows)


def _prepare(
    work: Work, batch: Any, own_step: bool, allowance: Allowance, allow: str, without: tuple[str, ...]
) -> Planning:
    """What is known of the work before a plan is made: from a few samples, and from one trace of the plain step."""
    findings = look(work, batch)
    work = replace(
        work,
        written=findings.written,
        normaliser=findings.normaliser or Normaliser(),
        splits=findings.normaliser is not None,
        heads=findings.heads,
        sources=findings.sources,
    )
    stage = open_stage(work, batch)
    facts = _take_apart(work, stage, findings, batch, own_step, allowance.bytes)
    facts = replace(facts, forbidden=facts.forbidden | _said(findings, facts, allow, without))
    return Planning(work, facts, stage.project, allow, findings, current_budget().scratch)


def _take_apart(work: Work, stage: Stage, findings: Findings, batch: Any, own_step: bool, budget: int) -> Facts:
    """Facts of the plain step, with times measured where a card is."""
    with in_users_code("the step, followed without contents (values that it reads are chosen),"):
        plain = stage.project(Choice())
    pieces = stage.project(Choice(chunks=8)) if findings.heads else None
    timing: Timing | None = None
    if work.device == "cuda":
        with preserved(work.model, work.sources):
            timing = measure_times(work, batch, plain, budget)
        clear_up()
    timing = timing or estimate_times(work.device, plain, findings.rows, inclusive)
    return gather_facts(work, findings, plain, own_step, timing, pieces)


def check_given(model: Any, loss: Any, optimizer: Any, batch: Any, clip: float | None, scaler: Any) -> Work:
    """The user's mistakes in what belongs together, named before anything is touched."""
    parameters = list(model.parameters())
    if not parameters:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to fit")
    require_home(model, optimizer)
    if optimizer is not None and not any(parameter.requires_grad for parameter in parameters):
        raise InputError("no parameter of the model requires a gradient: there is nothing to train")
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise InputError(
            f"the model's parameters are on {', '.join(map(str, devices))}: fit works on one CPU or CUDA device"
        )
    if optimizer is not None:
        check_optimizer(model, optimizer)
    batches.count_rows(batch)
    device = next(iter(devices))
    for path, tensor in batches.tensors_of(batch).items():
        if tensor.device != device:
            raise InputError(
                f"{path} is on {tensor.device} and the model on {device}: move the batch to the model's device"
            )
    return Work(model=model, loss=loss, optimizer=optimizer, clip=clip, scaler=scaler, device=device.type)


def _allowance(budget: int | str | None, model: Any) -> Allowance:
    device = next(model.parameters()).device
    pool = HOST if device.type == "cpu" else Pool(kind="device", index=device.index or 0)
    if budget is not None:
        return Allowance(pool=pool, bytes=parse_bytes(budget), reason="set by you")
    found = next((a for a in current_budget(devices=device.type == "cuda").allowances if a.pool == pool), None)
    if found is None:
        raise InputError(f"nothing is known about the memory of {device}: give a budget, such as budget='16GiB'")
    held = held_on(device) if current_wishes().device is None else 0
    return replace(found, bytes=found.bytes + held, reason=f"{found.reason}, and what is held") if held else found


def _said(findings: Findings, facts: Facts, allow: str, without: tuple[str, ...]) -> dict[str, str]:
    """What the user and the samples forbid beside what the work itself does."""
    said = dict.fromkeys(without, "you said so")
    if findings.random and allow == "exact" and "slices" not in facts.forbidden:
        names = ", ".join(findings.random[:2]) + (", ..." if len(findings.random) > 2 else "")
        said["slices"] = (
            f"random numbers are drawn ({names}): slices would draw others; allow='distribution' permits it"
        )
    return said


class Planning:
    """Plans for one work, under this budget and, after a failure, a smaller one."""

    def __init__(
        self,
        work: Work,
        facts: Facts,
        project: Callable[[Choice], Projection],
        allow: str,
        findings: Findings,
        scratch: str,
    ) -> None:
        self.work, self.facts, self.project, self.allow = work, facts, project, allow
        self.findings, self.scratch = findings, scratch
        self.rounding = 0.0
        """Largest difference that was autocast's rounding."""

    def open_store(self) -> Any:
        """The place next to the model's device."""
        return open_store(next(self.work.model.parameters()).device, self.scratch)

    def run(self, allowance: Allowance, few: Any, batch: Any) -> tuple[FitPlan, Choice]:
        """The cheapest choice that fits and whose gradients are right; a remedy that changes them is forbidden by name.

        `few`: samples to compare gradients on. `batch`: to run plans of nearly the same price on, None: not to.
        """
        while True:
            limited = self.work.device == "cuda" and is_limited(allowance.bytes)
            search = Search(self.facts, self.project, self.allow, allowance.bytes, limited)
            decided: list[str] = []
            try:
                with told("tracing plans", "plans") as search.traced:
                    found = search.run()
                if self.work.device == "cuda" and batch is not None:
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
                decided += [ROUNDED.format(self.rounding)] if self.rounding else []
                return tell(search, found, self.facts, allowance, self.findings, decided), found.choice

    def _is_right(self, choice: Choice, few: Any) -> bool:
        """True where the gradients are the plain ones; a remedy that changes them is forbidden from now on."""
        with told("comparing gradients", "plans"):
            wrong = "" if choice.plain else self._differs(choice, few)
        if wrong:
            self.facts.forbidden[self._blame(choice, few)] = wrong
        return not wrong

    def _fastest(self, search: Search, first: Candidate, batch: Any) -> tuple[Candidate, list[str]]:
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
                ran += self._cut_otherwise(search, ran, store, batch)
        if not ran:
            return first, []
        said = ", ".join(f"{describe(c.choice)}: {1e3 * took:.1f} ms" for c, took in ran)
        return min(ran, key=lambda pair: pair[1])[0], [f"run to compare, forward and backward: {said}"]

    def _cut_otherwise(
        self, search: Search, ran: list[tuple[Candidate, float]], store: Any, batch: Any
    ) -> list[tuple[Candidate, float]]:
        """The fastest of those in few slices with its batch cut in unequal ones, where that is faster than all and fits."""
        fastest = min(took for _, took in ran)
        sliced = [(c, took) for c, took in ran if 1 < c.choice.slices <= FEW and took < CLOSE * fastest]
        if not sliced:
            return []
        candidate, _ = min(sliced, key=lambda pair: pair[1])
        timed = [
            (c, s) for c in search.other_cuts(candidate, CUTS) if (s := self._try_out(c, store, batch)) is not None
        ]
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
        store = self.open_store()
        worst, name = 0.0, ""
        try:
            worst, name = compare(self.work, choice, few, store)
            if EQUAL[choice.autocast or self.findings.lower] < worst <= TINY / FAR_BELOW:
                worst, name = compare(self.work, choice, few, store, find_rounding(self.work, few, store))
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
            rows = batches.count_rows(few)
            return self._differs(choice, batches.take(few, 0, rows - 1)) if rows > 1 else ""
        if worst <= EQUAL[choice.autocast or self.findings.lower]:
            return ""
        return f"the gradient of {name} differs from the plain one by {worst:.1e} of its size"

    def _blame(self, choice: Choice, few: Any) -> str:
        """The remedy that alone makes the gradients differ, or the last one."""
        on = [kind.key for kind in remedies_on(choice)]
        for key in on:
            if self._differs(replace(Choice(), **{key: getattr(choice, key)}), few):
                return key
        return on[-1]


def is_limited(budget: int) -> bool:
    """True where torch's allocator stops at the budget or before it."""
    import torch

    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if ask is None:
        return False
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return bool(ask() * total <= budget * 1.001)
