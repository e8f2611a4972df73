"""A budget holds in the user's own loop: what its steps really hold is at most what the plan says, whatever it does."""

import copy
import warnings

import loops
import networks as nets
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn

import outsize
from outsize.core.errors import BudgetError, InputError, OutOfMemory

LOOPS = st.builds(
    loops.Loop, model=st.sampled_from(sorted(loops.MODELS)), optimizer=st.sampled_from(sorted(loops.OPTIMIZERS)),
    way=st.sampled_from(sorted(loops.WAYS)), accumulation=st.integers(1, 3),
    autocast=st.sampled_from(("none", "before", "late")), clip=st.booleans(), evaluate=st.booleans(), average=st.booleans(),
    percent=st.sampled_from((100, 85, 70, 60)),
).filter(loops.Loop.possible)  # fmt: skip


@examples(16, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(loop=LOOPS)
def test_no_loop_holds_more_than_its_plan_nor_a_plan_more_than_its_budget(loop):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = loops.run(loop)
    except BudgetError as error:
        assert error.smallest is not None and error.smallest > error.budget
        return
    except OutOfMemory as error:  # a kernel's scratch that no rule knows, seen in a step
        assert "a step held" in str(error) and "no tighter plan exists" in str(error)
        return
    assert found.holds, found


def start(optimizer, **more):
    """(fitted wide model, its optimizer, its twin, the twin's optimizer, batch)"""
    torch.manual_seed(0)
    model, batch = loops.Wide(), (torch.randn(16, 64),)
    twin = copy.deepcopy(model)
    ours, plain = (optimizer(m.parameters()) for m in (model, twin))
    return outsize.fit(model, LOSS, ours, batch, budget="1GiB", own_step=True, **more), ours, twin, plain, batch


def LOSS(model, batch):
    return model(batch[0]).square().mean()


def own(fitted, optimizer, batch, times=1):
    for _ in range(times):
        fitted.backward(batch)
    optimizer.step()


def test_a_users_foreach_step_runs_a_few_parameters_at_a_time_and_changes_the_same():
    fitted, ours, twin, plain, batch = start(lambda p: torch.optim.RMSprop(p, 1e-3, foreach=True))
    weights = sum(p.numel() * p.element_size() for p in twin.parameters())
    for _ in range(3):
        own(fitted, ours, batch)
        nets.plain_step(twin, LOSS, plain, batch)
        ours.zero_grad()
    model = fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) == 0
    assert len(fitted.peaks) == 3 and fitted.measured == max(fitted.peaks) <= fitted.plan.peak()
    plain_update = 3 * weights + weights  # weights, gradients, state, and a temporary of all of them
    assert fitted.peaks[-1] < plain_update
    assert not ours._optimizer_step_pre_hooks and not ours._optimizer_step_post_hooks


def test_gradients_are_there_after_the_users_step():
    fitted, ours, twin, _plain, batch = start(lambda p: torch.optim.AdamW(p, 1e-3))
    own(fitted, ours, batch)
    LOSS(twin, batch).backward()
    pairs = list(zip(fitted.undo().parameters(), twin.parameters(), strict=True))
    assert all(torch.allclose(mine.grad, other.grad, atol=1e-7) for mine, other in pairs)


def test_a_closure_is_called_once_and_its_loss_given_back():
    fitted, ours, twin, plain, batch = start(lambda p: torch.optim.SGD(p, 0.1))
    calls = []

    def closure():
        ours.zero_grad()
        calls.append(fitted.backward(batch))
        return calls[-1]

    assert ours.step(closure) is calls[0] and len(calls) == 1
    nets.plain_step(twin, LOSS, plain, batch)
    assert nets.worst_difference(list(fitted.undo().parameters()), list(twin.parameters())) < 1e-6


