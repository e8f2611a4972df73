"""Which set `shrink` takes: one that is better by chance is not, one that is better is; and what that is judged on."""

import functools
import math

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


def built(name, losses, plain, methods=1, healed=False):
    """A set of so many methods whose batches have these losses."""
    found = measured(losses)
    noun = ShrinkSet(
        name=name, parts=(), bytes=1, loss=found.loss, seconds=1.0, before=0.0, healed=found.loss if healed else None
    )
    candidates = tuple(
        Candidate(method=f"{name} {number}", site="", level="", stage=Stage.FACTORS, touches=frozenset(), apply=id)
        for number in range(methods)
    )
    return BuiltSet(noun=noun, candidates=candidates, measured=found, distance=found.distance(measured(plain)))


def draw(seed, fall):
    """Losses of batches as they were, and twice with noise: the second with noise three times as wide, whose mean lies below the
    first one's by so many standard errors of their difference."""
    random = torch.Generator().manual_seed(seed)
    plain, near, far = torch.randn(3, BATCHES, generator=random, dtype=torch.float64)
    plain, near, far = 5 + plain, 5 + plain + 0.01 * near, 5 + plain + 0.03 * far
    difference = far - near
    far = far - difference.mean() - fall * difference.std() / math.sqrt(BATCHES)
    return plain.tolist(), near.tolist(), far.tolist()


@given(st.integers(0, 10**6), st.floats(0.01, 0.95), st.booleans())
@examples(60)
def test_a_mixture_that_is_better_by_chance_is_not_taken(seed, fall, healed):
    plain, near, far = draw(seed, fall)
    sets = [built("mixture", far, plain, methods=2, healed=healed), built("int8", near, plain, healed=healed)]
    assert choose_set(sets, 1, math.inf).noun.name == "int8"


@given(st.integers(0, 10**6), st.floats(1.05, 10), st.booleans())
@examples(60)
def test_a_mixture_that_is_better_is_taken(seed, rise, healed):
    plain, near, far = draw(seed, rise)
    sets = [built("int8", near, plain, healed=healed), built("mixture", far, plain, methods=2, healed=healed)]
    assert choose_set(sets, 1, math.inf).noun.name == "mixture"


@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 3), min_size=2, max_size=30))
@examples(100)
def test_of_two_losses_at_most_one_is_worse_and_what_both_share_says_nothing(rows):
    one, other, shared = zip(*rows, strict=True)
    first, second = measured(one), measured(other)
    assert not first.is_worse(first) and not (first.is_worse(second) and second.is_worse(first))
    both = [measured([1e3 * far + near for far, near in zip(shared, losses, strict=True)]) for losses in (one, other)]
    gap = abs(abs(first.loss - second.loss) - first.doubt(second))
    assert gap < 1e-6 or both[0].is_worse(both[1]) == first.is_worse(second)
    assert (
        first.distance(second) == second.distance(first) >= abs(first.loss - second.loss) / math.sqrt(len(rows)) - 1e-9
    )


@pytest.mark.parametrize(("fall", "taken"), [(0.3, "bf16"), (8.0, "int8")])
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
    assert all(one.model is None for one in healed if one.noun.name == "drop blocks")


@pytest.mark.parametrize(("rise", "within", "used"), [(0.3, 1.0, True), (0.3, 1e-4, False), (3.0, 1.0, False)])
def test_a_healing_is_left_out_where_it_does_harm_and_not_for_noise(rise, within, used):
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
    noise = (noise - noise.mean()) / noise.std() + rise / math.sqrt(BATCHES)
    planted = {id(batch): 0.01 * float(value) for batch, value in zip(data, noise, strict=True)}

    def loss(model, batch):
        plain = 1 + 1e-6 * model(batch).square().mean()
        return plain + (planted[id(batch)] if id(batch) in planted and model.mark.item() else 0.0)

    small = outsize.shrink(
        Marked(), data, loss=loss, to="50%", methods="bf16", within=within, heal=2,
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
