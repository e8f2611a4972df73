"""The search finds what its arithmetic does not see: kernels that ask for more in small slices, floors of single operators."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

import outsize
from outsize.core.errors import BudgetError
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.dry_run import Stage


class Volumes(nn.Module):
    """Convolutions of volumes, which torch computes otherwise for one sample than for two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(4, 12, 3, padding=1), nn.ReLU(), nn.Conv3d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv3d(12, 1, 1)
        )

    def forward(self, x):
        return self.layers(x).square().mean()


class Decoder(nn.Module):
    """A layer whose kernel holds much, and many small calls after it."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(60, 48), nn.LSTM(48, 48, 2, batch_first=True)
        self.cell, self.out = nn.GRUCell(48, 48), nn.Linear(48, 60)

    def forward(self, words):
        memory, _ = self.encoder(self.embed(words))
        hidden, outs = memory[:, -1], []
        for step in memory.unbind(1)[:6]:
            hidden = self.cell(torch.tanh(step), hidden)
            outs.append(self.out(hidden))
        return nn.functional.cross_entropy(torch.stack(outs, 1).flatten(0, 1), words[:, :6].flatten())


def plan(model, batch, budget):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    return outsize.fit(model, lambda m, b: m(b), optimizer, batch, budget=budget, dry_run=True)


def plain(model, batch):
    return plan(model, batch, "4GiB").plan.plain


def test_a_batch_is_cut_into_fewer_slices_where_kernels_of_single_samples_hold_more():
    torch.manual_seed(0)
    model, batch = Volumes(), torch.randn(4, 4, 16, 16, 16)
    most = plain(model, batch)
    with pytest.raises(BudgetError) as refused:
        plan(model, batch, most // 10)
    found = plan(model, batch, refused.value.smallest)
    assert found.choice.slices == 2


def test_a_dear_plan_gives_way_to_the_cheapest_that_fits():
    torch.manual_seed(0)
    model, batch = Decoder(), torch.randint(0, 60, (24, 24))
    found = plan(model, batch, int(0.35 * plain(model, batch)))
    assert found.choice.slices < 8


def test_no_choice_is_traced_twice(monkeypatch):
    seen = collections.Counter()
    project = Stage._project
    monkeypatch.setattr(
        Stage,
        "_project",
        lambda self, choice, *rest, **how: seen.update([choice]) or project(self, choice, *rest, **how),
    )
    torch.manual_seed(0)
    model, batch = Volumes(), torch.randn(4, 4, 8, 8, 8)
    with pytest.raises(BudgetError):
        plan(model, batch, plain(model, batch) // 10)
    assert max(count for choice, count in seen.items() if not choice.plain) == 1


def test_listening_to_the_allocator_notes_no_operators():
    from outsize.model.torch_port.objects import start_allocator_events, stop_allocator_events

    assert start_allocator_events()
    torch.ones(1000).add(1)
    events = [event.kind() for thread in torch._C._autograd._disable_profiler_legacy() for event in thread]
    assert stop_allocator_events() == []
    assert events.count("memory_alloc") >= 2
    assert "push" not in events
    with torch.autograd.profiler.profile(use_cpu=True) as later:
        torch.ones(10)
    assert any("ones" in event.name for event in later.function_events)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_slices_that_draw_for_the_whole_batch_are_dearer(monkeypatch, dropout):
    from outsize.model.fitting import training
    from outsize.model.fitting.choice import Choice
    from outsize.model.fitting.plan.remedies import Slices

    gather, found = training.gather_facts, []
    monkeypatch.setattr(training, "gather_facts", lambda *given: found.append(gather(*given)) or found[-1])
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(dropout), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    outsize.fit(model, lambda m, b: m(b).mean(), optimizer, torch.randn(8, 32), budget="1GiB", dry_run=True)
    facts = found[-1]
    assert (facts.redrawn > 0) == (dropout > 0)
    at_once = Slices().seconds(Choice(slices=2), dataclasses.replace(facts, redrawn=0.0))
    assert Slices().seconds(Choice(slices=2), facts) == pytest.approx(at_once + facts.redrawn, rel=1e-12)


def test_a_choice_is_told_as_its_fields_and_not_as_other_choices():
    told = Choice(slices=2, chunks=8).to_dict()
    assert (told["slices"], told["chunks"], told["runs"]) == (2, 8, 2)
    assert not {"passes", "cut", "treatment", "unpacked"} & told.keys()
