"""Which set `shrink` takes: one that is better by chance is not, one that is better is; and what that is judged on."""

import functools
import math
from dataclasses import replace

import pytest
import small_networks
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.compression.evaluation import FEW_BATCHES, MOST_BATCHES, Measured, evaluate
from outsize.compression.healing import Healing
from outsize.compression.judge import make_judge, take_few
from outsize.compression.method import Candidate, Stage, Subject
from outsize.compression.methods import choose
from outsize.compression.search import try_alone
from outsize.compression.sets import BuiltSet, choose_set, heal_sets, measure_sets
from outsize.core.outcomes.shrinking import ShrinkSet

BATCHES = 24


def measured(losses):
    parts = tuple(loss / len(losses) for loss in losses)
    return Measured(loss=math.fsum(parts), seconds=1.0, parts=parts)


def built(name, losses, plain, healed=False, methods=1):
    """A set of so many methods whose batches have these losses."""
    found = measured(losses)
    noun = ShrinkSet(
        name=name, parts=(), bytes=1, loss=found.loss, seconds=1.0, before=0.0, healed=found.loss if healed else None,
        doubt=found.doubt(measured(plain)),
    )  # fmt: skip
    candidates = tuple(
        Candidate(method=f"{name} {number}", site="", level="", stage=Stage.FACTORS, touches=frozenset(), apply=id)
        for number in range(methods)
    )
    return BuiltSet(noun=noun, candidates=candidates, measured=found)


def draw(seed, fall):
    """Losses of batches as they were, nearly so, and with noise: their mean lies lower by so many standard errors."""
    random = torch.Generator().manual_seed(seed)
    plain, near, far = torch.randn(3, BATCHES, generator=random, dtype=torch.float64)
    far = far - far.mean() - fall * far.std() / math.sqrt(BATCHES)
    return (5 + plain).tolist(), (5 + plain + 1e-6 * near).tolist(), (5 + plain + 0.01 * far).tolist()


@given(st.integers(0, 10**6), st.floats(0.01, 1.9), st.booleans())
@examples(60)
def test_a_mixture_that_is_better_by_chance_is_not_taken(seed, fall, healed):
    plain, near, far = draw(seed, fall)
    sets = [built("mixture", far, plain, healed, methods=2), built("int8", near, plain, healed)]
    assert choose_set(sets, 1, math.inf).noun.name == "int8"


@given(st.integers(0, 10**6), st.floats(2.1, 10), st.booleans())
@examples(60)
def test_a_mixture_that_is_better_is_taken(seed, fall, healed):
    plain, near, far = draw(seed, fall)
    sets = [built("int8", near, plain, healed), built("mixture", far, plain, healed, methods=2)]
    assert choose_set(sets, 1, math.inf).noun.name == "mixture"


@given(st.integers(0, 10**6), st.floats(1.2, 20))
@examples(60)
def test_of_two_sets_with_the_same_loss_the_one_that_changes_less_is_taken(seed, wider):
    plain, _, far = draw(seed, 0.0)
    wide = [one + wider * (two - one) for one, two in zip(plain, far, strict=True)]
    sets = [built("float8", wide, plain), built("mixture", far, plain, methods=2)]
    assert choose_set(sets, 1, math.inf).noun.name == "mixture"


def test_of_two_sets_that_measure_the_same_the_smaller_one_is_taken():
    plain, _, far = draw(0, 0.0)
    sets = [
        replace(one, noun=replace(one.noun, bytes=size))
        for one, size in zip([built("int8", far, plain)] * 2, (9, 8), strict=True)
    ]
    assert choose_set(sets, 9, math.inf).noun.bytes == 8


@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 3), min_size=2, max_size=30))
@examples(100)
def test_of_two_losses_at_most_one_is_worse_and_what_both_share_says_nothing(rows):
    one, other, shared = zip(*rows, strict=True)
    first, second = measured(one), measured(other)
    assert not first.is_worse(first) and not (first.is_worse(second) and second.is_worse(first))
    both = [measured([1e3 * far + near for far, near in zip(shared, losses, strict=True)]) for losses in (one, other)]
    gap = abs(abs(first.loss - second.loss) - first.doubt(second))
    assert gap < 1e-6 or both[0].is_worse(both[1]) == first.is_worse(second)


@pytest.mark.parametrize(("fall", "taken"), [(0.3, "bf16"), (1.6, "bf16"), (8.0, "int8")])
def test_shrink_sees_whether_a_fall_of_the_loss_is_noise(fall, taken):
    torch.manual_seed(0)
    model, data = torch.nn.Linear(64, 64, bias=False), [torch.randn(4, 64) for _ in range(BATCHES)]
    noise = torch.randn(BATCHES)
    noise = (noise - noise.mean()) / noise.std() - fall / math.sqrt(BATCHES)
    planted = {id(batch): 0.01 * float(value) for batch, value in zip(data, noise, strict=True)}

    def loss(model, batch):
        kinds = {codec.name for module in model.modules() for codec, _ in module.__dict__.get("derived", {}).values()}
        return 1 + model(batch).square().mean() * 1e-6 + (planted[id(batch)] if "int8" in kinds else 0.0)

    small = outsize.shrink(model, data, loss=loss, to="50%", methods=["bf16", "int8"], within=1.0)
    assert small.plan.chosen.name == taken
    assert min(small.plan.sets, key=lambda one: one.loss).name == "int8"  # by the mean alone it would always be taken


