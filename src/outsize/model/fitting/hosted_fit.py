"""`outsize.fit(model, loss, optimizer, batch, device="cuda", budget="8GiB", host="64GiB")`: the model stays on the host.

In: a model and an optimizer in host memory (or a model without contents and a file of weights), a device, and a budget for
each. Out: a step or an inference on the device. Nothing is changed until a plan is found; then weights move into
page-locked blocks, one step is rehearsed, and small models' gradients are compared with the plain ones.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError, InputError, OutsizeError
from outsize.core.events import told
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.engine.heap import keep_heap_lean
from outsize.model.fitting import batch as batches
from outsize.model.fitting.fitted import TIGHTER, Fitted
from outsize.model.fitting.hosted_arguments import Given, check_given, the_cpu
from outsize.model.fitting.learn.findings import preserved
from outsize.model.fitting.learn.random_sources import same_draws
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import State, Weights, state_bytes
from outsize.model.fitting.move.scratch_file import FileMover, ScratchFile, measure_disk
from outsize.model.fitting.move.units import Cut, cut_model
from outsize.model.fitting.move.visits import HostSource
from outsize.model.fitting.move.weight_files import FileSource
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.host_memory import KINDS, LIBRARIES, READAHEAD, filed_bytes, host_bytes, sizes_of
from outsize.model.fitting.plan.hosted_describe import tell
from outsize.model.fitting.plan.hosted_dry_run import HostedStage, Sketch, watching
from outsize.model.fitting.plan.hosted_search import Search
from outsize.model.fitting.plan.link_speeds import measure, typical
from outsize.model.fitting.run.forward_functions import without_cache
from outsize.model.fitting.run.gradient_sink import Collected
from outsize.model.fitting.run.hosted import HostedRunner, open_hosted
from outsize.model.fitting.run.loss_value import read_loss
from outsize.model.fitting.run.out_of_memory import clear_up, give_back_heap, is_out_of_memory
from outsize.model.fitting.run.row_pieces import MixesRows
from outsize.model.fitting.user_errors import in_users_code

COMPARED = 2**30
"""A model whose weights have at most so many bytes is compared with its plain step."""
EQUAL = {False: 1e-4, True: 5e-2}
"""Largest relative difference of a gradient that counts as equal: by the same kernels, or by others (autocast in pieces, a card
beside a CPU)."""


def fit_hosted(
    model: Any, loss: Any, optimizer: Any, batch: Any, *, device: Any, budget: int | str | None, host: int | str | None,
    weights: Any, allow: str, own_step: bool, clip: float | None, scaler: Any, without: tuple[str, ...], dry_run: bool,
    call: Callable[[Any, Any], Any] | None = None,
) -> Fitted:  # fmt: skip
    """Plan, move, rehearse."""
    given = check_given(
        model, loss, optimizer, batch, device, budget, host, weights, own_step, clip, scaler, without, dry_run, call
    )
    given.exact = allow == "exact"
    search = _search(given, given.budgets[0].bytes)
    with in_users_code("the model, run on this batch without contents," if given.call else "loss(model, batch)"):
        try:
            with told("tracing plans", "plans") as search.traced:
                choice, sketch = search.run()
        except BudgetError as error:
            raise _confirm(given, error) from None
    plan = _tell(given, search, choice, sketch)
    if dry_run:
        return Fitted(plan, choice, None, None, given.rows, call=given.call)
    with told("moving weights, one step to try", "parts"):
        return _settle(given, search, choice, sketch)


def _confirm(given: Given, error: BudgetError) -> BudgetError:
    """The error with a device budget that has a plan: units depend on the budget, so the one that it names is tried."""
    found = error
    while found.culprit not in ("host", "disk") and found.smallest is not None:
        try:
            _search(given, found.smallest).run()
            break
        except BudgetError as larger:
            found = larger
    if found is error:
        return error
    asked = format_bytes(given.budgets[0].bytes)
    return BudgetError(
        f"no exact plan fits into {asked} of the device: budget={found.smallest} is the smallest that was found to have one",
        needed=found.needed, budget=given.budgets[0].bytes, smallest=found.smallest, culprit=found.culprit,
    )  # fmt: skip


def _search(given: Given, room: int) -> Search:
    stage = HostedStage(given.work, given.batch, given.device, given.beside)
    if given.rates is None:
        card = given.budgets[0].bytes
        given.rates = typical(given.device.type) if given.dry else measure(given.mover, given.work.optimizer, card)
    return Search(
        stage=stage, device=room, host=given.budgets[1].bytes, base=given.base, rates=given.rates, rows=given.rows,
        forced=given.forced, later=given.later, streamed=given.files is not None, call=given.call, kind=given.device.type,
        forbidden=given.forbidden, exact=given.exact, outside=dict(given.outside), before=given.before,
        grounded="it is read from a file already" if given.files is not None else given.grounded, disk=given.disk,
        folder=given.folder, spills=given.scratch is not None, piece=given.scratch.piece if given.scratch is not None else 0,
    )  # fmt: skip


def _tell(given: Given, search: Search, choice: Choice, sketch: Sketch) -> FitPlan:
    if choice.transfer_bytes and given.rates is not None and not given.rates.read:
        read, write = measure_disk(given.folder, choice.transfer_bytes, sum(filed_bytes(search, choice).values()))
        given.rates = search.rates = replace(given.rates, read=read, write=write)
    return tell(given.work, given.batch, given.rows, given.budgets, search, choice, sketch)


def _open(
    given: Given, search: Search, choice: Choice, sketch: Sketch, old: HostedRunner | None = None
) -> HostedRunner:
    """Weights into their blocks, and a runner on them."""
    cut = cut_model(given.work.model, choice.unit_bytes, choice.held, search.order)
    work = replace(given.work, written=search.written, heads=search.stage.work.heads)
    order = [name for name in sketch.order if name in cut.units]
    if old is not None:
        old.leave_device()
    if given.files is not None:
        if old is not None:
            old.close()
        source = FileSource(given.files, cut, given.mover, order, READAHEAD)
        runner = open_hosted(work, choice, cut, given.mover, source, order, rows=given.rows)
        empty = [b for b in work.model.buffers() if b.device.type == "meta"]
        runner.weights.visits.given = {id(b): given.files.read(given.files.extents[id(b)]) for b in empty}
        return runner
    mover = _open_scratch(given, search, choice, cut)
    weights, state = _lay_out(given, search, choice, cut, old)
    return open_hosted(
        work, choice, cut, mover, HostSource(weights, mover), order, weights=weights, state=state, rows=given.rows,
        scratch=given.scratch,
    )  # fmt: skip


def _open_scratch(given: Given, search: Search, choice: Choice, cut: Cut) -> Mover:
    """The scratch file with room for all that is to be there, and the mover that reaches it."""
    if choice.transfer_bytes and given.scratch is None:
        give_back_heap()
        if given.device.type == "cpu":
            keep_heap_lean()
        given.scratch = ScratchFile(given.folder, choice.transfer_bytes)
    if given.scratch is None:
        return given.mover
    places = {place.name: place for place in cut.places()}
    given.scratch.reserve(
        {
            (kind, id(places[name].parameter)): sizes_of(search, choice, kind, places[name])
            for kind in KINDS
            for name in choice.disk.get(kind, ())
        }
    )
    state = sum(state_bytes(shapes) for shapes in search.layout.values())
    needed, host = given.base + LIBRARIES[given.device.type] + cut.weights + state, given.budgets[1].bytes
    given.scratch.stays = "" if needed <= host else (
        f"weights and state take {format_bytes(needed)} of host memory, the budget is {format_bytes(host)}: they stay in their "
        "file, as memory maps, for as long as you hold them; save them with torch.save(model.state_dict(), ...)"
    )  # fmt: skip
    return FileMover(given.mover, given.scratch)


def _lay_out(
    given: Given, search: Search, choice: Choice, cut: Cut, old: HostedRunner | None
) -> tuple[Weights, State | None]:
    """Weights and state in blocks; those of a plan before this one are used where they lie right."""
    filed = {
        kind: {id(place.parameter) for place in cut.places() if place.name in set(choice.disk.get(kind, ()))}
        for kind in KINDS
    }
    weights, state = (old.weights.weights, old.weights.state) if old is not None else (None, None)
    same = old is not None and old.weights.visits.cut.lies_like(cut)
    if weights is None or not same or weights.filed.keys() != filed["weights"]:
        weights = Weights(cut, weights, filed["weights"], given.scratch)
    if state is not None and (not same or state.filed.keys() != filed["state"]):
        state = None
    if choice.update not in ("card", "kept") or not choice.state_ring:
        return weights, None
    if state is None:
        state = State(cut, search.layout, filed["state"], given.scratch)
        if old is not None and old.weights.state is not None:
            state.take_over(old.weights.state, given.work.optimizer)
        state.move_in(given.work.optimizer)
        state.make_all()
    return weights, state


def _settle(given: Given, search: Search, choice: Choice, sketch: Sketch) -> Fitted:
    """Rehearse; plan again where the rehearsal shows something else than the trace."""
    room = given.budgets[0].bytes
    runner: HostedRunner | None = None
    while True:
        runner = _open(given, search, choice, sketch, runner)
        given.projected = host_bytes(search, choice, sketch)
        try:
            wrong, measured, seconds = _rehearse(given, runner)
        except BaseException:
            runner.roll_back()
            runner.close()
            raise
        if not wrong and measured is not None and measured > given.budgets[0].bytes:
            wrong = "memory"
        clear_up()
        give_back_heap()
        if not wrong:
            break
        if wrong == "memory":
            room = int(sketch.peak * TIGHTER["hosted"])
        elif wrong != "outside":
            search.forbidden.add(wrong)
        runner.roll_back()
        search = _search(given, room)
        try:
            choice, sketch = search.run()
        except BudgetError:
            runner.close()
            raise

    found: dict[Choice, tuple[Search, Sketch]] = {}

    def replan(limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        again = _search(given, limit)
        chosen, drawn = again.run()
        found[chosen] = again, drawn
        return _tell(given, again, chosen, drawn), chosen

    def reopen(chosen: Choice, old: HostedRunner) -> HostedRunner:
        again, drawn = found[chosen]
        return _open(given, again, chosen, drawn, old)

    plan = _tell(given, search, choice, sketch)
    if seconds is not None:
        slower = max(seconds, plan.seconds or 0.0) if choice.transfer_bytes else seconds  # a rehearsal writes nothing
        plan = replace(plan, seconds=slower, notes=(*plan.notes, f"a rehearsal took {seconds:.2g} s"))
    fitted = Fitted(plan, choice, runner, replan, given.rows, reopen=reopen, call=given.call)
    fitted.measured, fitted.seconds = measured, seconds
    return fitted


def _rehearse(given: Given, runner: HostedRunner) -> tuple[str, int | None, float | None]:
    """(what is wrong: `memory`, `outside` or a remedy's name, measured peak, seconds) of a step that changes nothing."""
    import torch

    card = given.device.type == "cuda"
    clear_up()
    try:
        if card:
            torch.cuda.reset_peak_memory_stats()
        sources = given.work.sources
        quiet = preserved(given.work.model, sources) if given.call is None else same_draws(sources)
        with quiet, watching(runner.weights.visits) as seen:
            start = time.perf_counter()
            if given.call is not None:
                runner.rehearse_inference(given.batch, given.call)
            else:
                runner.rehearse(given.batch)
            runner.weights.mover.drain()
            seconds = time.perf_counter() - start
        measured = int(torch.cuda.max_memory_reserved()) if card else None
    except MixesRows:
        return "pieces", None, None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "memory", None, None
    if seen.outside:
        names = {id(place.parameter): place.name for place in runner.weights.visits.cut.places()}
        given.outside |= dict.fromkeys(names[key] for key in seen.outside)
        return "outside", measured, seconds
    return ("" if given.call is not None else _compare(given, runner, measured or 0)), measured, seconds


def _plain_gradients(given: Given, beside: Any) -> tuple[Any, dict[str, Any]]:
    """Two samples, or all where the loss fails on two, and their gradients in the plain step, by name."""
    model = given.work.model
    with contextlib.suppress(RuntimeError, TypeError):  # what a module keeps (results, a generator) may have no copy
        model = copy.deepcopy(model).to(beside)
    beside = next(model.parameters()).device

    def run(batch: Any) -> dict[str, Any]:
        there = batches.transform(batch, lambda _, tensor: tensor.to(beside))
        with preserved(given.work.model, given.work.sources), preserved(model), without_cache(model):
            loss, count = read_loss(given.work.loss(model, there))
            (loss if count is None else loss / count).backward()
            return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    few = batches.take(given.batch, 0, min(2, given.rows))
    try:
        return few, run(few)
    except Exception as error:
        if isinstance(error, OutsizeError) or is_out_of_memory(error):
            raise
    return given.batch, run(given.batch)


def _compare(given: Given, runner: HostedRunner, held: int) -> str:
    """The remedy whose gradients are not the plain ones; empty where all are, or where the model is too large to see."""
    weights = runner.weights.visits.cut.weights
    if weights > COMPARED or given.projected + 3 * weights > given.budgets[1].bytes:
        return ""
    room = held + 4 * weights <= given.budgets[0].bytes
    beside = given.device if room else the_cpu()
    batch, plain = _plain_gradients(given, beside)
    with preserved(given.work.model, given.work.sources):
        collected = Collected()
        runner.collect(batch, collected)
    found = collected.gradients
    floor = 1e-4 * max((float(gradient.norm()) for gradient in plain.values()), default=0.0)
    allowed = EQUAL[runner.weights.visits.autocast or beside.type != given.device.type]
    for place in runner.weights.visits.cut.places():
        expected = plain.get(place.name)
        got = found.get(id(place.parameter))
        if expected is None or got is None:
            continue
        worst = float((got.to(beside) - expected).norm()) / max(float(expected.norm()), floor, 1e-30)
        if not worst <= allowed:
            for remedy, on in (("chunks", runner.choice.chunks), ("pieces", runner.choice.pieces > 1)):
                if on and remedy not in given.forbidden:
                    return remedy
            raise InputError(
                f"the gradient of {place.name} differs from the plain one by {worst:.1e} of its size when its weights visit "
                f"{given.device}: does it draw random numbers from a generator that is not torch's, Python's or numpy.random, "
                "or use weights outside of their modules?"
            )
    return ""
