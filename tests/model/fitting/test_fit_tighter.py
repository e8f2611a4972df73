"""What follows a step that held too much, where nothing is as much smaller as is asked for first."""

import copy
import warnings

import networks as nets
import pytest
import torch

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.remedies import OF_TENSORS


def make():
    torch.manual_seed(0)
    model, batch = nets.Language(), nets.make_tokens(rows=1)
    return model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), batch


def smallest_budget():
    with pytest.raises(outsize.BudgetError) as error:
        outsize.fit(*make(), budget=1)
    return error.value.smallest


def test_the_smallest_plan_is_taken_where_none_is_as_small_as_wanted():
    smallest = smallest_budget()
    model, loss, optimizer, batch = make()
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    fitted = outsize.fit(model, loss, optimizer, batch, budget=smallest * 108 // 100)
    before, held = fitted.choice, fitted.plan.peak()
    assert held > smallest > held * 85 // 100
    with pytest.warns(UserWarning, match="a step passed its memory"):
        fitted._tighten("a kernel took more")
    assert fitted.choice != before and fitted.plan.peak() <= smallest < held
    for _ in range(2):
        assert torch.equal(fitted.step(batch), nets.plain_step(twin, loss, plain, batch))
    with warnings.catch_warnings(), pytest.raises(outsize.OutOfMemory, match="no tighter plan"):
        warnings.simplefilter("ignore")
        for _ in range(5):
            fitted._tighten("a kernel took more")
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-6


def test_single_tensors_are_left_alone_where_a_plan_for_them_held_too_much_and_none_is_smaller():
    model, loss, optimizer, batch = make()
    fitted = outsize.fit(model, loss, optimizer, batch, budget="1GiB")
    used, asked = fitted._used, []
    plan, single = used.plan, Choice(recipes=("a",), tensors_away=("b",))
    used.choice = single

    def replan(limit, batch, without=()):
        asked.append((limit, without))
        if not without:
            raise outsize.BudgetError("none", needed=plan.peak(), budget=limit, smallest=plan.peak())
        return plan, Choice()

    used.replan = replan
    with pytest.warns(UserWarning, match="a step passed its memory"):
        fitted._tighten("a kernel took more")
    assert asked[-1] == (plan.budgets[0].bytes, ("recipes", "tensors_away"))
    assert used.choice == Choice()
    with pytest.raises(outsize.OutOfMemory, match="no tighter plan"):
        fitted._tighten("a kernel took more")


def test_the_smallest_plan_is_not_tried_twice():
    model, loss, optimizer, batch = make()
    fitted = outsize.fit(model, loss, optimizer, batch, budget="1GiB")
    used = fitted._used
    plan = used.plan

    def replan(limit, batch, without=()):
        if limit < plan.peak() - 1:
            raise outsize.BudgetError("none", needed=plan.peak() - 1, budget=limit, smallest=plan.peak() - 1)
        return plan, used.choice

    used.replan = replan
    with pytest.raises(outsize.OutOfMemory, match="no tighter plan"):
        fitted._tighten("a kernel took more")


def test_a_planner_makes_no_plan_with_remedies_that_held_too_much():
    model, loss, optimizer, batch = make()
    fitted = outsize.fit(model, loss, optimizer, batch, budget="1GiB")
    smallest = fitted._used.replan
    with pytest.raises(outsize.BudgetError) as error:
        smallest(1, None)
    limit = error.value.smallest * 3 // 2
    keys = tuple(kind.key for kind in OF_TENSORS)
    plan, choice = smallest(limit, None, without=keys)
    assert plan.peak() <= limit and not any(kind.on(choice) for kind in OF_TENSORS)
    _, again = smallest(limit, None)
    assert again == choice
