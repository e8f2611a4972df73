"""Tensors of the same process that are not the step's: averaged weights, another model. They are inside the budget too."""

from __future__ import annotations

import networks as nets
import pytest
import torch

import outsize
from outsize.core.errors import BudgetError
from outsize.model.fitting import beside, stage
from outsize.model.fitting.beside import Beside, look_beside
from outsize.model.fitting.hosted import given

MiB = 2**20


class Placed:
    """A tensor on a card, as far as its memory is looked at."""

    def __init__(self, device, address):
        self.device, self._address = torch.device(device), address

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return self._address


def segment(device, address, *blocks):
    """A segment as torch tells of it; blocks are (MiB, in use)."""
    rows = [{"size": size * MiB, "state": "active_allocated" if used else "inactive"} for size, used in blocks]
    return {
        "device": device, "address": address, "blocks": rows, "total_size": sum(size for size, _ in blocks) * MiB,
        "allocated_size": sum(size for size, used in blocks if used) * MiB,
    }  # fmt: skip


@pytest.fixture
def card(monkeypatch):
    """A card with three segments: a weight and a gap, a weight between a gap and another tensor, another tensor; and a second
    card."""
    found = [
        segment(0, 0x1000, (10, True), (4, False)),
        segment(0, 0x9000000, (3, False), (6, True), (20, True)),
        segment(0, 0x20000000, (40, True)),
        segment(1, 0x1000, (90, True), (5, False)),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)


def test_what_nobody_has_named_is_others_and_gaps_beside_it_are_theirs(card):
    mine = [Placed("cuda:0", 0x1000), Placed("cuda:0", 0x1000), Placed("cuda:0", 0x9000000 + 3 * MiB), Placed("cpu", 0)]
    found = look_beside(torch.device("cuda"), mine)
    assert found == Beside(others=60 * MiB, gaps=3 * MiB)
    assert found.without(0) == 63 * MiB and found.without(20 * MiB) == 43 * MiB
    assert found.without(60 * MiB) == 0 == found.without(200 * MiB)  # nobody's: gaps are the step's own
    assert look_beside(torch.device("cuda:1"), []) == Beside(others=90 * MiB, gaps=5 * MiB)


def plans(monkeypatch, found, loss, budget, **more):
    monkeypatch.setattr(stage, "look_beside", lambda device, mine: found)
    model, batch = nets.Language(blocks=3), nets.make_tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    return outsize.fit(model, loss, optimizer, batch, budget=budget, **more)


def test_others_tensors_are_counted_at_every_moment_and_said(monkeypatch):
    alone = plans(monkeypatch, Beside(), nets.language_loss, "1GiB", dry_run=True)
    among = plans(monkeypatch, Beside(30 * MiB, 2 * MiB), nets.language_loss, "1GiB", dry_run=True)
    for before, after in zip(alone.plan.steps, among.plan.steps, strict=True):
        assert after.peaks[0].bytes == before.peaks[0].bytes + 32 * MiB
    assert not any("not the step's" in note for note in alone.plan.notes)
    assert any(note.startswith("32.00 MiB are held by tensors") for note in among.plan.notes)


def test_a_budget_that_others_have_taken_has_another_plan_or_none(monkeypatch):
    alone = plans(monkeypatch, Beside(), nets.language_loss, "1GiB", dry_run=True)
    budget = alone.plan.peak() + 8 * MiB
    among = plans(monkeypatch, Beside(8 * MiB + alone.plan.peak() // 4), nets.language_loss, budget)
    assert among.plan.peak() <= budget and not among.choice.plain
    assert float(among.step(nets.make_tokens())) > 0
    with pytest.raises(BudgetError, match=r"64.00 MiB of it in other tensors of this process"):
        plans(monkeypatch, Beside(64 * MiB), nets.language_loss, budget, dry_run=True)


def test_a_teacher_that_the_loss_calls_is_counted_once(monkeypatch):
    teacher = torch.nn.Linear(1024, 2048).requires_grad_(False)
    size = sum(p.numel() * p.element_size() for p in teacher.parameters())

    def loss(model, batch):
        return nets.language_loss(model, batch) + teacher(torch.ones(1, 1024)).mean()

    alone = plans(monkeypatch, Beside(), loss, "1GiB", dry_run=True)
    assert alone.plan.peak() > size
    same = plans(monkeypatch, Beside(size), loss, "1GiB", dry_run=True)
    assert same.plan.peak() == alone.plan.peak()
    more = plans(monkeypatch, Beside(size + 5 * MiB, 0), loss, "1GiB", dry_run=True)
    assert more.plan.peak() == alone.plan.peak() + 5 * MiB


def test_an_inference_and_a_model_on_the_host_count_them_too(monkeypatch):
    model, batch = nets.Language(blocks=3), nets.make_tokens()
    peaks = []
    for found in (Beside(), Beside(30 * MiB)):
        monkeypatch.setattr(stage, "look_beside", lambda device, mine, found=found: found)
        monkeypatch.setattr(given, "look_beside", lambda device, mine, found=found: found)
        answers = outsize.fit(model, None, None, batch, budget="1GiB", dry_run=True)
        optimizer = torch.optim.AdamW(model.parameters())
        hosted = outsize.fit(
            model, nets.language_loss, optimizer, batch, device="cpu", budget="1GiB", host="8GiB", dry_run=True
        )
        peaks.append([fitted.plan.steps[0].peaks[0].bytes for fitted in (answers, hosted)])
    assert [after - before for before, after in zip(*peaks, strict=True)] == [30 * MiB, 30 * MiB]


def test_nothing_is_looked_at_where_there_is_no_card():
    assert beside.look_beside(torch.device("cpu"), []) is beside.NOTHING
