"""Losses that take means of their own kind, and steps that end in the middle: what comes after is the plain step."""

import contextlib
import copy

import lanes
import networks as nets
import pytest
import torch
from held_fits import hold
from hosting import Recurrent, open_runner
from test_fit_home import plan_of_a_step
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

EVERYTHING = ("embed", "blocks.0", "blocks.1", "blocks.2", "head")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def classes(words=20):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, words))
    return model, {"x": torch.randn(6, 8), "y": torch.tensor([0, 1, 2, 3, 3, 0])}


def masked_loss(model, batch):
    return functional.cross_entropy(model(batch["tokens"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def gradients_in_slices(model, loss, seen, batch, store):
    """Loss and largest difference of the gradients of a batch in two slices, by the rule that other samples show."""
    twin = copy.deepcopy(model)
    work = Work(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    work.normaliser = look(work, seen).normaliser
    value = open_resident(work, Choice(slices=2), store).backward(batch)
    expected = loss(twin, batch)
    expected.backward()
    ours, plain = ([p.grad for p in m.parameters()] for m in (model, twin))
    return value, expected.detach(), max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("options", [{"weight": torch.arange(1.0, 21.0)}, {"size_average": False}])
@pytest.mark.filterwarnings("ignore:size_average")
def test_a_cross_entropy_with_options_is_taken_as_it_is(options):
    model, batch = classes()
    twin = copy.deepcopy(model)

    def loss(model, batch):
        return functional.cross_entropy(model(batch["x"]), batch["y"], **options)

    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    fitted = outsize.fit(model, loss, ours, batch, budget="1GiB")
    assert not look(Work(model=model, loss=loss, optimizer=ours), batch).heads
    value = fitted.step(batch)
    assert torch.equal(value, nets.plain_step(twin, loss, plain, batch))
    fitted.undo()


def test_a_mean_in_which_classes_weigh_differently_is_not_cut_though_the_first_samples_weigh_the_same():
    model, batch = classes(4)
    weight = torch.tensor([1.0, 1.0, 1.0, 5.0])
    work = Work(
        model=model, loss=lambda m, b: functional.cross_entropy(m(b["x"]), b["y"], weight=weight),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
    )  # fmt: skip
    found = look(work, batch)
    assert found.normaliser is None and "weigh differently" in found.why_not


def test_padding_that_the_first_samples_do_not_have_is_left_out_of_the_mean(tmp_path):
    tokens = torch.randint(1, 101, (6, 24))
    tokens[3:, 5:] = 0

    def loss(model, tokens):
        return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)

    value, expected, worst = gradients_in_slices(nets.Language(), loss, tokens, tokens, DiskStore(str(tmp_path)))
    assert torch.allclose(value, expected) and worst < 1e-5


def test_labels_are_counted_and_not_guessed_where_samples_have_nearly_the_same_loss(tmp_path):
    model = nets.Language()
    with torch.no_grad():
        model.head.weight.mul_(1e-3)
    tokens = nets.make_tokens(6)
    batch = {"tokens": tokens, "labels": tokens.clone()}
    work = Work(model=model, loss=masked_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    found = look(work, batch).normaliser
    assert found is not None and found.rule == "labels" and found.shifted


def test_two_samples_show_a_mean_over_labels(tmp_path):
    tokens = nets.make_tokens(2)
    batch = {"tokens": tokens, "labels": tokens.clone()}
    other = {"tokens": tokens, "labels": tokens.clone()}
    other["labels"][1, 4:] = -100
    value, expected, worst = gradients_in_slices(nets.Language(), masked_loss, batch, other, DiskStore(str(tmp_path)))
    assert torch.allclose(value, expected) and worst < 1e-5


def test_a_batch_without_any_label_gives_no_number_and_gradients_of_zero_as_without_us(tmp_path):
    tokens = nets.make_tokens(4)
    batch = {"tokens": tokens, "labels": tokens.clone()}
    empty = {"tokens": tokens, "labels": torch.full_like(tokens, -100)}
    value, expected, worst = gradients_in_slices(nets.Language(), masked_loss, batch, empty, DiskStore(str(tmp_path)))
    assert value.isnan() and expected.isnan() and worst == 0.0


def test_an_optimizer_that_needs_a_closure_is_refused_by_name():
    model, batch = classes()
    with pytest.raises(outsize.InputError, match=r"LBFGS\.step needs a closure"):
        outsize.fit(model, lambda m, b: m(b["x"]).mean(), torch.optim.LBFGS(model.parameters()), batch, budget="1GiB")


def open_fitted(model, optimizer, choice, store):
    work = Work(model=model, loss=nets.language_loss, optimizer=optimizer)
    return hold(plan_of_a_step(), choice, open_resident(work, choice, store))


@pytest.mark.parametrize(
    "options", [{"gradients_away": True}, {"in_backward": True}, {"in_backward": True, "stream": EVERYTHING}]
)
def test_a_step_that_is_interrupted_leaves_nothing_behind(tmp_path, options):
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, twin))
    fitted = open_fitted(model, ours, Choice(**options), DiskStore(str(tmp_path)))

    def interrupt(gradient):
        raise KeyboardInterrupt

    handle = model.blocks[1].up.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fitted.step(batch)
    handle.remove()
    fitted.gather()
    assert nets.worst_difference(model.parameters(), twin.parameters()) == 0.0
    fitted.step(batch)
    nets.plain_step(twin, nets.language_loss, plain, batch)
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) == 0.0


def test_a_part_of_a_model_whose_weights_are_away_is_saved_with_its_weights(tmp_path):
    model, batch = nets.Language(), nets.make_tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = open_fitted(model, optimizer, Choice(stream=EVERYTHING), DiskStore(str(tmp_path)))
    fitted.step(batch)
    assert model.blocks[0].up.weight.untyped_storage().nbytes() == 0
    saved = model.blocks[0].state_dict()
    assert all(tensor.untyped_storage().nbytes() for tensor in saved.values())
    fitted.undo()
    assert not any(m._state_dict_pre_hooks or m._load_state_dict_pre_hooks for m in model.modules())


@pytest.mark.parametrize("update", ["card", "host", "kept"])
@pytest.mark.parametrize("failure", [lanes.Full("out of memory"), ValueError("no"), KeyboardInterrupt()])
def test_after_a_hosted_update_that_fails_half_way_the_saved_state_can_be_loaded_and_gone_on_with(update, failure):
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, twin))
    lane = lanes.LateLane(0)
    runner, _ = open_runner(model, nets.language_loss, ours, batch, lane, limit=20_000, inputs=False, update=update)
    fitted = hold(None, runner.choice, runner, watched=1)
    fitted.step(batch)
    nets.plain_step(twin, nets.language_loss, plain, batch)
    saved = copy.deepcopy((model.state_dict(), ours.state_dict()))
    step, calls = ours.step, []

    def fail(*args):
        calls.append(1)
        if len(calls) == (1 if update == "kept" else 3):
            raise failure
        return step(*args)

    ours.step = fail
    with pytest.raises(outsize.OutOfMemory if isinstance(failure, lanes.Full) else type(failure)):
        fitted.step(batch)
    ours.step = step
    assert set(ours.state_dict()["state"]) == set(saved[1]["state"]) and not runner.half_updated
    model.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    fitted.step(batch)
    nets.plain_step(twin, nets.language_loss, plain, batch)
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-6


