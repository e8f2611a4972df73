"""Laws of plans: what was traced and fits is not dearer than what is chosen, and a budget that an error names works."""

import dataclasses

import pytest
import torch
from effort import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from outsize.core.errors import BudgetError
from outsize.model.fitting.axes import Axes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.search import TRACES
from outsize.model.fitting.plan.speeds import estimate_times
from outsize.model.fitting.plan.take_apart import gather_facts
from outsize.model.fitting.plan.training_search import TrainingSearch
from outsize.model.fitting.run.loss import Normaliser
from outsize.model.fitting.run.runner import Work


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rest = nn.Embedding(50, 32), nn.LSTM(32, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.rest(self.embed(tokens))[0])


def make_recurrent():
    return (
        Recurrent(),
        lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        torch.randint(0, 50, (16, 6)),
    )


def make_convolutions():
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
        for a, b in ((3, 16), (16, 32), (32, 32), (32, 48))
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
    batch = {"x": torch.randn(8, 3, 24, 24), "y": torch.randint(0, 10, (8,))}
    return model, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]), batch


def take_apart(make, device):
    """(facts, project) of a model as if it was on a device."""
    torch.manual_seed(0)
    model, loss, batch = make()
    work = Work(model=model, loss=loss, optimizer=torch.optim.AdamW(model.parameters()))
    rows = Axes().count(batch)
    findings = dataclasses.replace(look(work, Axes().take(batch, 0, 4)), rows=rows)
    work = dataclasses.replace(
        work, written=findings.written, normaliser=findings.normaliser or Normaliser(), device=device
    )
    stage, known = Stage(work, batch), {}

    def project(choice):
        if choice not in known:
            known[choice] = stage.project(choice)
        return known[choice]

    plain = project(Choice())
    timing = estimate_times(device, plain, rows)
    return gather_facts(work, findings, plain, False, timing, None), project


@pytest.fixture(scope="module")
def works():
    return {
        (make, device): take_apart(make, device)
        for make in (make_recurrent, make_convolutions)
        for device in ("cpu", "cuda")
    }


@examples(15)
@example(make=make_convolutions, device="cpu", percent=42)
@given(
    make=st.sampled_from((make_recurrent, make_convolutions)),
    device=st.sampled_from(("cpu", "cuda")),
    percent=st.integers(5, 105),
)
def test_no_traced_plan_that_fits_is_cheaper_and_the_budget_that_an_error_names_works(works, make, device, percent):
    facts, project = works[make, device]
    search = TrainingSearch(facts, project, "exact", facts.plain.peak * percent // 100)
    try:
        found = search.run()
    except BudgetError as error:
        assert TrainingSearch(facts, project, "exact", error.smallest).run()
        assert error.smallest > search.budget
        return
    finally:
        assert (
            len(search.tried) <= 3 * TRACES + 5
        )  # tensors one by one come after modules, and the last resort looks once more
    assert search.fits(found)
    assert all(c.seconds >= found.seconds for c in search.tried if search.fits(c))


def test_more_room_does_not_make_a_plan_slower(works):
    facts, project = works[make_recurrent, "cpu"]
    took = []
    for percent in (40, 50, 60, 70, 80, 90, 100):
        found = TrainingSearch(facts, project, "exact", facts.plain.peak * percent // 100).run()
        took.append(facts.passes + found.seconds)
    assert all(later <= 1.05 * min(took[:number]) for number, later in enumerate(took[1:], 1))
