"""Times of a step, on a card whose events are the processor's clock."""

import dataclasses
import time

import networks as nets
import pytest
import torch

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.out_of_memory import where_room
from outsize.model.fitting.move.stores import NoStore
from outsize.model.fitting.plan import speeds
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.speeds import time_optimizer
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work


class Event:
    """A mark in time."""

    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(speeds, "measure_link", lambda: 5e10)
    model, batch = nets.Language(), nets.make_tokens()
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.AdamW(model.parameters()))
    return work, batch, Stage(work, batch).project(Choice())


def full(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. (planted)")


def room_for(rows):
    def loss(model, batch):
        return (nets.language_loss if len(batch) <= rows else full)(model, batch)

    return loss


def test_slices_are_measured_that_have_room(step):
    work, batch, plain = step
    rows = len(batch)
    every = speeds.measure_times(work, batch, plain, 10 * plain.peak)
    assert every.measured and every.points[-1][0] == rows
    few = speeds.measure_times(dataclasses.replace(work, loss=room_for(rows // 2)), batch, plain, 10 * plain.peak)
    assert few.points[-1][0] == rows // 2
    assert speeds.measure_times(dataclasses.replace(work, loss=full), batch, plain, 10 * plain.peak) is None


def test_a_plan_that_has_no_room_is_not_timed_and_leaves_no_gradients(step):
    work, batch, _ = step
    assert speeds.try_out(open_resident(work, Choice(), NoStore()), batch) > 0
    assert speeds.try_out(open_resident(dataclasses.replace(work, loss=full), Choice(), NoStore()), batch) is None
    assert all(parameter.grad is None for parameter in work.model.parameters())


def test_other_errors_than_those_of_memory_are_raised():
    assert where_room(lambda: 3) == 3
    assert where_room(lambda: full(None, None)) is None
    with pytest.raises(ZeroDivisionError):
        where_room(lambda: 1 / 0)


def test_an_optimizer_is_timed_without_its_owners_hooks():
    parameter, calls = torch.nn.Parameter(torch.zeros(3)), []
    optimizer = torch.optim.AdamW([parameter])
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert time_optimizer(optimizer, "cpu", 1000) > 0
    assert not calls and not optimizer.state and torch.equal(parameter, torch.zeros(3))


def test_a_backward_pass_that_is_measured_as_much_longer_than_its_forward_pass_grows_with_it(monkeypatch, step):
    """Convolutions in three dimensions take seven times as long back: arithmetic says three at most."""
    work, batch, _ = step
    alone = {1: 0.010, len(batch): 0.040}
    monkeypatch.setattr(speeds, "_forward_alone", lambda work, part: alone[len(part)])
    ((rows, forward, backward),) = speeds._extrapolated(work, batch, (1, 0.010, 0.070), [len(batch)], 3.0)
    assert (rows, round(forward, 3), round(backward, 3)) == (len(batch), 0.040, 0.280)
    ((_, forward, backward),) = speeds._extrapolated(work, batch, (1, 0.040, 0.050), [len(batch)], 1.5)
    assert (round(forward, 3), round(backward, 3)) == (0.048, 0.072)


def test_a_plan_that_takes_very_long_runs_once(step, monkeypatch):
    runs = []
    speeds._quickest([lambda: runs.append(1)])
    assert len(runs) == 1 + speeds.RUNS
    monkeypatch.setattr(speeds, "LONG", 0.0)
    monkeypatch.setattr(speeds, "SHORT", 0.0)
    speeds._quickest([lambda: runs.append(1)])
    assert len(runs) == 2 + speeds.RUNS


def test_seconds_of_a_remedy_count_what_python_sees(step):
    from outsize.model.fitting.learn.findings import look
    from outsize.model.fitting.plan.take_apart import gather_facts
    from outsize.model.fitting.plan.training_search import added

    work, batch, _ = step
    stage = Stage(work, batch)
    plain = stage.project(Choice(), survey=True)
    timing = speeds.estimate_times("cpu", plain, len(batch))
    facts = gather_facts(work, look(work, batch), plain, False, timing, None, stage.surveyed)
    drawing = dataclasses.replace(facts, replays=True)
    assert facts.seeing > 0
    cut, again = Choice(slices=2), Choice(recipes=facts.recipes[0][0].sites)
    assert added(cut, drawing) - added(cut, facts) == pytest.approx(2 * facts.seeing)
    assert added(again, facts) > facts.seeing
