"""What a step of JAX takes: XLA's own bytes where the device is here, a bound of the jaxpr elsewhere."""

import functools
import os
import subprocess
import sys
import textwrap

import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")
optax = pytest.importorskip("optax", reason="optax is in the extra outsize[jax]")
import jax.numpy as jnp  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from losses import batch_norm_loss, batch_of, mean_loss, plain_step, scan_loss, sum_loss, tanh_params  # noqa: E402

import outsize  # noqa: E402
from outsize.core.cards import find_card  # noqa: E402
from outsize.core.noun import Known  # noqa: E402
from outsize.model.jax.arena import arena_of  # noqa: E402
from outsize.model.jax.fitting.step import KEEPS, ORDERS  # noqa: E402
from outsize.model.jax.liveness import follow  # noqa: E402

OPTIMIZER = optax.adam(1e-3)


def shapes(*trees):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trees)


def arguments(rows=256, widths=(8, 32, 32, 32, 4)):
    params = tanh_params(widths)
    return shapes(params, OPTIMIZER.init(params), batch_of(rows))


def compiled(function, args, donate=()):
    found = jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*args).compile().memory_analysis()
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
    return sum(sizes) - found.alias_size_in_bytes + found.generated_code_size_in_bytes


def test_an_estimate_for_this_device_is_what_xla_compiled():
    step = plain_step(mean_loss, OPTIMIZER)
    found = outsize.estimate(step, *arguments(), device="cpu")
    assert found.peak_reserved.known is Known.EXACT
    assert found.peak_reserved.bytes == found.peak_reserved.bound == compiled(step, arguments())
    assert sum(part.bytes for part in found.parts) == found.peak_allocated.bytes


def test_parts_are_told_apart_by_names_and_types():
    found = outsize.estimate(plain_step(mean_loss, OPTIMIZER), *arguments(), device="cpu")
    sizes = {part.name: part.bytes for part in found.parts}
    params, state, batch = arguments()
    for name, tree in (("weights", params), ("optimizer state", state), ("inputs", batch)):
        assert sizes[name] == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_what_the_users_own_jit_donates_is_not_counted_twice():
    step = plain_step(mean_loss, OPTIMIZER).__wrapped__
    plain, donated = (
        outsize.estimate(jax.jit(step, donate_argnums=donate), *arguments(), device="cpu").parts
        for donate in ((), (0, 1))
    )
    outputs = [{part.name: part.bytes for part in parts}.get("outputs", 0) for parts in (plain, donated)]
    assert outputs[0] > 10_000 and outputs[1] < 1_000


def test_without_the_device_it_is_a_bound_with_lines_and_a_timeline():
    found = outsize.estimate(plain_step(mean_loss, OPTIMIZER), *arguments(), device="tpu", budget="1GiB")
    assert found.peak_requested.known is Known.BOUND
    assert found.fits is True
    assert "no tpu device here" in found.notes[0]
    assert any(part.name.startswith("losses.py:") for part in found.lines)
    assert max(layers.total for layers in found.timeline) == found.peak_requested.bytes
    assert "temporaries" in str(found)


