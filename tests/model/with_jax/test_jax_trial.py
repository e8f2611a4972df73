"""The first steps time a few plans that fit, and the fastest stays."""

import time
import types

import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")
optax = pytest.importorskip("optax", reason="optax is in the extra outsize[jax]")
from losses import batch_of, copy, farthest, mean_loss, plain_step, tanh_params  # noqa: E402

import outsize  # noqa: E402
from outsize.model.jax.fitting.choice import Choice  # noqa: E402
from outsize.model.jax.fitting.costs import work_of  # noqa: E402
from outsize.model.jax.fitting.planner import Planned  # noqa: E402
from outsize.model.jax.fitting.segments import recomputed  # noqa: E402
from outsize.model.jax.fitting.trial import ROUNDS, STEPS, Trial  # noqa: E402

OPTIMIZER = optax.adam(1e-3)
LARGE = (8, 256, 256, 256, 4)


def fit(params, batch, budget, **options):
    return outsize.fit(params, mean_loss, OPTIMIZER, batch, budget=budget, **options)


@pytest.fixture(scope="module")
def half():
    """(params, batch, half of what the plain step takes)"""
    params, batch = tanh_params(LARGE), batch_of(2048)
    return params, batch, fit(params, batch, "10GiB", dry_run=True).plan.plain // 2


def test_steps_that_are_timed_train_as_all_others_and_every_plan_fits(half):
    params, batch, budget = half
    fitted = fit(params, batch, budget)
    plans = next(iter(fitted._trials.values())).plans
    assert 2 <= len(plans) <= 4 and len({plan.choice for plan in plans}) == len(plans)
    assert all(plan.plan.peak() <= budget for plan in plans)
    alone = [plan.choice for plan in plans if not plan.choice.segments]
    assert len(alone) >= 2 and len({choice.slices for choice in alone}) >= 2  # one writes these by hand
    assert f"the first {ROUNDS * STEPS * len(plans)} steps time the plans" in fitted.plan.notes[-1]
    step = plain_step(mean_loss, OPTIMIZER)
    mine, state, other, kept = copy(params), fitted.init(params), copy(params), OPTIMIZER.init(params)
    for number in range(ROUNDS * STEPS * len(plans) + 1):
        assert fitted.settled is (number >= ROUNDS * STEPS * len(plans))
        mine, state, _ = fitted.step(mine, state, batch)
        other, kept, _ = step(other, kept, batch)
        assert fitted.plan.peak() <= budget
    assert farthest(mine, other) < 1e-4
    assert fitted.choice in [plan.choice for plan in plans]
    assert "the fastest stays" in fitted.plan.notes[-1] and " ms" in fitted.plan.notes[-1]
    assert not any("without=('timing',)" in note for note in fitted.plan.notes)


def test_nothing_is_timed_where_the_user_says_so_where_nothing_runs_and_where_the_plain_step_fits(half):
    params, batch, budget = half
    for options in ({"without": ("timing",)}, {"dry_run": True}, {"budget": 4 * budget}):
        fitted = fit(params, batch, **{"budget": budget} | options)
        assert fitted.settled and not any("first" in note for note in fitted.plan.notes)


def pretended(plan, choice, seconds, calls):
    """A plan whose steps take this long, the first of them longer."""

    def program(*arguments):
        time.sleep(seconds if choice in calls else 0.2)
        calls.append(choice)
        return arguments

    candidate = types.SimpleNamespace(compiled=types.SimpleNamespace(program=program), peak=1)
    return Planned(plan, choice, candidate, None, None)


def test_the_fastest_stays_whatever_the_first_step_of_a_plan_takes():
    calls, seconds = [], {Choice(slices=2): 0.05, Choice(slices=4): 0.01, Choice(slices=8): 0.03}
    plan = fit(tanh_params(), batch_of(8), "1GiB", dry_run=True).plan
    trial = Trial([pretended(plan, choice, each, calls) for choice, each in seconds.items()])
    while not trial.over:
        assert trial.run((1, 2)) == (1, 2)
    assert len(calls) == 3 * ROUNDS * STEPS
    assert trial.fastest().choice == Choice(slices=4)
    assert "2 slices 5" in trial.fastest().plan.notes[-1] and "4 slices 1" in trial.fastest().plan.notes[-1]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_work_counts_what_runs_again_and_what_is_written(platform):
    params, batch = tanh_params((64, *[64] * 8, 4)), {"x": jax.numpy.ones((512, 64)), "y": jax.numpy.ones((512, 4))}

    def work(loss):
        return work_of(jax.make_jaxpr(jax.grad(loss))(params, batch), platform)

    plain = work(mean_loss)
    assert 1.1 * plain < work(recomputed(mean_loss, 4)) < 1.5 * plain  # a forward pass is a third of a step
    assert work(recomputed(mean_loss, 4, "products")) == pytest.approx(plain, rel=0.2)


def test_work_of_a_loop_is_that_of_all_its_rounds():
    params, batch = tanh_params((64, *[64] * 8, 4)), {"x": jax.numpy.ones((512, 64)), "y": jax.numpy.ones((512, 4))}

    def work(rounds):
        body = lambda carry, _: (carry + mean_loss(params, batch), None)  # noqa: E731
        return work_of(jax.make_jaxpr(lambda: jax.lax.scan(body, 0.0, None, length=rounds)[0])(), "gpu")

    assert work(12) == pytest.approx(12 * work(1), rel=0.01)
