"""What a user does between and inside steps with weights and state that are elsewhere: it works, or says why not."""

import copy
import pickle

import networks as nets
import pytest
import torch
from held_fits import hold

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.gradients_equal import compare
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.plan.describe import say_absent
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

EVERYTHING = Choice(
    in_backward=True, state_away=True, stream=("embed", "blocks.0", "blocks.1", "blocks.2", "head")
)  # fmt: skip


def no_other_plan(limit, batch):
    raise AssertionError


@pytest.fixture
def away(tmp_path):
    """A model whose weights and state are elsewhere after a step, its plain twin after the same step, and how to go on."""
    torch.manual_seed(0)
    model, tokens = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    work = Work(model=model, loss=nets.language_loss, optimizer=ours)
    store = DiskStore(str(tmp_path))
    plan = outsize.fit(twin, nets.language_loss, plain, tokens, budget="1GiB", dry_run=True).plan
    fitted = hold(plan, EVERYTHING, open_resident(work, EVERYTHING, store), no_other_plan, rows=len(tokens))

    def step():
        fitted.step(tokens)
        nets.plain_step(twin, nets.language_loss, plain, tokens)
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())

    step()
    yield model, twin, ours, plain, step
    fitted.undo()
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert {type(v) for state in ours.state.values() for v in state.values()} == {torch.Tensor}
    store.close()


def average(model):
    return [torch.zeros_like(p).lerp_(p.detach(), 0.5) for p in model.parameters()]


@pytest.mark.parametrize(
    "read",
    [
        average,
        lambda model: [p.norm() for p in model.parameters()],
        lambda model: [model(torch.zeros(1, 3, dtype=torch.int64))],
        lambda model: list(copy.deepcopy(model).parameters()),
        lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
        lambda model: [torch.nn.utils.parameters_to_vector(model.parameters())],
    ],
)
def test_weights_that_are_away_come_home_when_they_are_read(away, read):
    model, twin, _, _, step = away
    for _ in range(2):
        ours, plain = ([t.detach() for t in read(m)] for m in (model, twin))
        assert nets.worst_difference(ours, plain) < 1e-5
        assert {type(t) for t in ours} <= {torch.Tensor, torch.nn.Parameter}
        step()


def test_what_is_changed_between_steps_is_what_the_next_step_uses(away):
    model, twin, _, _, step = away
    for m in (model, twin):
        for parameter in m.parameters():
            parameter.data.mul_(0.9)
    step()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-5


def test_optimizer_state_that_is_away_comes_home_when_it_is_read(away):
    model, twin, ours, plain, _ = away
    a, b = ([o.state[p]["exp_avg"] + 0 for p in m.parameters()] for m, o in ((model, ours), (twin, plain)))
    assert nets.worst_difference(a, b) < 1e-5


def test_shapes_and_counts_are_answered_without_bringing_anything_home(away):
    model, twin, _, _, _ = away
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in twin.parameters())
    assert [(p.shape, p.dtype, p.requires_grad, p.grad) for p in model.parameters()]
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    assert "home" in say_absent(EVERYTHING)[0]


def smallest(model, loss, optimizer, batch):
    with pytest.raises(outsize.BudgetError) as error:
        outsize.fit(model, loss, optimizer, batch, budget=1)
    return error.value.smallest


def test_a_loss_that_reads_weights_outside_of_their_modules_is_fitted_without_streaming():
    torch.manual_seed(0)
    model, batch = (
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)),
        torch.randn(6, 16),
    )
    twin = copy.deepcopy(model)

    def loss(model, batch):
        return model(batch).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())

    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    fitted = outsize.fit(model, loss, ours, batch, budget=smallest(model, loss, ours, batch))
    value = fitted.step(batch)
    assert not fitted.choice.stream
    assert torch.allclose(value, nets.plain_step(twin, loss, plain, batch), rtol=1e-5)
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-5


def test_weights_that_are_away_are_home_before_another_plan_is_compared_with_the_plain_step(tmp_path):
    torch.manual_seed(0)
    model, tokens = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    failures = []

    def loss(model, batch):
        if failures:
            raise failures.pop()
        return nets.language_loss(model, batch)

    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    work = Work(model=model, loss=loss, optimizer=ours)
    store, beside = DiskStore(str(tmp_path)), DiskStore(str(tmp_path))

    def tighter(limit, batch):
        assert compare(work, EVERYTHING, tokens, beside)[0] < 1e-5
        return plan, EVERYTHING

    plan = outsize.fit(twin, nets.language_loss, plain, tokens, budget="1GiB", dry_run=True).plan
    fitted = hold(plan, EVERYTHING, open_resident(work, EVERYTHING, store), tighter, rows=len(tokens))
    failures.append(MemoryError("out of memory"))
    for _ in range(3):
        with pytest.warns(UserWarning, match="nothing was lost"):
            fitted.step(tokens)
        nets.plain_step(twin, nets.language_loss, plain, tokens)
        fitted.step(tokens)
        nets.plain_step(twin, nets.language_loss, plain, tokens)
        failures.append(MemoryError("out of memory"))
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-5


def test_a_comparison_that_fails_half_way_loses_no_weight(tmp_path):
    torch.manual_seed(0)
    model, tokens = nets.Language(), nets.make_tokens()
    before = copy.deepcopy(model)
    calls = []

    def loss(model, batch):
        calls.append(batch)
        value = nets.language_loss(model, batch)
        if len(calls) % 2 == 0:  # each time that the fitted step runs
            raise RuntimeError("out of memory")
        return value

    work = Work(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    store = DiskStore(str(tmp_path))
    with pytest.raises(RuntimeError):
        compare(work, EVERYTHING, tokens, store)
    store.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_another_plan_is_made_with_weights_at_home_and_state_still_away(away):
    """State that has no room beside the weights must not come for a plan."""
    model, _, optimizer, _, step = away
    state = [v for values in optimizer.state.values() for v in values.values() if v.dim()]
    stage = Stage(Work(model=model, loss=nets.language_loss, optimizer=optimizer), nets.make_tokens())
    fitted = next(hook._fitted for hook in model._state_dict_pre_hooks.values() if hasattr(hook, "_fitted"))

    def plan(limit, batch):
        assert all(p.untyped_storage().nbytes() for p in model.parameters())
        assert stage.project(Choice(state_away=True)).state > 0
        assert not any(v.untyped_storage().nbytes() for v in state)
        raise outsize.BudgetError("no", needed=1, budget=limit, smallest=1)

    fitted._used.replan = plan
    with pytest.raises(outsize.OutOfMemory, match="no tighter plan"):
        fitted._tighten("it was too much")
    step()