@pytest.mark.parametrize("update", ["card", "host", "kept"])
def test_what_is_written_through_data_between_hosted_steps_is_seen_by_the_next(update):
    model, batch = Recurrent(), nets.make_images()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    lane = lanes.LateLane(0)
    runner, _ = open_runner(model, nets.vision_loss, ours, batch, lane, limit=1, inputs=False, update=update)
    assert [place.name for place in runner.weights.visits.cut.held.places] == ["scale"]
    for _ in range(3):
        runner.step(batch)
        nets.plain_step(twin, nets.vision_loss, plain, batch)
        for m in (model, twin):
            m.scale.data.mul_(0.5)
    brought = runner.weights.visits.brought
    runner.close()
    assert brought and nets.worst_difference(model.parameters(), twin.parameters()) < 1e-6


@pytest.mark.parametrize("update", ["card", "host", "kept"])
def test_undo_of_a_hosted_fit_gives_back_the_layout_of_parameters(update):
    model, batch = nets.Vision().to(memory_format=torch.channels_last), nets.make_images()
    model.head.weight = nn.Parameter(torch.randn(8, 5).t())
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    lane = lanes.LateLane(0)
    runner, _ = open_runner(model, nets.vision_loss, ours, batch, lane, limit=4000, inputs=False, update=update)
    for _ in range(2):
        runner.step(batch)
        nets.plain_step(twin, nets.vision_loss, plain, batch)
    hold(None, runner.choice, runner, watched=1).undo()
    assert [p.stride() for p in model.parameters()] == [p.stride() for p in twin.parameters()]
    for m, optimizer in ((model, ours), (twin, plain)):
        nets.plain_step(m, nets.vision_loss, optimizer, batch)
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-5