def test_what_can_still_become_the_best_is_healed_and_what_cannot_is_not():
    model, loss, _ = small_networks.tokens(60)
    data = [torch.randint(0, small_networks.VOCABULARY, (8, 8)) for _ in range(12)]
    subject = Subject(model=model.eval(), batches=data, loss=loss)
    judge, plain = make_judge(subject, data), evaluate(model, subject)
    trials, _ = try_alone(judge, judge.find_candidates(choose(["bf16", "int8", "drop blocks"]))[0], plain)
    target = subject.count(model) // 2
    sets = measure_sets(judge, trials, target, plain)
    healing = Healing(
        steps=8, batches=data, seen=data, optimizer=functools.partial(torch.optim.Adam, lr=1e-3), budget=None
    )
    healed = heal_sets(subject, sets, target, math.inf, healing, plain)
    assert {one.noun.name for one in sets if one.noun.bytes <= target} >= {"bf16", "int8", "drop blocks"}
    assert {one.noun.name for one in healed if one.model is not None} >= {"bf16", "int8"}
    assert all(one.model is None and one.dropped for one in healed if one.noun.name == "drop blocks")


def test_a_set_that_was_trained_no_further_is_taken_only_where_no_other_will_do():
    plain, near, far = draw(0, 0.0)
    dropped = replace(built("int8", near, plain), dropped=True)
    whole = built("bf16", [one + 1 for one in far], plain, healed=True)
    assert choose_set([dropped, whole], 1, math.inf) is whole
    assert choose_set([dropped, whole], 1, math.fsum(near) / BATCHES + 0.5) is dropped


@pytest.mark.parametrize(("fall", "used"), [(-3.0, False), (-0.3, True), (0.3, True), (3.0, True)])
def test_a_healing_is_used_unless_it_makes_the_loss_higher_by_more_than_chance(fall, used):
    class Marked(torch.nn.Module):
        """Its mark is 0 until it is trained."""

        def __init__(self):
            super().__init__()
            self.layer, self.mark = torch.nn.Linear(32, 32), torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.layer(x) + self.mark

    torch.manual_seed(0)
    data = [torch.randn(4, 32) for _ in range(BATCHES)]
    noise = torch.randn(BATCHES)
    noise = (noise - noise.mean()) / noise.std() - fall / math.sqrt(BATCHES)
    planted = {id(batch): 0.01 * float(value) for batch, value in zip(data, noise, strict=True)}

    def loss(model, batch):
        plain = 1 + 1e-6 * model(batch).square().mean()
        return plain + (planted[id(batch)] if id(batch) in planted and model.mark.item() else 0.0)

    small = outsize.shrink(
        Marked(), data, loss=loss, to="50%", methods="bf16", within=1.0, heal=2,
        training=[torch.randn(4, 32) for _ in range(2)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e3),
    )  # fmt: skip
    assert (small.plan.chosen.healed is not None) == used == bool(small.model.mark.item())
    assert small.plan.chosen.best_loss <= small.plan.allowed


@given(st.integers(2, 400))
@examples(100)
def test_the_halves_of_a_few_batches_lie_in_the_halves_of_all(count):
    subject = Subject(model=None, batches=list(range(count)), loss=max)
    few, halves = take_few(subject), make_judge(subject, None).halves
    assert len(few.batches) == len(set(few.batches)) == min(count, FEW_BATCHES)
    for part, whole in zip(make_judge(few, None).halves, halves, strict=True):
        assert set(part.batches) <= set(whole.batches)


def test_sets_are_measured_on_more_batches_than_candidates():
    model, loss, _ = small_networks.tokens(20)
    data = [torch.randint(0, small_networks.VOCABULARY, (2, 8)) for _ in range(MOST_BATCHES + 1)]
    asked = []

    def counted(model, batch):
        asked.append(id(batch))
        return loss(model, batch)

    plan = outsize.shrink(model, data, loss=counted, to="50%", methods=["bf16", "int8", "prune"], dry_run=True)
    assert (
        plan.batches == MOST_BATCHES
        and plan.notes[0] == f"data has more batches: the first {MOST_BATCHES} were measured"
    )
    times = [asked.count(id(batch)) for batch in data]
    assert times[-1] == 0 and min(times[:-1]) >= len(plan.sets) and max(times) >= min(times[:-1]) + len(plan.candidates)
    alone = next(one for one in plan.candidates if one.method == "bf16")
    assert alone.loss == pytest.approx(plan.loss, rel=1e-2)
