"""`outsize.fit`: the user's model, loss, optimizer, one batch and a budget in; a step that stays inside it out.

Nothing is changed until a plan is found and its gradients are shown to be the plain ones: mistakes in what was given
are named first, then a few samples are looked at, then choices are projected, then the chosen one is compared with
the plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import InputError, OutsizeError
from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan, Neighbour
from outsize.core.memory import HOST, Allowance, Pool
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import parse_bytes
from outsize.machine import current_budget
from outsize.model.fitting import batch as batches
from outsize.model.fitting.check import Findings, compare, look
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.facts import Facts, gather_facts
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.hosted.verb import fit_hosted
from outsize.model.fitting.normaliser import Normaliser
from outsize.model.fitting.planner import Candidate, Search, describe, predict, remedies_on, slow_down
from outsize.model.fitting.projection import Projection
from outsize.model.fitting.remedies import ALLOWED, REMEDIES, place
from outsize.model.fitting.runner import Runner, Work
from outsize.model.fitting.stage import open_stage
from outsize.model.fitting.stores import open_store
from outsize.model.fitting.update import parameters_of

SHARE = {"cpu": 1.0, "cuda": 0.97}
"""Part of a budget that is planned with; the rest of a card is for workspaces inside its libraries."""

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
    `own_step`: you call `backward` and step the optimizer yourself. `clip` is the norm to which `step` clips
    gradients, `scaler` your GradScaler. `without` names remedies not to use: slices, checkpoint, offload,
    in_backward, state_away, gradients_away, stream, chunks, autocast. `dry_run` only plans.

    `device`: the model stays in host memory and visits that device unit by unit; `budget` is then the device's and `host`
    the host's. `weights`: the model is on the meta device, and its weights are read from this file for inference. A fit
    without loss and optimizer is one for `infer`.
    """
    if device is not None or weights is not None or host is not None or loss is None:
        _check_words(model, loss, allow, (*without, "pieces"))
        return fit_hosted(
            model, loss, optimizer, batch, device=device, budget=budget, host=host, weights=weights, allow=allow,
            own_step=own_step, clip=clip, scaler=scaler, without=without, dry_run=dry_run,
        )  # fmt: skip
    work = _check(model, loss, optimizer, batch, allow, without, clip, scaler)
    allowance = _allowance(budget, model)
    findings = look(work, batch)
    work = replace(
        work,
        written=findings.written,
        normaliser=findings.normaliser or Normaliser(),
        splits=findings.normaliser is not None,
        heads=findings.heads,
    )
    stage = open_stage(work, batch)
    plain = stage.project(Choice())
    facts = gather_facts(work, findings, plain, own_step)
    facts = replace(facts, forbidden=facts.forbidden | _said(findings, facts, allow, without))
    scratch = current_budget().scratch

    def plan_for(limit: int, samples: Any = None) -> tuple[FitPlan, Choice]:
        inside = replace(allowance, bytes=limit)
        return _plan(work, facts, stage.project, inside, allow, samples, scratch, findings)

    plan, choice = plan_for(allowance.bytes, batch)
    runner = None
    if not dry_run:
        runner = Runner(work, choice, open_store(next(model.parameters()).device, scratch), rows=findings.rows)
    return Fitted(plan, choice, runner, plan_for, findings.rows)


def _check(
    model: Any, loss: Any, optimizer: Any, batch: Any, allow: str, without: Any, clip: float | None, scaler: Any
) -> Work:
    """The user's mistakes, named before anything is touched."""
    _check_words(model, loss, allow, without)
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError("no parameter of the model requires a gradient: there is nothing to train")
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise InputError(
            f"the model's parameters are on {', '.join(map(str, devices))}: fit works on one CPU or CUDA device"
        )
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    batches.count_rows(batch)
    device = next(iter(devices))
    for path, tensor in batches.tensors_of(batch).items():
        if tensor.device != device:
            raise InputError(
                f"{path} is on {tensor.device} and the model on {device}: move the batch to the model's device"
            )
    return Work(model=model, loss=loss, optimizer=optimizer, clip=clip, scaler=scaler, device=device.type)


def _check_words(model: Any, loss: Any, allow: str, without: tuple[str, ...]) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"fit needs a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise InputError(f"fit needs a function loss(model, batch), not {type(loss).__name__}")
    if allow not in ALLOWED:
        raise InputError(f"allow={allow!r} is unknown: one of {', '.join(ALLOWED)}")
    keys = [*(means.key for means in REMEDIES), "pieces"]
    unknown = [name for name in without if name not in keys]
    if unknown:
        raise InputError(f"without names {unknown[0]!r}, which is no remedy: one of {', '.join(keys)}")


def _check_optimizer(model: Any, optimizer: Any) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    strange = [p for p in parameters_of(optimizer) if id(p) not in names]
    if strange:
        raise InputError(
            f"the optimizer holds {len(strange)} parameters that the model does not have (the first has shape "
            f"{tuple(strange[0].shape)}): it belongs to another model"
        )


def _allowance(budget: int | str | None, model: Any) -> Allowance:
    device = next(model.parameters()).device
    pool = HOST if device.type == "cpu" else Pool(kind="device", index=device.index or 0)
    if budget is not None:
        return Allowance(pool=pool, bytes=parse_bytes(budget), reason="set by you")
    found = next((a for a in current_budget(devices=device.type == "cuda").allowances if a.pool == pool), None)
    if found is None:
        raise InputError(f"nothing is known about the memory of {device}: give a budget, such as budget='16GiB'")
    return found