def test_nothing_is_allocated_and_a_builder_may_be_given():
    def build(rows):
        params = {"w": jnp.ones((1 << 20, 1 << 10))}  # 4 GiB
        return params, jnp.ones((rows, 1 << 20))

    def step(params, x):
        return (x @ params["w"]).sum()

    found = outsize.estimate(step, build=build, batch=16, device="cpu", budget="8GiB")
    assert found.fits and found.peak_reserved.bytes > 4 << 30
    line = found.growth[0]
    assert line.at(32) == pytest.approx(
        outsize.estimate(step, build=lambda: build(32), device="cpu").peak_reserved.bytes, rel=0.01
    )
    largest = found.largest[0].largest
    assert largest == pytest.approx((4 << 30) // (4 << 20), rel=0.05)


def test_arrays_that_a_step_closes_over_are_counted():
    weights = jnp.ones((512, 512)) + jnp.arange(512.0)
    for device in ("cpu", "tpu"):
        found = outsize.estimate(
            lambda x: (x @ weights).sum(), jax.ShapeDtypeStruct((8, 512), jnp.float32), device=device
        )
        assert found.peak_reserved.bytes >= weights.nbytes + 8 * 512 * 4


def test_a_builder_that_looks_at_values_is_run():
    def build():
        size = int(jnp.ones(3).sum())
        return (jnp.ones((size, size)),)

    found = outsize.estimate(lambda x: x @ x, build=build, device="cpu")
    assert any("built for real" in note for note in found.notes)


def test_a_card_is_judged_by_the_arena_that_xla_takes(monkeypatch):
    card = find_card("rtx4090")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert arena_of(card) == int(card.total * 0.75)
    found = outsize.estimate(
        lambda x: x + 1, jax.ShapeDtypeStruct((2**30, 2), jnp.float32), device="tpu", card="rtx4090"
    )
    assert found.capacity == arena_of(card) and found.fits
    assert any("XLA_PYTHON_CLIENT_MEM_FRACTION" in note for note in found.notes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found = outsize.estimate(
        lambda x: x + 1, jax.ShapeDtypeStruct((2**30, 2), jnp.float32), device="tpu", card="rtx4090"
    )
    assert found.fits is False
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert arena_of(card) == card.usable
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "much")
    with pytest.raises(outsize.InputError, match="no part of the card"):
        arena_of(card)


def test_a_callback_makes_it_a_guess_that_never_says_fits():
    def step(x):
        return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()

    found = outsize.estimate(step, jax.ShapeDtypeStruct((64,), jnp.float32), device="tpu", budget="1GiB")
    assert found.fits is None and "a callback to Python" in found.guesses[0]


def test_mistakes_are_named_in_one_sentence():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)

    def looks(x):
        return 1 if x.sum() > 0 else 2

    for call, words in (
        (lambda: outsize.estimate(looks, x, device="cpu"), "cannot be traced by jax.jit"),
        (lambda: outsize.estimate(jnp.sin, x, loader=object()), "loader="),
        (lambda: outsize.estimate(jnp.sin, x, device="abacus"), "abacus"),
        (lambda: outsize.estimate(jnp.sin, x, batch=3), "needs build="),
        (lambda: outsize.estimate(jnp.sin), "no array of JAX"),
    ):
        with pytest.raises(outsize.InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def least_compiled(function, args):
    """XLA:CPU's bytes, barriers kept, in the better of its two orders."""
    lowered = jax.jit(function, keep_unused=True).lower(*args)
    found = []
    for options in (KEEPS, KEEPS | ORDERS):
        try:
            found.append(lowered.compile(compiler_options=options).memory_analysis())
        except Exception as error:
            assert "No such compile option" in str(error)
            pytest.skip("this XLA:CPU cannot order for memory, as a card's XLA does")
    return min(
        one.argument_size_in_bytes + one.output_size_in_bytes + one.temp_size_in_bytes - one.alias_size_in_bytes
        for one in found
    )


@pytest.mark.parametrize("loss", [mean_loss, sum_loss, scan_loss, batch_norm_loss], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_bound_is_not_below_what_xla_takes(loss, again):
    if again and loss is scan_loss:
        pytest.skip("the same as another case")
    step = plain_step(jax.checkpoint(loss) if again else loss, OPTIMIZER)
    widths = (8, 64, 64, 64) if loss is scan_loss else (8, 64, 64, 64, 4)
    args = arguments(2048, (8, 64, 64, 64, 64) if loss is scan_loss else widths)
    bound = follow(jax.make_jaxpr(step)(*args)).bound
    truth = least_compiled(step, args)
    assert truth <= bound <= 2 * truth


OPERATORS = (
    lambda x: jnp.tanh(x) * 2, jnp.sort, lambda x: x @ x.T, lambda x: jnp.cumsum(x, 0), lambda x: jnp.exp(x - x.max(0)),
    lambda x: x.T, lambda x: jax.nn.relu(x) + x, lambda x: jnp.concatenate([x, x * 2]),
    lambda x: x / (1 + (x**2).sum(-1, keepdims=True)),
)  # fmt: skip


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(OPERATORS) - 1), min_size=1, max_size=6))
def test_the_bound_holds_for_programs_of_any_operators(numbers):
    def program(x):
        return functools.reduce(lambda value, number: OPERATORS[number](value), numbers, x).sum()

    args = (jax.ShapeDtypeStruct((128, 128), jnp.float32),)
    assert least_compiled(program, args) <= follow(jax.make_jaxpr(program)(*args)).bound


def test_the_command_line_takes_a_step_of_jax(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp
        def make():
            def step(params, x):
                return jax.grad(lambda params: jnp.tanh(x @ params).sum())(params)
            return jax.jit(step), jnp.ones((64, 64)), jnp.ones((256, 64))
        """)
    )
    answer = subprocess.run(
        [sys.executable, "-m", "outsize", "estimate", "train:make", "--device", "cpu", "--budget", "1GiB", "--json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert '"name": "outputs"' in answer.stdout and '"bytes": 16384' in answer.stdout
    answer = subprocess.run(
        [sys.executable, "-m", "outsize", "estimate", "train:make", "--device", "cpu", "--budget", "1KiB"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert answer.returncode == 1 and "does not fit" in answer.stdout and not answer.stderr


def test_nothing_of_jax_or_torch_is_imported_before_it_is_needed():
    code = (
        "import sys, outsize; outsize.estimate; outsize.fit; print([n for n in ('jax', 'torch') if n in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


SPREAD = """
import jax, jax.numpy as jnp, numpy as np, outsize
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("d",))
w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
x = jax.ShapeDtypeStruct((4096, 64), jnp.float32, sharding=NamedSharding(mesh, P("d")))
step = lambda w, x: jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
found = jax.jit(step).lower(w, x).compile().memory_analysis()
one = 64 * 64 * 4 + 4096 * 64 * 4 // 4
assert found.argument_size_in_bytes == one
for device in ("cpu", "tpu"):
    said = outsize.estimate(step, w, x, device=device)
    assert sum(part.bytes for part in said.parts if part.name == "inputs") == one, said.parts
    assert any("of one device" in note for note in said.notes)
    assert said.peak_requested.bound >= one + found.temp_size_in_bytes
"""


def test_of_arguments_that_are_spread_over_devices_each_device_holds_its_part():
    spread = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run([sys.executable, "-c", SPREAD], env={**os.environ, **spread}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
