"""Tensors of the same process that are not the step's: averaged weights, another model. They are inside the budget too."""

from __future__ import annotations

import networks as nets
import pytest
import torch

import outsize
from outsize import machine
from outsize.core.errors import BudgetError
from outsize.core.memory import Allowance, Budget, Pool
from outsize.model.fitting import arguments as verb
from outsize.model.fitting.plan import dry_run as stage
from outsize.model.fitting.plan import foreign_tensors as beside
from outsize.model.fitting.plan.foreign_tensors import LITTLE, Beside, look_beside
from outsize.model.tracing.tracer import Tracer

MiB = 2**20


def segment(device, address, *blocks, **more):
    """A segment as torch tells of it; blocks are (bytes, in use)."""
    rows = [{"size": size, "state": "active_allocated" if used else "inactive"} for size, used in blocks]
    return {
        "device": device, "address": address, "blocks": rows, "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, used in blocks if used), **more,
    }  # fmt: skip


@pytest.fixture
def card(monkeypatch):
    """A card whose segments are told; addresses are those of tensors on the host."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
    return found


def tensor(size):
    return torch.empty(size, dtype=torch.uint8)


def at(tensor):
    return tensor.untyped_storage().data_ptr()


def test_what_nobody_has_named_is_others_and_gaps_beside_it_are_theirs(card):
    one, two = tensor(10 * MiB), tensor(6 * MiB)
    card += [
        segment(0, at(one), (10 * MiB, True), (4 * MiB, False)),
        segment(0, at(two) - 3 * MiB, (3 * MiB, False), (6 * MiB, True), (20 * MiB, True)),
        segment(0, 0x1000, (40 * MiB, True)),
        segment(1, 0x9000, (90 * MiB, True), (5 * MiB, False)),
    ]
    found = look_beside(torch.device("cuda"), [one, one, two])
    assert found == Beside({at(two) + 6 * MiB: 20 * MiB, 0x1000: 40 * MiB}, gaps=3 * MiB)
    assert found.without(()) == 63 * MiB and found.without({at(two) + 6 * MiB}) == 43 * MiB
    assert found.without({at(two) + 6 * MiB, 0x1000}) == 0  # nobody's: gaps are the step's own
    assert found.without({at(one), at(two)}) == 63 * MiB  # the step's own, met another way
    assert look_beside(torch.device("cuda:1"), []) == Beside({0x9000: 90 * MiB}, gaps=5 * MiB)


def test_a_batch_of_a_few_rows_leaves_the_other_samples_to_be_counted(card):
    samples, flat = tensor(64 * MiB).view(64, MiB), tensor(8 * MiB)
    card += [segment(0, at(samples), (64 * MiB, True)), segment(0, at(flat), (8 * MiB, True))]
    weights = flat.view(2, 4 * MiB).unbind()  # two parameters on one storage cover it
    found = look_beside(torch.device("cuda:0"), [samples[4:8], *weights, samples[5].expand(9, MiB)])
    assert found == Beside({at(samples): 59 * MiB})
    assert look_beside(torch.device("cuda:0"), [samples, *weights]) == Beside()


def test_what_is_free_in_the_pool_of_a_graph_is_taken(card):
    card += [segment(0, 0x1000, (30 * MiB, False), segment_pool_id=(0, 1)), segment(0, 0x9000000, (2 * MiB, False))]
    assert look_beside(torch.device("cuda:0"), []).without(()) == 30 * MiB


def test_a_tensor_made_of_others_is_named_by_them(card):
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    one, two = tensor(4 * MiB), tensor(4 * MiB)
    card += [segment(0, at(one), (4 * MiB, True)), segment(0, at(two), (4 * MiB, True))]
    assert look_beside(torch.device("cuda:0"), [two_tensor.TwoTensor(one, two)]) == Beside()


def test_another_allocator_than_torchs_own_keeps_no_account(card, monkeypatch):
    card += [segment(0, 0x1000, (40 * MiB, True))]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert look_beside(torch.device("cuda:0"), []) is beside.NOTHING


def test_a_budget_that_nobody_set_is_what_is_available_and_what_is_held(monkeypatch):
    """What is available leaves out all that the process holds, which a plan counts: weights, averaged weights."""
    pool = Pool(kind="device", index=1)
    left = Budget(allowances=(Allowance(pool=pool, bytes=10 * MiB, reason="what is available"),), scratch="")
    monkeypatch.setattr(machine, "current_budget", lambda devices: left)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * MiB if device.index == 1 else 0)
    assert verb.device_budget(None, torch.device("cuda:1")).bytes == 17 * MiB
    assert verb.device_budget("3MiB", torch.device("cuda:1")).bytes == 3 * MiB
    with outsize.budget(device="10MiB"):
        assert verb.device_budget(None, torch.device("cuda:1")).bytes == 10 * MiB


@pytest.mark.parametrize("home", ["cuda:0", "cuda:1"])
def test_a_trace_knows_its_own_card_by_its_number(home):
    with (tracer := Tracer(home)).running():
        mine, other = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda:2")
        assert str(mine.device) == home == str(mine.cuda().device) == str(other.to("cuda").device)
        assert str(torch.zeros(4).to(home).device) == home and str(other.device) == "cuda:2"
        assert torch.cuda.current_device() == torch.device(home).index
    assert tracer.met() == set()


def plans(monkeypatch, found, loss, budget, **more):
    monkeypatch.setattr(stage, "look_beside", lambda device, mine: found)
    model, batch = nets.Language(blocks=3), nets.make_tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    return outsize.fit(model, loss, optimizer, batch, budget=budget, **more)


def test_others_tensors_are_counted_at_every_moment_and_said(monkeypatch):
    alone = plans(monkeypatch, Beside(), nets.language_loss, "1GiB", dry_run=True)
    among = plans(monkeypatch, Beside({1: 30 * MiB}, 2 * MiB), nets.language_loss, "1GiB", dry_run=True)
    for before, after in zip(alone.plan.steps, among.plan.steps, strict=True):
        assert after.peaks[0].bytes == before.peaks[0].bytes + 32 * MiB
    assert not any("not the step's" in note for note in alone.plan.notes)
    assert any(note.startswith("32.00 MiB are held by tensors") for note in among.plan.notes)


def test_a_budget_that_others_have_taken_has_another_plan_or_none(monkeypatch):
    alone = plans(monkeypatch, Beside(), nets.language_loss, "1GiB", dry_run=True)
    budget = alone.plan.peak() + 8 * MiB
    among = plans(monkeypatch, Beside({1: 8 * MiB + alone.plan.peak() // 4}), nets.language_loss, budget)
    assert among.plan.peak() <= budget and not among.choice.plain
    assert float(among.step(nets.make_tokens())) > 0
    with pytest.raises(BudgetError, match=r"64.00 MiB of it in other tensors of this process"):
        plans(monkeypatch, Beside({1: 64 * MiB}), nets.language_loss, budget, dry_run=True)


def test_a_teacher_that_the_loss_calls_is_counted_once(monkeypatch):
    teacher = torch.nn.Linear(1024, 2048).requires_grad_(False)
    size = sum(p.numel() * p.element_size() for p in teacher.parameters())

    def loss(model, batch):
        return nets.language_loss(model, batch) + teacher(torch.ones(1, 1024)).mean()

    alone = plans(monkeypatch, Beside(), loss, "1GiB", dry_run=True)
    assert alone.plan.peak() > size
    blocks = {at(p): p.numel() * p.element_size() + 2**19 for p in teacher.parameters()}  # as an allocator rounds them
    same = plans(monkeypatch, Beside(blocks), loss, "1GiB", dry_run=True)
    assert same.plan.peak() == alone.plan.peak()
    more = plans(monkeypatch, Beside(blocks | {1: 5 * MiB}), loss, "1GiB", dry_run=True)
    assert more.plan.peak() == alone.plan.peak() + 5 * MiB


def test_a_batch_that_the_loss_takes_from_elsewhere_is_not_taken_off_what_others_hold(monkeypatch):
    tokens = nets.make_tokens()

    def loss(model, batch):
        return nets.language_loss(model, batch) + 0 * tokens.sum()

    alone = plans(monkeypatch, Beside(), loss, "1GiB", dry_run=True)
    among = plans(monkeypatch, Beside({1: LITTLE}), loss, "1GiB", dry_run=True)
    assert among.plan.peak() == alone.plan.peak() + LITTLE


def test_an_inference_and_a_model_on_the_host_count_them_too(monkeypatch):
    model, batch = nets.Language(blocks=3), nets.make_tokens()
    peaks = []
    for found in (Beside(), Beside({1: 30 * MiB})):
        monkeypatch.setattr(stage, "look_beside", lambda device, mine, found=found: found)
        monkeypatch.setattr(verb, "look_beside", lambda device, mine, found=found: found)
        answers = outsize.fit(model, None, None, batch, budget="1GiB", dry_run=True)
        optimizer = torch.optim.AdamW(model.parameters())
        hosted = outsize.fit(
            model, nets.language_loss, optimizer, batch, device="cpu", budget="1GiB", host="8GiB", dry_run=True
        )
        peaks.append([fitted.plan.steps[0].peaks[0].bytes for fitted in (answers, hosted)])
    assert [after - before for before, after in zip(*peaks, strict=True)] == [30 * MiB, 30 * MiB]


def test_nothing_is_looked_at_where_there_is_no_card():
    assert beside.look_beside(torch.device("cpu"), []) is beside.NOTHING