def test_lbfgs_takes_its_closure_through_the_fitted_step():
    def make(p):
        return torch.optim.LBFGS(p, 0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")

    fitted, ours, twin, plain, batch = start(make)

    def closure():
        ours.zero_grad()
        return fitted.backward(batch)

    def other():
        plain.zero_grad()
        loss = LOSS(twin, batch)
        loss.backward()
        return loss

    for _ in range(3):
        ours.step(closure)
        plain.step(other)
    assert 0 < fitted.measured <= fitted.plan.peak()
    assert nets.worst_difference(list(fitted.undo().parameters()), list(twin.parameters())) < 1e-4
    with pytest.raises(InputError, match="own_step=True"):
        outsize.fit(twin, LOSS, plain, batch, budget="1GiB")


def test_a_second_backward_pass_is_planned_for_and_said_once():
    fitted, ours, _twin, _plain, batch = start(lambda p: torch.optim.AdamW(p, 1e-3))
    before = fitted.plan.peak()
    fitted.backward(batch)
    with pytest.warns(UserWarning, match="gradients of an earlier backward pass") as said:
        fitted.backward(batch)
    assert len(said) == 1 and fitted.plan.peak() > before
    ours.step()
    ours.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for times in (1, 3, 2):
            own(fitted, ours, batch, times)
            ours.zero_grad()
    assert max(fitted.peaks) <= fitted.plan.peak()
    fitted.undo()


def test_autocast_that_comes_late_is_planned_for_once_and_left_again():
    torch.manual_seed(0)
    model, batch = nets.Language(), nets.make_tokens()
    ours = torch.optim.AdamW(model.parameters())
    fitted = outsize.fit(model, nets.language_loss, ours, batch, budget="1GiB", own_step=True)
    first = fitted.plan
    own(fitted, ours, batch)
    ours.zero_grad()
    with pytest.warns(UserWarning, match="planned again for autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        fitted.backward(batch)
    second = fitted.plan
    assert second.peak() != first.peak()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            ours.step()
            ours.zero_grad()
            fitted.backward(batch)
            assert fitted.plan.plain == first.plain
            ours.step()
            ours.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fitted.backward(batch)
            assert fitted.plan.plain == second.plain
    fitted.undo()


def test_a_forward_function_that_is_replaced_after_the_plan_is_planned_for():
    fitted, ours, _twin, _plain, batch = start(lambda p: torch.optim.SGD(p, 0.1))
    model = fitted._work.model
    inner = model.forward
    model.forward = lambda x: inner(torch.cat([x, x])).chunk(2)[0]  # as trainers wrap it, in autocast say
    before = fitted.plan.peak()
    with pytest.warns(UserWarning, match=r"planned again for model\.forward"):
        own(fitted, ours, batch)
    assert fitted.plan.peak() > before and fitted.measured <= fitted.plan.peak()
    fitted.undo()


@pytest.mark.parametrize("scaled", [False, True])
def test_the_loss_of_a_fitted_step_goes_back_like_any_other(scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    fitted, ours, twin, plain, batch = start(lambda p: torch.optim.SGD(p, 0.1), scaler=scaler)
    other = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    for _ in range(3):
        for half in (0.5, 0.25):  # accumulated with weights of their own
            loss, expected = fitted.loss(batch), LOSS(twin, batch)
            assert torch.allclose(loss, expected) and loss.requires_grad
            (loss * half if scaler is None else scaler.scale(loss * half)).backward()
            other.scale(expected * half).backward()
        if scaler is None:
            ours.step()
        else:
            scaler.step(ours)
            scaler.update()
        other.step(plain)
        other.update()
        ours.zero_grad()
        plain.zero_grad()
    assert len(fitted.peaks) == 3 and fitted.measured <= fitted.plan.peak()
    assert nets.worst_difference(list(fitted.undo().parameters()), list(twin.parameters())) < 1e-6


def test_a_loss_that_nobody_takes_back_changes_nothing():
    fitted, _ours, _twin, _plain, batch = start(lambda p: torch.optim.SGD(p, 0.1))
    fitted.loss(batch)
    assert all(parameter.grad is None for parameter in fitted.undo().parameters())


class Growing(nn.Module):
    """Holds more than it did when it was planned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.more = 0

    def forward(self, x):
        extra = torch.ones(self.more) if self.more else None
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x if extra is None else x * extra[0]


@pytest.mark.parametrize("own_step", [False, True])
def test_a_step_above_its_budget_is_planned_again_with_the_numbers(own_step):
    torch.manual_seed(0)
    model, batch = Growing(), (torch.randn(256, 32),)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = outsize.fit(model, LOSS, optimizer, batch, budget="1GiB", own_step=own_step, dry_run=True).plan.peak()
    fitted = outsize.fit(model, LOSS, optimizer, batch, budget=plain, own_step=own_step)

    def step():
        if not own_step:
            return fitted.step(batch)
        own(fitted, optimizer, batch)
        return optimizer.zero_grad()

    step()
    assert fitted.measured <= fitted.plan.peak() <= plain and not fitted.plan.remedies
    model.more = 20_000  # not a thing that anybody could have seen before
    with pytest.warns(UserWarning, match="a step held .* of ") as said:
        for _ in range(4):
            step()
    assert fitted.plan.remedies and all("KiB" in str(warning.message) for warning in said)
    assert fitted.peaks[-1] <= plain < max(fitted.peaks)
    fitted.undo()


def test_steps_are_run_and_not_measured_while_somebody_profiles():
    fitted, ours, _twin, _plain, batch = start(lambda p: torch.optim.SGD(p, 0.1))
    with torch.profiler.profile() as seen:
        own(fitted, ours, batch)
    assert len(seen.events()) and not fitted.peaks and fitted.measured is None
    own(fitted, ours, batch)
    assert len(fitted.peaks) == 1
    fitted.undo()


def test_a_profiler_may_start_between_steps():
    fitted, ours, _twin, _plain, batch = start(lambda p: torch.optim.SGD(p, 0.1))
    own(fitted, ours, batch)
    with torch.profiler.profile() as seen:
        torch.ones(3)
    assert len(seen.events())
    own(fitted, ours, batch)
    assert len(fitted.peaks) == 2
    fitted.undo()


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: it has the other's groups and state, and none of torch's own attributes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_an_optimizer_that_another_library_has_wrapped_is_the_one_inside():
    fitted, ours, twin, plain, batch = start(lambda p: Wrapped(torch.optim.AdamW(p, 1e-3)))
    for _ in range(2):
        own(fitted, ours, batch)
        nets.plain_step(twin, LOSS, plain, batch)
        ours.zero_grad()
    assert len(fitted.peaks) == 2
    assert nets.worst_difference(list(fitted.undo().parameters()), list(twin.parameters())) < 1e-5
