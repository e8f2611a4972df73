"""A fitted step of JAX stays inside its budget and gives what the plain step gives."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")
optax = pytest.importorskip("optax", reason="optax is in the extra outsize[jax]")
import jax.numpy as jnp  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from losses import (  # noqa: E402
    batch_norm_loss,
    batch_of,
    copy,
    farthest,
    inside_jit,
    masked_loss,
    mean_loss,
    pair_loss,
    plain_step,
    scan_loss,
    sum_loss,
    tanh_params,
)

import outsize  # noqa: E402
from outsize.model.jax.fitting.batches import read_axes  # noqa: E402
from outsize.model.jax.fitting.learn import learn  # noqa: E402
from outsize.model.jax.fitting.segments import cuts_of, recomputed  # noqa: E402
from outsize.model.jax.fitting.slices import Rule, gradients_of, sliced  # noqa: E402

OPTIMIZER = optax.adam(1e-3)
LARGE = (8, 256, 256, 256, 4)


def plain_bytes(params, loss, batch, **options):
    return outsize.fit(params, loss, OPTIMIZER, batch, budget="10GiB", dry_run=True, **options).plan.plain


def test_twenty_steps_of_adam_are_those_of_the_plain_step_inside_half_the_memory():
    params, batch = tanh_params(LARGE), batch_of(2048)
    budget = plain_bytes(params, mean_loss, batch) // 2
    fitted = outsize.fit(params, mean_loss, OPTIMIZER, batch, budget=budget)
    assert fitted.plan.fits and fitted.plan.peak() <= budget < fitted.plan.plain
    assert fitted.choice.slices > 1 and "slices" in str(fitted)
    step = plain_step(mean_loss, OPTIMIZER)
    mine, state, other, kept = copy(params), fitted.init(params), copy(params), OPTIMIZER.init(params)
    for _ in range(20):
        mine, state, value = fitted.step(mine, state, batch)
        other, kept, plain = step(other, kept, batch)
    assert float(value) == pytest.approx(float(plain), rel=1e-4)
    assert farthest(mine, other) < 1e-4
    assert fitted.measured is None  # XLA:CPU does not count


def test_the_peak_of_a_plan_is_that_of_what_runs():
    params, batch = tanh_params(LARGE), batch_of(1024)
    fitted = outsize.fit(params, mean_loss, OPTIMIZER, batch, budget=plain_bytes(params, mean_loss, batch) // 2)
    found = fitted._now.candidate.compiled.program.memory_analysis()
    sizes = (
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    )
    assert fitted.plan.peak() == sizes + found.generated_code_size_in_bytes
    assert sum(part.bytes for part in fitted.plan.steps[0].parts) == fitted.plan.peak()


def test_without_slices_the_loss_is_cut_and_computed_again():
    params, batch = tanh_params((8, *[64] * 8, 4)), batch_of(2048)
    plain = plain_bytes(params, mean_loss, batch)
    fitted = outsize.fit(params, mean_loss, OPTIMIZER, batch, budget=plain * 8 // 10, without=("slices", "order"))
    assert fitted.choice.segments and fitted.choice.slices == 1
    assert fitted.plan.peak() <= plain * 8 // 10
    after, _, value = fitted.step(copy(params), fitted.init(params), batch)
    other, _, expected = plain_step(mean_loss, OPTIMIZER)(params, OPTIMIZER.init(params), batch)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert farthest(after, other) < 1e-4


def test_a_budget_that_is_too_small_names_the_smallest_that_works():
    params, batch = tanh_params((8, 16, 4)), batch_of(8)
    with pytest.raises(outsize.BudgetError) as caught:
        outsize.fit(params, mean_loss, OPTIMIZER, batch, budget="1KiB")
    smallest = caught.value.smallest
    assert smallest > 1024
    fitted = outsize.fit(params, mean_loss, OPTIMIZER, batch, budget=smallest)
    assert fitted.plan.peak() <= smallest


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (mean_loss, Rule.MEAN),
        (sum_loss, Rule.SUM),
        (pair_loss, Rule.PAIR),
        (masked_loss, None),
        (batch_norm_loss, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_how_slices_add_up_is_found_and_what_does_not_is_said(loss, rule):
    params, batch = tanh_params(), batch_of(64)
    learnt = learn(params, loss, batch, read_axes(batch))
    assert learnt.rule is rule
    if loss is masked_loss:
        assert "return (total, count)" in learnt.why


def test_a_loss_that_does_not_split_is_not_sliced_and_the_plan_says_why():
    params, batch = tanh_params(LARGE), batch_of(512)
    plain = plain_bytes(params, batch_norm_loss, batch)
    try:
        plan = outsize.fit(params, batch_norm_loss, OPTIMIZER, batch, budget=plain * 9 // 10).plan
    except outsize.BudgetError as error:
        plan = error.plan
    assert any("not used: slices" in note for note in plan.notes)
    assert not any(remedy.name == "slices" for remedy in plan.remedies)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.sampled_from([(mean_loss, Rule.MEAN), (sum_loss, Rule.SUM), (pair_loss, Rule.PAIR)]),
    st.integers(1, 11), st.integers(0, 5), st.sampled_from(["", "products", "names"]), st.booleans(),
)  # fmt: skip
def test_slices_and_segments_of_any_number_give_the_plain_gradient(which, slices, segments, kept, away):
    (loss, rule), params, batch = which, tanh_params((8, 16, 16, 4)), batch_of(11)
    again = recomputed(loss, segments, kept, away) if segments else loss
    found = jax.jit(sliced(again, rule, read_axes(batch), slices))(params, batch)
    plain = gradients_of(loss, rule)(params, batch)
    scale = max(1.0, float(jnp.abs(plain[0])))
    assert farthest(found, plain) < 1e-5 * scale * 10


@pytest.mark.parametrize("loss", [scan_loss, inside_jit], ids=["scan", "jit"])
def test_loops_and_calls_inside_the_loss_are_computed_again(loss):
    params, batch = tanh_params((8, 16, 16, 16)), batch_of(8)
    if loss is inside_jit:
        batch["y"] = jnp.zeros((8, 16))
    found = jax.jit(jax.value_and_grad(recomputed(loss, 3)))(params, batch)
    assert farthest(found, jax.value_and_grad(loss)(params, batch)) < 1e-5
    again = str(jax.make_jaxpr(jax.grad(recomputed(loss, 3)))(params, batch))
    assert "checkpoint" in again or "remat" in again


def test_cuts_are_where_few_bytes_are_alive():
    def narrow(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)  # wide
            x = jnp.sin(x @ w.T)  # narrow
        return x.sum()

    jaxpr = jax.make_jaxpr(narrow)(jnp.ones((16, 4)), jnp.ones((4, 64))).jaxpr
    cuts = cuts_of(jaxpr, 4)
    assert len(cuts) == 3
    assert all(jaxpr.eqns[cut - 1].outvars[0].aval.shape == (16, 4) for cut in cuts)


def test_random_keys_and_shared_arrays_are_not_cut():
    def loss(params, batch):
        return ((batch["x"] * batch["scale"]) @ params - batch["y"]).mean()

    batch = {"x": jnp.ones((6, 3)), "y": jnp.ones((6, 2)), "scale": jnp.ones(3), "key": jax.random.key(0)}
    assert read_axes(batch).axes == (None, None, 0, 0)
    assert learn(jnp.ones((3, 2)), loss, batch, read_axes(batch)).rule is Rule.MEAN
    assert read_axes({"x": jnp.ones((4, 6)), "y": jnp.ones(6)}, {"x": 1, "y": 0}).rows == 6
    with pytest.raises(outsize.InputError, match="different arrays"):
        read_axes({"x": jnp.ones((4, 6)), "y": jnp.ones(6)}, 0)


def test_own_step_gives_gradients_and_another_batch_gets_its_own_plan():
    params, batch = tanh_params(), batch_of(64)
    own = outsize.fit(params, mean_loss, OPTIMIZER, batch, budget="1GiB", own_step=True)
    for rows in (64, 24):
        value, grads = own.gradients(params, batch_of(rows))
        expected = jax.value_and_grad(mean_loss)(params, batch_of(rows))
        assert farthest((value, grads), expected) < 1e-5
    with pytest.raises(outsize.InputError, match="own_step"):
        own.step(params, own.init(params), batch)


def test_options_that_mean_nothing_here_are_refused_in_one_sentence():
    params, batch = tanh_params(), batch_of(8)
    for options, words in (
        ({"host": "1GiB"}, "host="), ({"clip": 1.0}, "clip_by_global_norm"), ({"scaler": object()}, "scaler"),
        ({"plan": "plan.json"}, "XLA compiles a step anew"),
        ({"allow": "approximate"}, "exact"), ({"without": ("pages",)}, "slices, checkpoint, order, offload"),
        ({"device": "cuda:7"}, "cuda:7"), ({"batch_axis": "ends"}, "no axis"),
    ):  # fmt: skip
        with pytest.raises(outsize.InputError, match=words) as caught:
            outsize.fit(params, mean_loss, OPTIMIZER, batch, budget="1GiB", **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(outsize.InputError, match="own_step=True"):
        outsize.fit(params, mean_loss, None, batch, budget="1GiB")
    with pytest.raises(outsize.InputError, match=r"\(total, count\)"):
        outsize.fit(params, lambda params, batch: batch["x"] @ params[0][0], OPTIMIZER, batch, budget="1GiB")


def test_a_plan_is_made_of_shapes_alone():
    params, batch = (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), t) for t in (tanh_params(), batch_of(8))
    )
    planned = outsize.fit(params, mean_loss, OPTIMIZER, batch, budget="1GiB", dry_run=True)
    assert planned.plan.fits
    with pytest.raises(outsize.InputError, match="only planned"):
        planned.step(params, (), batch)