def test_two_parameters_on_the_same_memory_are_refused_where_they_would_part():
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    model[1].weight = nn.Parameter(model[0].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.InputError, match=r"0\.weight and 1\.weight|1\.weight and 0\.weight"):
        outsize.fit(model, lambda m, b: m(b).mean(), optimizer, batch, device="cpu", budget="64MiB", host="20GiB")


def test_a_second_fit_while_the_first_keeps_weights_elsewhere_is_refused(tmp_path):
    model, batch = nets.Language(), nets.make_tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = open_fitted(model, optimizer, Choice(stream=EVERYTHING), DiskStore(str(tmp_path)))
    fitted.step(batch)
    for options in ({"budget": "1GiB"}, {"device": "cpu", "budget": "64MiB", "host": "20GiB"}):
        with pytest.raises(outsize.InputError, match="undo"):
            outsize.fit(model, nets.language_loss, optimizer, batch, **options)
    fitted.undo()
    outsize.fit(model, nets.language_loss, optimizer, batch, budget="1GiB").undo()


def test_a_model_without_parameters_is_refused():
    with pytest.raises(outsize.InputError, match="no parameters"):
        outsize.fit(nn.ReLU(), None, None, torch.randn(4, 4), budget="1GiB")


def test_a_loss_of_gradients_is_fitted_where_the_model_is_on_its_device_and_refused_where_units_visit():
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(64, 8)
    twin = copy.deepcopy(model)

    def loss(model, batch):
        batch = batch.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return gradient.square().mean()

    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    with pytest.raises(outsize.InputError, match="more than once"):
        outsize.fit(model, loss, ours, batch, device="cpu", budget="64MiB", host="20GiB")
    fitted = outsize.fit(model, loss, ours, batch, budget="1GiB")
    fitted.step(batch)
    nets.plain_step(twin, loss, plain, batch)
    fitted.undo()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True) if b.grad is not None
    )


def test_a_module_that_is_computed_again_can_be_gone_back_through_twice(tmp_path):
    model, batch = nets.Vision(norm="batch"), nets.make_images()
    twin = copy.deepcopy(model)

    def loss(model, batch):
        image = batch["image"].clone().requires_grad_()
        value = nets.vision_loss(model, {**batch, "image": image})
        (gradient,) = torch.autograd.grad(value, image, retain_graph=True)
        return value + gradient.square().sum()

    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    norms = {m: tuple(m._buffers) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    work = Work(model=model, loss=loss, optimizer=ours, written=norms)
    open_resident(work, Choice(checkpoint=("stages.0", "stages.1")), DiskStore(str(tmp_path))).step(batch)
    nets.plain_step(twin, loss, plain, batch)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wrong", [False, True])
def test_rounding_under_autocast_is_told_from_a_wrong_gradient(monkeypatch, wrong):
    """A difference under autocast that is gone without it is rounding; one that stays is none."""
    from outsize.model.fitting import training as verb

    model, tokens = nets.Language(blocks=1), nets.make_tokens(rows=6)

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nets.language_loss(model, batch)

    def casts():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.is_autocast_enabled("cpu")

    compare = verb.compare
    monkeypatch.setattr(verb, "compare", lambda *given: (compare(*given)[0] + 0.13 * (wrong or casts()), "head.weight"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = outsize.fit(model, loss, optimizer, tokens, budget="1GiB", dry_run=True).plan.plain
    expected = pytest.raises(outsize.BudgetError) if wrong else contextlib.nullcontext()
    with expected:
        plan = outsize.fit(model, loss, optimizer, tokens, budget=int(0.7 * plain), dry_run=True).plan
        assert plan.remedies and not any("differs" in note for note in plan.notes)
