"""What waits on the host: values for the backward pass, and optimizer state. XLA:CPU knows the placements, not the saving."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")
optax = pytest.importorskip("optax", reason="optax is in the extra outsize[jax]")
import jax.numpy as jnp  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402
from losses import batch_of, copy, farthest, mean_loss, plain_step, tanh_params  # noqa: E402

import outsize  # noqa: E402
from outsize.model.jax.compiled import Compiled  # noqa: E402
from outsize.model.jax.fitting import search  # noqa: E402
from outsize.model.jax.fitting.batches import read_axes  # noqa: E402
from outsize.model.jax.fitting.choice import Choice  # noqa: E402
from outsize.model.jax.fitting.segments import recomputed  # noqa: E402
from outsize.model.jax.fitting.slices import Rule  # noqa: E402
from outsize.model.jax.fitting.step import Work, arguments_of, compile_step, placed, shapes_of, step_for  # noqa: E402
from outsize.model.jax.liveness import follow  # noqa: E402

ADAM = optax.adam(1e-3)


def named_loss(params, batch):
    x = batch["x"]
    for w, b in params:
        x = checkpoint_name(jnp.tanh(x @ w + b), "layer")
    return ((x - batch["y"]) ** 2).mean()


def work_of(loss, optimizer=ADAM):
    return Work(loss, optimizer, Rule.MEAN, jax.devices()[0])


def bytes_by_liveness(work, shapes, choice):
    closed = jax.make_jaxpr(step_for(work, shapes.axes, choice))(*arguments_of(work, shapes, choice))
    return follow(closed).peak


@pytest.mark.parametrize(("loss", "kept"), [(mean_loss, ""), (mean_loss, "products"), (named_loss, "names")])
def test_values_that_wait_on_the_host_are_not_counted_on_the_device(loss, kept):
    params, batch = tanh_params((8, *[64] * 8, 4)), batch_of(2048)
    work = work_of(loss)
    shapes = shapes_of(work, params, batch, read_axes(batch))
    here = Choice(segments=8, kept=kept)
    away = Choice(segments=8, kept=kept, kept_away=True)
    less = bytes_by_liveness(work, shapes, here) - bytes_by_liveness(work, shapes, away)
    assert less > 4 * 2048 * 64 * 4  # of seven hidden layers at least four
    again = jax.make_jaxpr(jax.grad(recomputed(loss, away.segments, kept, True)))(params, batch)
    assert "<host>" in str(again)


def test_twenty_steps_with_optimizer_state_on_the_host_are_the_plain_ones():
    params, batch = tanh_params((8, 64, 64, 4)), batch_of(64)
    work = work_of(mean_loss)
    shapes = shapes_of(work, params, batch, read_axes(batch))
    choice = Choice(slices=2, segments=3, kept_away=True, state_away=True)
    program = compile_step(work, shapes, choice).program
    mine, state = copy(params), placed(ADAM.init(params), work.device, "pinned_host")
    step, other, kept = plain_step(mean_loss, ADAM), copy(params), ADAM.init(params)
    for _ in range(20):
        mine, state, _ = program(mine, state, batch)
        other, kept, _ = step(other, kept, batch)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.nbytes >= 4096}
    assert kinds == {"pinned_host"}
    assert farthest(mine, other) < 1e-5
    assert bytes_by_liveness(work, shapes, Choice()) - bytes_by_liveness(work, shapes, Choice(state_away=True)) > 30_000


@pytest.fixture
def pretended_card(monkeypatch):
    """A device whose compilations take what liveness says, and count the host apart."""

    def compiled(work, shapes, choice):
        peak = bytes_by_liveness(work, shapes, choice)
        away = 100_000 * (choice.kept_away + choice.state_away)
        return Compiled(peak, 0, 0, 0, 0, 0, away, lambda *args: compile_step(work, shapes, choice).program(*args))

    monkeypatch.setattr(search, "compile_step", compiled)
    monkeypatch.setattr(search.Search, "can_offload", property(lambda self: "offload" not in self.forbidden))


def test_the_host_is_used_where_nothing_else_fits_and_never_past_its_limit(pretended_card):
    params, batch, without = tanh_params((8, 128, 128, 4)), batch_of(512), ("slices", "order")
    with pytest.raises(outsize.BudgetError) as caught:
        outsize.fit(params, mean_loss, ADAM, batch, budget="1KiB", without=(*without, "offload"))
    smallest = caught.value.smallest
    fitted = outsize.fit(params, mean_loss, ADAM, batch, budget=smallest - 50_000, without=without)
    assert fitted.choice.state_away and fitted.plan.away == 100_000 * (1 + fitted.choice.kept_away)
    assert any(remedy.name == "offload" and "page-locked" in remedy.how for remedy in fitted.plan.remedies)
    after, _, _ = fitted.step(copy(params), fitted.init(params), batch)
    expected, _, _ = plain_step(mean_loss, ADAM)(params, ADAM.init(params), batch)
    assert farthest(after, expected) < 1e-5
    work = work_of(mean_loss)
    little = search.Search(work, shapes_of(work, params, batch, read_axes(batch)), frozenset(without), host=99_999)
    assert little.find(smallest - 50_000) is None
