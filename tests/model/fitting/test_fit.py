"""Fit: the step stays inside its budget and stays the user's step."""

import contextlib
import copy
import dataclasses
import warnings

import networks as nets
import pytest
import torch
from effort import long, points
from torch import nn

import outsize
from outsize.core.memory import HOST, Allowance, Pool
from outsize.core.units import parse_bytes
from outsize.model.fitting import arguments
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.faster_plans import FasterPlans
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def plain_peak(model, loss, batch, make=torch.optim.AdamW):
    twin = copy.deepcopy(model)
    return nets.plain_peak(twin, loss, batch, make(twin.parameters()))


CASES = {
    "language": (nets.Language, nets.language_loss, nets.make_tokens),
    "patches": (nets.Patches, nets.vision_loss, nets.make_images),
    "vision": (nets.Vision, nets.vision_loss, nets.make_images),
}


@pytest.mark.parametrize(
    ("case", "percent"),
    [
        *(("language", percent) for percent in points((100, 70, 50, 35, 25), 3)),
        *(("patches", percent) for percent in points((50, 25), 1)),
        *(("vision", percent) for percent in points((25, 50), 1)),
    ],
)
def test_measured_is_at_most_projected_is_at_most_the_budget_and_training_is_the_same(case, percent):
    make, loss, data = CASES[case]
    model, batch = make(), data()
    budget = plain_peak(model, loss, batch) * percent // 100
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, twin))
    try:
        fitted = outsize.fit(model, loss, optimizer, batch, budget=budget)
        assert case != "language" or fitted.plan.fits
    except outsize.BudgetError as error:
        assert error.smallest > budget
        again = outsize.fit(model, loss, optimizer, batch, budget=error.smallest, dry_run=True)
        assert again.plan.fits
        return
    for step in range(20 if percent == 50 and long() else 4):
        got, expected = fitted.step(batch), nets.plain_step(twin, loss, other, batch)
        assert torch.allclose(got, expected, rtol=1e-4), step
    assert fitted.measured <= fitted.plan.peak() <= budget
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5


def test_the_peak_of_a_plan_for_a_card_is_the_cards_as_is_what_was_measured(monkeypatch):
    card = Allowance(pool=Pool(kind="device", index=0), bytes=2**30, reason="set by you")
    monkeypatch.setattr(arguments, "device_budget", lambda budget, model: card)
    model, batch = nets.Language(), nets.make_tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = outsize.fit(model, nets.language_loss, optimizer, batch)
    fitted.step(batch)
    assert 0 < fitted.measured <= fitted.plan.peak() == fitted.plan.peak(card.pool) <= card.bytes
    assert fitted.plan.peak(HOST) == 0


def test_the_plan_says_phases_remedies_price_and_neighbours_before_the_first_step():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    budget = plain_peak(model, nets.language_loss, batch) // 2
    plan = outsize.fit(
        model, nets.language_loss, torch.optim.AdamW(model.parameters()), batch, budget=budget, dry_run=True
    ).plan
    assert [step.name for step in plan.steps] == ["forward", "backward", "optimizer"]
    assert plan.fits and plan.remedies and plan.slow_down > 1 and plan.smaller is not None
    text = str(plan)
    for word in ("forward", "projected peak", plan.remedies[0].name, "smaller"):
        assert word in text
    assert plan.to_dict()["remedies"][0]["exactness"] in ("bitwise", "same up to rounding")


def test_a_dry_run_changes_nothing_and_cannot_step():
    model, batch = nets.Language(), nets.make_tokens()
    before = copy.deepcopy(model.state_dict())
    fitted = outsize.fit(
        model, nets.language_loss, torch.optim.AdamW(model.parameters()), batch, budget="1GiB", dry_run=True
    )
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    with pytest.raises(outsize.InputError, match="dry_run"):
        fitted.step(batch)


def test_a_budget_nothing_can_hold_names_the_smallest_that_works():
    model, batch = nets.Language(blocks=1), nets.make_tokens()
    with pytest.raises(outsize.BudgetError, match="smallest that has one") as caught:
        outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget="10KiB")
    assert caught.value.smallest > parse_bytes("10KiB")


def test_streaming_forbidden_and_a_budget_below_the_weights_is_refused_before_anything_is_changed():
    model, batch = nets.Language(blocks=1), nets.make_tokens()
    weights = sum(p.numel() * 4 for p in model.parameters())
    forward = model.forward
    with pytest.raises(outsize.BudgetError):
        outsize.fit(
            model,
            nets.language_loss,
            torch.optim.SGD(model.parameters(), 0.1),
            batch,
            budget=weights // 2,
            without=("stream",),
        )
    assert model.forward == forward and all(p.grad is None for p in model.parameters())


