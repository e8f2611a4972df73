"""Growing segments of a card's allocator: when a plan wants them, and how they are turned on and off."""

import dataclasses
import itertools

import networks as nets
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from outsize.core.errors import OutOfMemory
from outsize.model.fitting.arguments import read_request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.remedies import PAGE, TIES
from outsize.model.fitting.plan.search import SURE, TRACES, Search
from outsize.model.fitting.plan.speeds import estimate_times
from outsize.model.fitting.plan.take_apart import gather_facts
from outsize.model.fitting.plan.training_search import BESIDE, TrainingSearch
from outsize.model.fitting.run import expandable_segments as segments
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.training import TrainingPlanner


class Pictures(torch.nn.Module):
    """Convolutions whose sizes differ, which leaves holes between segments of fixed size."""

    def __init__(self):
        super().__init__()
        widths = (3, 17, 40, 23, 64, 31, 90)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.BatchNorm2d(b), torch.nn.GELU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = torch.nn.Linear(90, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def picture_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@pytest.fixture(scope="module")
def planned():
    """(facts, stage) of pictures on a card that is not there."""
    torch.manual_seed(0)
    model = Pictures()
    batch = {"x": torch.randn(96, 3, 40, 40), "y": torch.randint(0, 10, (96,))}
    work = Work(model=model, loss=picture_loss, optimizer=torch.optim.AdamW(model.parameters()))
    findings = look(work, {key: value[:4] for key, value in batch.items()})
    work = dataclasses.replace(work, written=findings.written, device="cuda")
    stage = Stage(work, batch)
    plain = stage.project(Choice())
    timing = estimate_times("cuda", plain, 96)
    facts = gather_facts(work, dataclasses.replace(findings, rows=96), plain, False, timing, None)
    return dataclasses.replace(facts, growable=True), stage


def make_planner(facts, stage):
    """A planner that knows the step on the card that is not there."""
    work, few = stage.work, {"x": torch.randn(2, 3, 40, 40), "y": torch.randint(0, 10, (2,))}
    planner = TrainingPlanner(read_request(work.model, work.loss, work.optimizer, few, budget=2**30))
    planner.look_once()
    planner.work, planner.facts, planner.project = work, facts, stage.project
    return planner


@examples(12)
@given(percent=st.integers(60, 110), limited=st.booleans())
def test_a_plan_has_growing_segments_where_it_would_fit_at_best_by_clearing_caches(planned, percent, limited):
    facts, stage = planned
    budget = facts.plain.peak * percent // 100
    found = TrainingSearch(facts, stage.project, "exact", budget, limited).run()
    native = stage.project(dataclasses.replace(found.choice, expandable=False))
    alone = TrainingSearch(facts, stage.project, "exact", budget, limited)
    other = dataclasses.replace(found, choice=dataclasses.replace(found.choice, expandable=False), projection=native)
    at_once = alone.fits(other) if found.choice.plain else native.peak * (1 + (TIES if limited else SURE)) + 1 <= budget
    growing = native.grown < native.peak and native.grown * (1 + TIES) + PAGE <= budget
    assert found.choice.expandable == (not at_once and growing)
    assert found.choice.expandable or alone.fits(other)
    assert found.projection.peak == (native.grown if found.choice.expandable else native.peak)


def test_without_growing_segments_a_plan_takes_at_least_as_long(planned):
    facts, stage = planned
    assert facts.plain.grown < facts.plain.peak
    budget = int(facts.plain.grown * (1 + TIES)) + PAGE + 1
    forbidden = dataclasses.replace(facts, forbidden=facts.forbidden | {"expandable": "you said so"})
    growing, fixed = (TrainingSearch(f, stage.project, "exact", budget).run() for f in (facts, forbidden))
    assert growing.choice == Choice(expandable=True) and growing.choice.plain
    assert not fixed.choice.expandable and not fixed.choice.plain and fixed.seconds > growing.seconds


@pytest.mark.parametrize(("percent", "growable"), [(55, True), (75, False)])
def test_no_weights_leave_where_less_that_the_arithmetic_cannot_see_would_do(planned, percent, growable):
    facts, stage = planned
    facts = dataclasses.replace(facts, growable=growable)
    search = TrainingSearch(facts, stage.project, "exact", facts.plain.peak * percent // 100)
    found = search.run()
    assert search.fits(found) and found.choice.checkpoint and found.choice.offload
    assert not (found.choice.state_away or found.choice.gradients_away or found.choice.stream)
    assert len(search.tried) <= TRACES + 1


@pytest.mark.parametrize("percent", [75, 80, 90])
def test_what_is_thought_smaller_and_much_faster_is_traced_before_a_dear_plan_is_taken(planned, monkeypatch, percent):
    facts, stage = planned
    budget = facts.plain.peak * percent // 100

    def dearest(search):
        """A search that learns little and ends with one of the dearest plans."""
        search.candidates = sorted(search._combine(), key=lambda c: (c.seconds, c.predicted))
        return next(c for c in reversed(search.candidates) if search.fits(search._trace(c)))

    monkeypatch.setattr(Search, "run", dearest)
    search = TrainingSearch(facts, stage.project, "exact", budget)
    found = search.run()
    taken = next(c for c in search.tried if search.fits(c))
    assert search.fits(found)
    assert facts.seconds + found.seconds <= BESIDE * (facts.seconds + taken.seconds)


def test_segments_grow_while_anybody_wants_it_and_other_settings_stay(monkeypatch):
    said = []
    monkeypatch.setattr(segments, "allocator_setter", lambda: said.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")

    class Fit:
        pass

    one, other = Fit(), Fit()
    segments.let_grow(one, False)
    assert said == []
    segments.let_grow(one, True)
    segments.let_grow(other, True)
    segments.let_grow(one, False)
    assert said == ["max_split_size_mb:128,expandable_segments:True"]
    segments.let_grow(other, False)
    assert said[1:] == ["max_split_size_mb:128,expandable_segments:False"]


def test_a_card_with_room_for_a_forward_pass_only_is_looked_at_all_the_same():
    model, batch = nets.Language(), nets.make_tokens(rows=4)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    whole = look(work, batch)

    def cramped(model, batch):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")
        return nets.language_loss(model, batch)

    found = look(dataclasses.replace(work, loss=cramped), batch)
    assert (found.normaliser, found.heads, found.random) == (whole.normaliser, whole.heads, whole.random)

    def full(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. (planted)")

    with pytest.raises(OutOfMemory, match="device='cuda'"):
        look(dataclasses.replace(work, loss=full), batch)


def test_a_batch_in_few_slices_is_cut_otherwise_where_that_is_faster_and_fits(planned, monkeypatch):
    facts, stage = planned
    planning = make_planner(facts, stage)
    search = TrainingSearch(facts, stage.project, "exact", 10 * facts.plain.peak)
    monkeypatch.setattr(planning, "_try_out", lambda choice, store, batch: abs(choice.first - largest) + 1.0)
    two = search._trace(search._candidate(Choice(slices=2)))
    cuts = search.variants(two)
    assert cuts and all(-(-facts.rows // 2) < cut.first < facts.rows for cut in cuts)
    largest = max(cut.first for cut in cuts)
    found = planning._try_variants(search, [(two, 1.5)], None, None)
    assert [candidate.choice.first for candidate, _ in found] == [largest]
    assert not planning._try_variants(search, [(two, 0.5)], None, None)  # nothing is faster
    tight = TrainingSearch(facts, stage.project, "exact", two.peak - 1)
    assert all(not tight.trace(cut) for cut in cuts)  # nothing larger fits where the equal slices do not


def test_an_interrupt_while_plans_are_compared_lets_go_of_the_place_beside_the_card(planned, monkeypatch):
    facts, stage = planned
    planning = make_planner(facts, stage)
    search = TrainingSearch(facts, stage.project, "exact", 10 * facts.plain.peak)
    closed = []

    class Place:
        def close(self):
            closed.append(self)

    def interrupted(runner, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "open_store", Place)
    monkeypatch.setattr("outsize.model.fitting.training.try_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planning._fastest(search, search.run(), None)
    assert len(closed) == 1