def _said(findings: Findings, facts: Facts, allow: str, without: tuple[str, ...]) -> dict[str, str]:
    """What the user and the samples forbid beside what the work itself does."""
    said = dict.fromkeys(without, "you said so")
    if findings.random and allow == "exact" and "slices" not in facts.forbidden:
        names = ", ".join(findings.random[:2]) + (", ..." if len(findings.random) > 2 else "")
        said["slices"] = (
            f"random numbers are drawn ({names}): slices would draw others; allow='distribution' permits it"
        )
    return said


def _plan(
    work: Work, facts: Facts, project: Callable[[Choice], Projection], allowance: Allowance, allow: str, batch: Any,
    scratch: str, findings: Findings,
) -> tuple[FitPlan, Choice]:  # fmt: skip
    """The cheapest choice that fits and whose gradients are right; a remedy whose gradients are not is forbidden and named."""
    while True:
        search = Search(facts, project, allow, int(allowance.bytes * SHARE[facts.device]))
        found = search.run()
        wrong = "" if batch is None or found.choice == Choice() else _differs(work, found.choice, batch, scratch)
        if not wrong:
            return _tell(search, found, facts, allowance, findings), found.choice
        culprit = _blame(work, found.choice, batch, scratch)
        facts.forbidden[culprit] = wrong


def _differs(work: Work, choice: Choice, batch: Any, scratch: str) -> str:
    """Why the fitted gradients are not the plain ones, empty where they are."""
    store = open_store(next(work.model.parameters()).device, scratch)
    try:
        worst, name = compare(work, choice, batch, store)
    except OutsizeError:
        raise
    except RuntimeError as error:
        return f"it fails on this model: {str(error).splitlines()[0]}"
    finally:
        store.close()
    if worst <= EQUAL[choice.autocast]:
        return ""
    return f"the gradient of {name} differs from the plain one by {worst:.1e} of its size"


def _blame(work: Work, choice: Choice, batch: Any, scratch: str) -> str:
    """The remedy that alone makes the gradients differ, or the last one."""
    on = [means.key for means in remedies_on(choice)]
    off = Choice()
    for key in on:
        if _differs(work, replace(off, **{key: getattr(choice, key)}), batch, scratch):
            return key
    return on[-1]


def _tell(search: Search, found: Candidate, facts: Facts, allowance: Allowance, findings: Findings) -> FitPlan:
    """The plan as the user reads it."""
    projection = found.projection
    assert projection is not None
    known = Known.EXACT if facts.device == "cpu" else Known.ESTIMATE
    steps = tuple(
        Step(name=name, peaks=(Peak(pool=allowance.pool, bytes=size, known=known),))
        for name, size in projection.peaks.items() if name != "done"
    )  # fmt: skip
    remedies = tuple(
        Remedy(
            name=means.name, saves=max(0, _without(found.choice, means.key, facts) - predict(found.choice, facts)),
            known=Known.ESTIMATE, costs=f"+{100 * means.seconds(found.choice, facts) / _plain(facts):.0f} % time",
            exactness=_exactness(means, findings), how=means.how(found.choice, facts),
        )
        for means in remedies_on(found.choice)
    )  # fmt: skip
    notes = [
        f"not used: {means.name}: {facts.forbidden[means.key]}" for means in REMEDIES if means.key in facts.forbidden
    ]
    if findings.normaliser is not None:
        notes.append(f"the loss is {findings.normaliser}")
    if findings.written:
        notes.append(
            f"{len(findings.written)} modules write buffers in a forward pass; a second run does not write them again"
        )
    return FitPlan(
        name=f"training step of {facts.rows} samples", steps=steps, budgets=(allowance,), smallest=None, remedies=remedies,
        slow_down=slow_down(found.choice, facts), plain=facts.plain.peak, away=projection.away, place=place(facts),
        cheaper=_neighbour(search, found, facts, cheaper=True), smaller=_neighbour(search, found, facts, cheaper=False),
        notes=tuple(notes),
    )  # fmt: skip


def _exactness(means: Any, findings: Findings) -> Exactness:
    if means.key == "slices" and findings.random:
        return Exactness.DISTRIBUTION
    return means.exactness  # type: ignore[no-any-return]


def _plain(facts: Facts) -> float:
    return max(facts.forward + facts.backward, facts.launch, 1e-9)


def _without(choice: Choice, key: str, facts: Facts) -> int:
    return predict(replace(choice, **{key: getattr(Choice(), key)}), facts)


def _neighbour(search: Search, found: Candidate, facts: Facts, cheaper: bool) -> Neighbour | None:
    """The next faster choice that is larger, or the next smaller one that is slower."""
    rows = [c for c in (*search.candidates, *search.tried) if c.choice != found.choice]
    if cheaper:
        beside = [c for c in rows if c.seconds < found.seconds and c.peak > found.peak]
        best = max(beside, key=lambda c: (c.seconds, -c.peak), default=None)
    else:
        beside = [c for c in rows if c.peak < 0.95 * found.peak]
        best = min(beside, key=lambda c: (c.seconds, c.peak), default=None)
    if best is None:
        return None
    return Neighbour(
        name=describe(best.choice),
        peak=best.peak,
        slow_down=slow_down(best.choice, facts),
        traced=best.projection is not None,
    )