# what is found in model and loss


def notes_of(model, loss, batch, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return " ".join(outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True, **settings).plan.notes)


def test_batch_norm_forbids_slices_and_is_named():
    said = notes_of(nets.Vision(norm="batch"), nets.vision_loss, nets.make_images())
    assert "BatchNorm" in said and "stages.0.norm" in said


def test_in_batch_negatives_forbid_slices():
    def contrast(model, batch):
        vectors = nn.functional.normalize(model(batch["image"]), dim=-1)
        return nn.functional.cross_entropy(vectors @ vectors.T * 5, torch.arange(len(vectors)))

    assert "samples meet" in notes_of(nets.Vision(), contrast, nets.make_images())


def test_random_operators_forbid_slices_unless_other_draws_are_allowed():
    def loss(model, batch):  # rows of an order are no order
        return nets.language_loss(model, batch) * (1 + torch.randperm(len(batch))[0])

    model, batch = nets.Language(), nets.make_tokens()
    assert "random numbers" in notes_of(model, loss, batch)
    assert "random numbers" not in notes_of(model, loss, batch, allow="distribution")
    assert "random numbers" not in notes_of(nets.Language(dropout=0.1), nets.language_loss, batch)  # rows of masks are


def test_a_mean_over_labels_is_told_from_a_mean_over_samples():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    model = nets.Language()
    batch = {"tokens": nets.make_tokens(), "labels": nets.make_tokens()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    budget = plain_peak(model, loss, batch, lambda p: torch.optim.SGD(p, 0.1)) * 6 // 10
    fitted = outsize.fit(
        model,
        loss,
        optimizer,
        batch,
        budget=budget,
        without=("checkpoint", "offload", "recipes", "tensors_away", "state_away", "stream", "in_backward"),
    )
    assert fitted.choice.slices > 1 and "labels" in " ".join(fitted.plan.notes)
    batch["labels"][0, 3:] = -100
    batch["labels"][2] = -100  # a slice may hold no label at all
    twin = copy.deepcopy(model)
    fitted.step(batch)
    fitted.undo()
    nets.plain_step(twin, loss, torch.optim.SGD(twin.parameters(), 0.1), batch)
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-6


def test_a_loss_of_total_and_count_is_their_quotient_over_the_whole_batch():
    def pair(model, tokens):
        logits, labels = model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        kept = labels % 3 > 0
        return nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum"), kept.sum()

    model, batch = nets.Language(), nets.make_tokens(rows=5)
    twin = copy.deepcopy(model)
    total, count = pair(twin, batch)
    (total / count).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = outsize.fit(model, pair, optimizer, batch, budget="1GiB", own_step=True)
    fitted._now.weights.choice = Choice(slices=3)
    loss = fitted.backward(batch)
    assert torch.allclose(loss, (total / count).detach(), rtol=1e-5)
    assert nets.worst_difference([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]) < 1e-5


# mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": lambda model, batch: model(batch)}, "scalar"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)}, "another model"),
        ({"batch": {"a": torch.zeros(3, 2), "b": torch.zeros(4)}}, "disagree"),
        ({"batch": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}, "nested"),
        ({"batch": torch.zeros(0, 3)}, "empty"),
        ({"batch": "text"}, "no tensor"),
        ({"model": "gpt2"}, "torch.nn.Module"),
        ({"allow": "all"}, "allow"),
        ({"without": ("luck",)}, "no remedy"),
    ],
)
def test_a_mistake_is_named_before_anything_is_changed(change, message):
    model = nets.Language()
    before = copy.deepcopy(model.state_dict())
    given = {"loss": nets.language_loss, "batch": nets.make_tokens(), "model": model} | change
    optimizer = given.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.InputError, match=message):
        outsize.fit(given.pop("model"), given.pop("loss"), optimizer, given.pop("batch"), budget="1GiB", **given)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())


# undo, saving, loops of one's own


def tight(model, batch, loss=nets.language_loss, share=0.2, **settings):
    budget = int(plain_peak(model, loss, batch) * share)
    return outsize.fit(model, loss, torch.optim.AdamW(model.parameters()), batch, budget=budget, **settings)


