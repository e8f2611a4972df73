"""What a card's arena gives above what a step asks for: in bounds of estimates and in plans of fit."""

import types

import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra outsize[jax]")
optax = pytest.importorskip("optax", reason="optax is in the extra outsize[jax]")
import jax.numpy as jnp  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from losses import batch_of, mean_loss, plain_step, tanh_params  # noqa: E402

import outsize  # noqa: E402
from outsize.allocator import most_lost  # noqa: E402
from outsize.allocator.bfc import Bfc, BfcSettings  # noqa: E402
from outsize.allocator.driver import Driver  # noqa: E402
from outsize.core.units import MiB  # noqa: E402
from outsize.model.jax import arena  # noqa: E402
from outsize.model.jax.compiled import Compiled  # noqa: E402
from outsize.model.jax.fitting import chunks  # noqa: E402
from outsize.model.jax.liveness import follow  # noqa: E402


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@given(st.lists(st.tuples(st.integers(1, 300 * MiB), st.booleans()), min_size=1, max_size=40))
def test_no_chunk_is_larger_than_the_bound_says(requests):
    model = Bfc(Driver(), BfcSettings())
    held = []
    for number, (size, freed) in enumerate(requests):
        assert model.malloc(number, size, 0)
        assert model.live[number].size <= size + most_lost(size)
        held.append(number)
        if freed:
            model.free(held.pop(len(held) // 2))


def test_a_hole_that_is_almost_twice_the_request_is_lost_whole():
    model = Bfc(Driver(), BfcSettings(growth=False, limit=64 * MiB))
    model.malloc(0, 2 * MiB - 256, 0)
    model.malloc(1, MiB, 0)
    model.free(0)
    model.malloc(2, MiB, 0)
    assert model.live[2].size == MiB + most_lost(MiB) == 2 * MiB - 256


def test_the_bound_for_a_card_holds_where_every_argument_lies_in_a_hole_of_almost_twice_its_size():
    optimizer = optax.adam(1e-3)
    params = tanh_params((8, 512, 512, 4))
    args = params, optimizer.init(params), batch_of(256)
    found = outsize.estimate(plain_step(mean_loss, optimizer), *args, device="tpu")
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(args)]
    most = sum(-(-size // 256) * 512 - 256 for size in sizes)
    assert found.peak_allocated.bound >= found.peak_requested.bound + most - sum(sizes)
    assert outsize.estimate(plain_step(mean_loss, optimizer), *args, device="cpu").peak_allocated.known.name == "EXACT"


def test_results_in_donated_arguments_lose_nothing():
    sizes = [MiB] * 4
    donated = arena.most_lost(sizes, sizes, sum(sizes), 0)
    kept = arena.most_lost(sizes, sizes, 0, 0)
    assert donated < sum(map(most_lost, sizes)) + 4 * 256 + 1
    assert kept == 2 * sum(map(most_lost, sizes))


COMPILED = Compiled(arguments=8 * MiB, outputs=8 * MiB, temporaries=4 * MiB, aliased=8 * MiB, code=0, constants=0)
TREE = [f32(MiB // 4)] * 8


def card(**counts):
    return types.SimpleNamespace(platform="gpu", id=0, memory_stats=lambda: counts)


def test_a_plan_for_an_arena_that_grows_counts_every_argument_twice():
    lost = chunks.lost(
        card(bytes_limit=100 * MiB, pool_bytes=16 * MiB, largest_free_block_bytes=4 * MiB), TREE, (), COMPILED
    )
    assert lost == 8 * most_lost(MiB) + most_lost(4 * MiB)


def test_a_plan_for_a_whole_arena_counts_what_lies_between_arrays_and_one_end(monkeypatch):
    monkeypatch.setattr(chunks, "_arrays", lambda device: 5 * MiB)
    there = card(bytes_limit=64 * MiB, pool_bytes=64 * MiB, largest_free_block_bytes=57 * MiB)
    assert chunks.lost(there, TREE, (), COMPILED) == 2 * MiB + most_lost(4 * MiB)


def test_arrays_are_counted_once_and_only_while_they_live():
    device = jax.devices("cpu")[0]
    before = chunks._arrays(device)
    array = jnp.zeros((1024, 1024))
    same = jax.device_put(array, device)
    assert chunks._arrays(device) - before == 4 * MiB
    array.delete()
    same.delete() if not same.is_deleted() else None
    assert chunks._arrays(device) == before


def test_on_a_cpu_nothing_is_lost_and_a_plan_stays_exact():
    assert chunks.lost(jax.devices("cpu")[0], TREE, (), COMPILED) == 0


def test_a_plan_on_a_card_is_a_bound_with_a_part_for_what_the_arena_loses(monkeypatch):
    from outsize.model.jax.fitting import search

    params, optimizer, batch = tanh_params((8, 32, 4)), optax.adam(1e-3), batch_of(64)
    exact = outsize.fit(params, mean_loss, optimizer, batch, budget="1GiB", dry_run=True).plan
    monkeypatch.setattr(search, "lost", lambda *given: 12_345)
    found = outsize.fit(params, mean_loss, optimizer, batch, budget="1GiB", dry_run=True).plan
    assert found.peak() == exact.peak() + 12_345
    assert found.steps[0].peaks[0].known.name == "BOUND"
    assert {part.name: part.bytes for part in found.steps[0].parts}["between arrays"] == 12_345
    with pytest.raises(outsize.BudgetError):
        outsize.fit(params, mean_loss, optimizer, batch, budget=12_345, dry_run=True)


def test_a_transposed_stack_is_counted_while_a_product_may_still_read_the_one_before():
    def loss(params, batch):
        def cell(h, x):
            h = jnp.tanh(x + h)
            return h, h

        _, stack = jax.lax.scan(cell, jnp.zeros((32, 64)) + params["b"], batch["x"].swapaxes(0, 1))
        return ((stack.swapaxes(0, 1) @ params["out"]) ** 2).mean()

    params, batch = {"b": f32(64), "out": f32(64, 8)}, {"x": f32(32, 128, 64)}
    found = follow(jax.make_jaxpr(jax.grad(loss))(params, batch))
    assert [value.name for value in found.alive].count("transpose") == 2
    assert found.temporaries >= 4 * (4 * 32 * 128 * 64)


def test_the_gradient_of_a_tanh_is_computed_from_its_result():
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.tanh(x * x).sum()))(f32(1024, 1024))
    assert follow(closed).temporaries <= 4 * MiB
