"""What a user changes after the fit: modes, buffers, frozen weights, modules; and parameters that the optimizer has not."""

import copy
import signal

import networks as nets
import pytest
import torch
from torch import nn

import outsize

PLACES = [{}, {"device": "cpu", "host": "16GiB"}]


def make(norm="batch"):
    torch.manual_seed(0)
    model, batch = nets.Vision(blocks=2, norm=norm), nets.make_images()
    return model, copy.deepcopy(model), batch


def fit(model, batch, optimizer, **settings):
    return outsize.fit(model, nets.vision_loss, optimizer, batch, budget="1GiB", **settings)


def optimizers(*models):
    return [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in models]


def states_agree(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def steps_agree(place, changes):
    """After each change, which the fitted model and its twin get, a step leaves both with the same state."""
    model, twin, batch = make()
    ours, plain = optimizers(model, twin)
    fitted = fit(model, batch, ours, **place)
    for change in changes:
        change(model), change(twin)
        fitted.step(batch)
        nets.plain_step(twin, nets.vision_loss, plain, batch)
        assert states_agree(model, twin)
    fitted.undo()


@pytest.mark.parametrize("place", PLACES)
def test_a_model_fitted_in_eval_mode_does_not_train_in_train_mode(place):
    model, before, batch = make()
    fitted = fit(model.eval(), batch, *optimizers(model), **place)
    model.train()
    with pytest.raises(outsize.InputError, match=r"then outsize\.fit"):
        fitted.step(batch)
    assert states_agree(model, before)
    fitted.step(model.eval() and batch)
    fitted.undo()


@pytest.mark.parametrize("place", PLACES)
def test_norms_that_are_switched_off_and_on_again_are_those_of_the_plain_step(place):
    steps_agree(place, [lambda model, mode=mode: model.train(mode) for mode in (True, False, True)])


@pytest.mark.parametrize("place", PLACES)
def test_buffers_that_are_changed_through_data_or_replaced_are_those_the_next_step_uses(place):
    def change(model, number):
        model.stages[0].norm.running_mean.data.add_(1.0)
        if number == 1:
            model.stages[1].norm.running_var = torch.full((8,), 3.0)
        model.train(number < 2)

    steps_agree(place, [lambda model, number=number: change(model, number) for number in range(3)])


@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_frozen_and_trained_again_are_those_of_the_plain_step(place):
    steps_agree(
        place, [lambda model, trained=trained: model.stem.requires_grad_(trained) for trained in (True, False, True)]
    )


def test_a_hosted_model_that_gets_other_parameters_says_so():
    model, _, batch = make()
    model.stem.requires_grad_(False)
    fitted = fit(model, batch, *optimizers(model), **PLACES[1])
    model.stem.requires_grad_(True)
    with pytest.raises(outsize.InputError, match=r"stem.weight was frozen .* fit it again"):
        fitted.step(batch)
    model.stem.requires_grad_(False)
    model.head = nn.Linear(8, 5)
    with pytest.raises(outsize.InputError, match=r"head.weight is a parameter that the model did not have"):
        fitted.step(batch)
    fitted.undo()


@pytest.mark.parametrize("place", PLACES)
def test_clipping_takes_the_norm_of_all_gradients_of_the_model(place):
    model, twin, batch = make("group")
    ours, plain = (torch.optim.SGD(m.stages.parameters(), 0.5) for m in (model, twin))
    fitted = fit(model, batch, ours, clip=0.1, **place)
    for _ in range(3):
        fitted.step(batch)
        twin.zero_grad()
        nets.vision_loss(twin, batch).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-6


def test_gradients_that_the_optimizer_does_not_use_add_up_as_without_us():
    model, twin, batch = make("group")
    ours, plain = (torch.optim.SGD(m.stages.parameters(), 0.5) for m in (model, twin))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), 6

    fitted = outsize.fit(model, loss, ours, batch, budget="1GiB")
    for _ in range(3):
        fitted.step(batch)
        nets.plain_step(twin, nets.vision_loss, plain, batch)
    fitted.undo()
    assert nets.worst_difference([model.head.weight.grad], [twin.head.weight.grad]) < 1e-5


def smallest(*args, **settings):
    with pytest.raises(outsize.BudgetError) as error:
        outsize.fit(*args, budget=1, dry_run=True, **settings)
    return error.value.smallest


def test_the_smallest_budget_of_a_hosted_step_has_a_plan():
    torch.manual_seed(0)
    parts = [nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)) for _ in range(2)]
    model, batch = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *parts), torch.randn(32, 16)
    work = (model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), 0.1), batch)
    least = smallest(*work, **PLACES[1])
    assert outsize.fit(*work, budget=least, dry_run=True, **PLACES[1]).plan.budgets[0].bytes == least


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_cannot_be_copied_and_a_loss_that_takes_all_samples_are_compared_all_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4))
    batch = torch.randn(6, 8)

    def loss(model, batch):
        return model(batch).square().mean(1).topk(5).values.mean()

    expected = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    fitted = outsize.fit(model, loss, None, batch, budget="1GiB", own_step=True, **PLACES[1])
    fitted.backward(batch)
    assert nets.worst_difference([p.grad for p in model.parameters()], expected) < 1e-5
    fitted.undo()


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_the_middle_of_an_update_comes_when_the_update_is_whole(place):
    model, twin, batch = make()

    class Interrupted(torch.optim.SGD):
        """A user presses Ctrl-C while parameters are updated."""

        one_by_one = True
        calls = 0

        def step(self, closure=None):
            type(self).calls += 1
            if type(self).calls == at[0]:
                signal.raise_signal(signal.SIGINT)
            return super().step(closure)

    at = [0]
    ours, plain = Interrupted(model.parameters(), 0.05), torch.optim.SGD(twin.parameters(), 0.05)
    fitted = fit(model, batch, ours, clip=1e9, **place)
    fitted.step(batch)
    at[0] = Interrupted.calls + 1
    with pytest.raises(KeyboardInterrupt):
        fitted.step(batch)
    for _ in range(2):
        nets.plain_step(twin, nets.vision_loss, plain, batch)
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


def test_a_budget_of_what_the_plain_step_holds_takes_the_plain_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    work = (model, lambda m, b: m(b).square().mean(), torch.optim.ASGD(model.parameters()), torch.randn(32, 32))
    plain = outsize.fit(*work, budget="1GiB", dry_run=True).plan.plain
    assert not outsize.fit(*work, budget=plain, dry_run=True).plan.remedies