def streamed(model, batch):
    """Everything away that can be away."""
    fitted = outsize.fit(model, nets.language_loss, torch.optim.AdamW(model.parameters()), batch, budget="1GiB")
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    choice = Choice(
        slices=2, checkpoint=blocks, state_away=True, gradients_away=True, stream=("embed", *blocks, "head")
    )
    fitted._used.runner = open_resident(fitted._now.work, choice, fitted._now.weights.store)
    return fitted


def test_undo_gives_the_model_back_as_it_was():
    model, batch = nets.Language(), nets.make_tokens()
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks[2].eval()
    before = [(n, dict(m.__dict__), m.training) for n, m in model.named_modules()]
    names, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    identities = [id(p) for p in model.parameters()]
    fitted = tight(model, batch)
    assert fitted.choice.state_away
    fitted.step(batch)
    assert fitted.undo() is model
    assert list(model.state_dict()) == names and [p.requires_grad for p in model.parameters()] == flags
    assert [id(p) for p in model.parameters()] == identities and model.head.weight is model.embed.weight
    for (name, attributes, training), (_, module) in zip(before, model.named_modules(), strict=True):
        assert set(module.__dict__) == set(attributes) and module.training == training, name
        hooks = [key for key in attributes if "hooks" in key]
        assert not any(module.__dict__[key] for key in hooks), name
    with pytest.raises(outsize.InputError, match="over"):
        fitted.step(batch)


def test_undo_a_second_time_does_nothing():
    model, batch = nets.Language().eval(), nets.make_tokens()
    fitted = outsize.fit(model, None, None, batch, budget="1GiB")
    assert fitted.undo() is model
    after = [set(m.__dict__) for m in model.modules()]
    model.head.register_forward_hook(lambda *_: None)
    assert fitted.undo() is model
    assert [set(m.__dict__) for m in model.modules()] == after and model.head._forward_hooks
    assert outsize.fit(nets.Language(), None, None, batch, budget="1GiB", dry_run=True).undo() is None


def test_state_dicts_are_those_of_a_plain_run_and_load_again():
    model, batch = nets.Language(), nets.make_tokens()
    fitted = streamed(model, batch)
    optimizer = fitted._now.work.optimizer
    fitted.step(batch)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert all(value.untyped_storage().nbytes() for value in weights.values())
    fitted.step(batch)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    first = fitted.step(batch)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert torch.equal(first, fitted.step(batch))


def test_backward_adds_to_gradients_and_leaves_the_step_with_its_scheduler_to_the_user():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    fitted = tight(model, batch, share=0.75, own_step=True)  # gradients of the first are held in the second
    twin = copy.deepcopy(model)
    for _ in range(2):
        fitted.backward(batch)
        nets.language_loss(twin, batch).backward()
    optimizer = fitted._now.work.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert nets.worst_difference([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]) < 1e-5
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()


def test_gradients_that_were_there_outlast_a_backward_or_an_inference_that_fails():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    fitted = tight(model, batch, share=0.9, own_step=True)
    twin = copy.deepcopy(model)
    for _ in range(2):  # the second is planned again, for gradients that are there
        fitted.backward(batch)
        nets.language_loss(twin, batch).backward()
    with pytest.warns(UserWarning, match="nothing was lost"), Planted(60):
        fitted.backward(batch)
    nets.language_loss(twin, batch).backward()
    with pytest.raises(ZeroDivisionError):
        fitted.infer(batch, lambda model, part: 1 / 0)
    assert nets.worst_difference([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]) < 1e-5


def test_clipping_is_torchs_own():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    twin = copy.deepcopy(model)
    fitted = tight(model, batch, clip=0.05)
    assert not fitted.choice.in_backward
    other = torch.optim.AdamW(twin.parameters())
    for _ in range(2):
        fitted.step(batch)
        nets.language_loss(twin, batch).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        other.step()
        other.zero_grad()
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-4


def test_inference_of_streamed_weights_equals_the_models_own_output():
    model, batch = nets.Language(), nets.make_tokens()
    fitted = streamed(model, batch)
    got = fitted.infer(batch)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    fitted.undo()
    with torch.no_grad():
        assert torch.allclose(got, model(batch), atol=1e-6)


def test_an_inference_is_planned_sliced_where_outputs_join_and_streamed_where_weights_do_not_fit():
    model, batch = nets.Language(words=31), nets.make_tokens(rows=8, words=31)
    with torch.no_grad():
        expected = model(batch)
    whole = outsize.fit(model, None, None, batch, budget="1GiB")
    assert not whole.plan.remedies and whole.plan.name == "inference of 8 samples"
    plain, weights = whole.plan.plain, sum(p.numel() * 4 for p in model.parameters())
    for budget, names in ((weights + (plain - weights) // 2, {"slice the batch"}), (weights, {"stream weights"})):
        fitted = outsize.fit(model, lambda m, b: m(b), None, batch, budget=budget)
        assert names <= {remedy.name for remedy in fitted.plan.remedies} and fitted.plan.peak() <= budget
        away = "stream weights" in {remedy.name for remedy in fitted.plan.remedies}
        assert away == ("brings all of them home" in " ".join(fitted.plan.notes))
        assert torch.allclose(fitted.infer(batch), expected, atol=1e-5)
        with pytest.raises(outsize.InputError, match="without an optimizer"):
            fitted.step(batch)
        fitted.undo()
    with pytest.raises(outsize.BudgetError, match="smallest that has one"):
        outsize.fit(model, None, None, batch, budget="1KiB")


def test_an_inference_whose_samples_meet_is_not_sliced():
    model, batch = nets.Vision(norm="batch"), nets.make_images()
    fitted = outsize.fit(model, lambda m, b: m(b["image"]), None, batch, budget="1GiB", dry_run=True)
    assert "not the output of the whole" in " ".join(fitted.plan.notes)


def test_autocast_and_a_scaler_in_the_loss_are_kept():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    twin = copy.deepcopy(model)

    def loss(m, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nets.language_loss(m, b)

    peak = plain_peak(model, loss, batch, lambda p: torch.optim.SGD(p, 0.1))
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    scaler, second = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    fitted = outsize.fit(model, loss, optimizer, batch, budget=peak * 6 // 10, scaler=scaler, clip=0.5)
    assert fitted.plan.remedies and "GradScaler" in " ".join(fitted.plan.notes)
    for _ in range(3):
        fitted.step(batch)
        second.scale(loss(twin, batch)).backward()
        second.unscale_(other)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        second.step(other)
        second.update()
        other.zero_grad()
    assert scaler.get_scale() == second.get_scale()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-2  # bfloat16 keeps eight bits


def test_a_plan_that_held_more_than_projected_says_what_it_held():
    model, batch = nets.Language(), nets.make_tokens(rows=4)
    fitted = outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget="1GiB")
    projected = fitted.plan.peak()
    fitted._used.measured = projected
    fitted._used.own_up()
    assert fitted.plan.peak() == projected and not any("were projected" in note for note in fitted.plan.notes)
    fitted._used.measured = projected + 1
    fitted._used.own_up()
    assert fitted.plan.peak() == projected + 1 and any("were projected" in note for note in fitted.plan.notes)


def test_a_plan_that_held_less_than_projected_is_relaxed_and_says_so():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    twin = copy.deepcopy(model)
    budget = plain_peak(model, nets.language_loss, batch, lambda p: torch.optim.SGD(p, 0.1)) // 3
    fitted = outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget=budget)
    before = fitted.plan
    fitted._used.measured = before.peak() // 4
    fitted._faster.relax(fitted._used, batch)
    assert fitted.plan.slow_down < before.slow_down and "relaxed" in fitted.plan.notes[-1]
    assert fitted.plan.budgets == before.budgets
    with pytest.warns(UserWarning, match="a step passed its memory"):  # it had not really held so little
        fitted.step(batch)
    nets.plain_step(twin, nets.language_loss, torch.optim.SGD(twin.parameters(), 0.1), batch)
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5


def test_twenty_adam_steps_stray_no_further_than_plain_ones_whose_samples_are_summed_in_another_order():
    """Adam divides by the size of a gradient, so that where it is rounding noise the noise moves the weight."""
    batch = nets.make_tokens(rows=6)
    base = nets.Language(blocks=2)
    budget = plain_peak(base, nets.language_loss, batch) // 2
    finals = []
    for tokens, fits in ((batch, False), (batch.flip(0), False), (batch, True)):
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if fits:
            fitted = outsize.fit(model, nets.language_loss, optimizer, tokens, budget=budget)
            losses = [fitted.step(tokens) for _ in range(20)]
            fitted.undo()
        else:
            losses = [nets.plain_step(model, nets.language_loss, optimizer, tokens) for _ in range(20)]
        finals.append((torch.stack(losses), torch.cat([p.detach().flatten() for p in model.parameters()])))
    (losses, plain), (_, other), (got, weights) = finals
    assert torch.allclose(got, losses, rtol=1e-5)
    assert float((weights - plain).norm()) <= 3 * float((other - plain).norm()) + 1e-6 * float(plain.norm())


def test_on_a_card_a_plan_is_found_whose_allocator_settles_inside_the_limit():
    from outsize.model.fitting.learn.findings import look
    from outsize.model.fitting.plan.speeds import estimate_times
    from outsize.model.fitting.plan.take_apart import gather_facts
    from outsize.model.fitting.plan.training_search import TrainingSearch

    model, batch = nets.Language(blocks=4, width=64, words=5003), nets.make_tokens(rows=64, length=64, words=5003)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.AdamW(model.parameters()))
    findings = look(work, batch[:4])
    work.heads, work.device = findings.heads, "cuda"
    stage = Stage(work, batch)
    plain, pieces = stage.project(Choice()), stage.project(Choice(chunks=8))
    timing = estimate_times("cuda", plain, 64)
    facts = gather_facts(work, dataclasses.replace(findings, rows=64), plain, False, timing, pieces)
    assert findings.heads == ("head",) and facts.plain.peak > facts.chunked.peak
    for percent in (100, 70, 50):
        search = TrainingSearch(facts, stage.project, "exact", plain.peak * percent // 100, limited=True)
        found = search.run()
        assert found.projection.settles(plain.peak * percent // 100), percent
        assert (found.choice == Choice()) == (percent == 100)


def test_a_larger_and_an_odd_batch_are_cut_into_slices_no_larger_than_planned():
    model, batch = nets.Language(blocks=2), nets.make_tokens(rows=6)
    fitted = tight(model, batch, share=0.5)
    runs = [stop - start for start, stop in fitted._now.weights.cut(13)]
    assert sum(runs) == 13 and max(runs) <= -(-6 // fitted.choice.slices)


# out of memory


class Planted(torch.utils._python_dispatch.TorchDispatchMode):
    """Runs out of memory once, at a given operator."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            self.left = -1
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")
        return func(*args, **(kwargs or {}))


CHOICES = [
    Choice(), Choice(slices=2), Choice(checkpoint=("blocks.0",)), Choice(in_backward=True),
    Choice(in_backward=True, state_away=True, checkpoint=("blocks.0",), stream=("embed", "blocks.0", "blocks.1", "head")),
    Choice(slices=3, state_away=True, gradients_away=True),
    Choice(
        recipes=(
            "blocks.0.norm:native_layer_norm:0", "blocks.0.up:addmm:0", "blocks.0:gelu:0", "blocks.0:empty_like:0",
            "blocks.0:bernoulli_:0", "blocks.0:div_:0", "blocks.0:mul:0", "blocks.1:add:0", "blocks.1:gelu:0", ":_log_softmax:0",
        ), tensors_away=("*",), in_backward=True,
    ),
]  # fmt: skip


def test_an_out_of_memory_at_any_point_of_a_step_loses_nothing():
    batch = nets.make_tokens(rows=3, length=6, words=11)
    base = nets.Language(blocks=2, width=8, words=11, dropout=0.1)
    generator = torch.Generator().manual_seed(1)
    made = outsize.fit(
        base, nets.language_loss, torch.optim.SGD(base.parameters(), 0.1), batch, budget="1GiB", allow="distribution"
    )
    for run in points(range(100), 30):
        choice = CHOICES[run % len(CHOICES)]
        finals = []
        for planted in (False, True):
            torch.manual_seed(run)
            model = copy.deepcopy(base)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            work = copy.copy(made._now.work)
            work.model, work.optimizer = model, optimizer
            fitted = copy.copy(made)
            fitted._used, fitted._faster = copy.copy(made._used), FasterPlans(0)
            fitted._used.runner, fitted._used.choice = open_resident(work, choice, made._now.weights.store), choice
            fitted._tighten = lambda failure: None  # the same choice again, so that masks and bits are the same
            fitted.step(batch)
            mode = Planted(int(torch.randint(1, 600, (), generator=generator)) if planted else -1)
            with mode:
                fitted.step(batch)
            fitted.step(batch)
            fitted.gather()
            finals.append([p.detach().clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True)), (run, choice)


def test_a_failure_inside_an_update_that_cannot_be_taken_back_is_said_and_never_run_twice():
    class Strange(torch.optim.SGD):
        """Not known to treat its parameters one by one."""

        def step(self, closure=None):
            super().step(closure)
            raise failures[-1]

    model, batch = nets.Language(), nets.make_tokens()
    optimizer = Strange(model.parameters(), 0.1)
    fitted = outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget="1GiB")
    fitted._used.runner = open_resident(
        dataclasses.replace(fitted._now.work, optimizer=optimizer), Choice(), fitted._now.weights.store
    )
    fitted._faster.watched = 0
    failures = []
    for failure, raised in (
        (torch.OutOfMemoryError("CUDA out of memory."), outsize.OutOfMemory),
        (KeyError("x"), KeyError),
    ):
        failures.append(failure)
        before = model.embed.weight.detach().clone()
        with pytest.raises(raised):
            fitted.step(batch)
        once = model.embed.weight.detach().clone()
        assert not torch.equal(before, once)


def test_after_an_out_of_memory_the_plan_is_tighter_and_it_is_said_once():
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    fitted = outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget="1GiB")
    before = fitted.plan.peak()
    with pytest.warns(UserWarning, match="nothing was lost"), Planted(200):
        fitted.step(batch)
    assert fitted.plan.peak() < before and fitted.plan.remedies
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.step(batch)
    fitted.undo()
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(2):
        nets.plain_step(twin, nets.language_loss, other, batch)
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5


def test_a_plan_that_should_have_been_faster_and_is_not_is_taken_back():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    budget = plain_peak(model, nets.language_loss, batch, lambda p: torch.optim.SGD(p, 0.1)) // 3
    for took, back in ((2.0, True), (0.5, False)):
        fitted = outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget=budget)
        first = fitted.choice
        fitted._faster.took, fitted._used.measured = 1.0, fitted.plan.peak() // 4
        fitted._faster.relax(fitted._used, batch)
        assert fitted.choice != first and fitted._faster.watched
        fitted._faster.took = took
        fitted._faster.keep_faster(fitted._used, *fitted._faster.left)
        assert (fitted.choice == first) == back and ("taken back" in fitted.plan.notes[-1]) == back
        wrong = contextlib.nullcontext() if back else pytest.warns(UserWarning, match="a step passed its memory")
        with wrong:  # the relaxed plan holds more: the first one had not really held so little
            fitted.step(batch)
        fitted.undo()


def relaxed(model, batch):
    """(a fit that has gone on to a plan that should be faster, the choice it left)"""
    budget = plain_peak(model, nets.language_loss, batch, lambda p: torch.optim.SGD(p, 0.1)) // 3
    fitted = outsize.fit(model, nets.language_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget=budget)
    first = fitted.choice
    fitted._faster.took, fitted._used.measured = 1.0, fitted.plan.peak() // 4
    fitted._faster.relax(fitted._used, batch)
    assert fitted.choice != first
    return fitted, first


@pytest.mark.parametrize("planted", [-1, 60])
def test_a_plan_that_was_tried_and_holds_too_much_is_taken_back(planted):
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    fitted, first = relaxed(model, batch)
    with pytest.warns(UserWarning, match="nothing was lost"), Planted(planted):  # it fails, or it is seen to hold more
        fitted.step(batch)
    assert fitted.choice == first and "taken back" in fitted.plan.notes[-1] and fitted._faster.left is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            fitted.step(batch)
    assert fitted.choice == first
    fitted.undo()


def test_steps_of_other_sizes_do_not_tell_which_plan_is_faster():
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    fitted, first = relaxed(model, batch)
    fitted._faster.took, fitted._faster.watched = 2.0, 0
    fitted._faster.look(fitted._used, batch[:4], whole=False, on_card=False)
    assert fitted.choice != first and fitted._faster.watched
    fitted._faster.look(fitted._used, batch, whole=True, on_card=False)
    assert fitted.choice == first
    fitted._faster.looked, fitted._faster.cleared = False, 1
    fitted._faster.look(fitted._used, batch[:4], whole=False, on_card=False)
    assert fitted.choice == first and "cleared" not in fitted.plan.notes[-1]
    fitted.undo()


def test_memory_that_runs_out_while_a_faster_plan_is_looked_for_does_not_fail_the_step():
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    fitted, other = streamed(model, batch), streamed(twin, batch)
    fitted._faster.cleared, before = 1, fitted.choice

    def exhausted(limit, batch):
        assert all(p.untyped_storage().nbytes() for p in model.parameters())
        raise torch.OutOfMemoryError("CUDA out of memory. (planted)")

    fitted._used.replan = exhausted
    for _ in range(3):
        assert torch.equal(fitted.step(batch), other.step(batch))
    assert fitted.choice == before and "memory ran out" in fitted.plan.notes[-1]
    assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    fitted.undo(), other.undo()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
