"""Random numbers depend on the seed, the call and their place alone."""

import math

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.array.graph.frame import Frame
from outsize.array.random import Random, default_rng

LAWS = {
    "random": lambda rng, size: rng.random(size),
    "random float32": lambda rng, size: rng.random(size, np.float32),
    "normal": lambda rng, size: rng.standard_normal(size),
    "normal float32": lambda rng, size: rng.standard_normal(size, np.float32),
    "dice": lambda rng, size: rng.integers(1, 7, size),
    "bytes": lambda rng, size: rng.integers(-128, 128, size, np.int8),
}


def by_place(node, place):
    """The number at one place of the flattened array, from the generator's definition."""
    words = np.random.Philox(key=np.array(node.key, np.uint64)).random_raw(place + 2)
    if node.law == "normal":
        one, two = (int(word >> 11) for word in words[place // 2 * 2 :][:2])
        radius, angle = math.sqrt(-2 * math.log((one + 1) / 2**53)), 2 * math.pi * two / 2**53
        return radius * (math.cos(angle) if place % 2 == 0 else math.sin(angle))
    word = int(words[place])
    if node.law == "integers":
        return node.bounds[0] + (word * node.bounds[1] >> 64)
    bits = 24 if node.dtype == np.float32 else 53
    return (word >> 64 - bits) / 2**bits


@examples(60)
@given(
    law=st.sampled_from(sorted(LAWS)),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    seed=st.integers(0, 2**70),
    data=st.data(),
)
def test_every_region_has_the_numbers_of_its_places(law, shape, seed, data):
    node = LAWS[law](default_rng(seed), shape).node
    assert isinstance(node, Random) and node.shape == shape
    region = tuple(tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
    frame = Frame(np.empty(1 << 20, np.uint8), {})
    block = frame.evaluate(node, region)
    wide = np.zeros(tuple(2 * (b - a) for a, b in region), node.dtype)[(*(slice(None, None, 2) for _ in region), ...)]
    frame.evaluate(node, region, wide)  # a target with gaps
    places = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(a, b) for a, b in region)]
    expected = np.array([by_place(node, int(place)) for place in places.reshape(-1)]).reshape(places.shape)
    np.testing.assert_allclose(block, expected.astype(node.dtype), rtol=1e-6 if node.dtype == np.float32 else 1e-12)
    np.testing.assert_array_equal(wide, block)


@examples(15)
@given(
    law=st.sampled_from(sorted(LAWS)),
    rows=st.integers(1, 400),
    columns=st.integers(1, 300),
    budget=st.integers(1 << 21, 1 << 23),
)
def test_budgets_tiles_and_transpositions_do_not_change_them(law, rows, columns, budget, tmp_path_factory):
    whole = LAWS[law](default_rng(3), (rows, columns)).compute()
    again = LAWS[law](default_rng(3), (rows, columns))
    folder = tmp_path_factory.mktemp("random")
    np.testing.assert_array_equal(again.save(folder / "x.npy", budget=budget).compute(), whole)
    np.testing.assert_array_equal(again.T.save(folder / "y.npy", budget=budget).compute(), whole.T)
    np.testing.assert_array_equal(again[rows // 3 :, ::2].compute(), whole[rows // 3 :, ::2])


def test_they_are_drawn_as_the_law_says():
    rng = default_rng(11)
    even, bell, dice = (
        rng.random((500, 400)).compute(),
        rng.normal(3.0, 2.0, (500, 400)).compute(),
        rng.integers(1, 7, 60_000),
    )
    assert even.min() >= 0.0 and even.max() < 1.0
    assert abs(even.mean() - 0.5) < 0.005 and abs(even.var() - 1 / 12) < 0.001
    assert abs(bell.mean() - 3.0) < 0.02 and abs(bell.std() - 2.0) < 0.02
    assert abs(np.mean(np.abs(bell - 3.0) < 2.0) - 0.6827) < 0.005
    counts = np.bincount(dice.compute(), minlength=7)
    assert counts[0] == 0 and counts.size == 7 and np.all(abs(counts[1:] - 10_000) < 500)
    assert abs(np.corrcoef(even[:, :-1].reshape(-1), even[:, 1:].reshape(-1))[0, 1]) < 0.01


def test_parameters_may_be_arrays_and_each_element_has_a_number_of_its_own():
    for draw in (
        lambda rng, a, b, **size: rng.normal(a, b, **size),
        lambda rng, a, b, **size: rng.uniform(a, b, **size),
    ):
        means = np.arange(4.0)[:, None]
        drawn = draw(default_rng(3), means, means + np.ones(5))
        assert drawn.shape == (4, 5)
        assert np.unique(draw(default_rng(3), np.zeros((4, 5)), 1.0).compute()).size == 20
        assert draw(default_rng(3), outsize.open(means), 9.0, size=(2, 4, 3)).shape == (2, 4, 3)
        with pytest.raises(outsize.InputError, match="do not go into"):
            draw(default_rng(3), means, 9.0, size=4)


def test_calls_and_seeds_draw_other_numbers_and_the_same_seed_the_same():
    rng = default_rng(5)
    first, second = rng.random(1000).compute(), rng.random(1000).compute()
    assert (
        not np.intersect1d(first, second).size and not np.intersect1d(first, default_rng(6).random(1000).compute()).size
    )
    np.testing.assert_array_equal(default_rng(5).random(1000).compute(), first)
    assert not np.array_equal(default_rng().random(50).compute(), default_rng().random(50).compute())
    x = rng.random(100)
    np.testing.assert_array_equal((x - x).compute(), 0.0)


def test_far_places_of_an_array_that_no_disk_holds_can_be_read():
    x = outsize.array.random.default_rng(1).integers(0, 2**63 - 1, (2**40, 2**20))
    assert x.nbytes == 2**63
    np.testing.assert_array_equal(x[2**40 - 1, 2**20 - 3 :].compute(), x[2**40 - 2 :, 2**20 - 4 :].compute()[1, 1:])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rng: rng.integers(5, 5, 3), "there is none"),
        (lambda rng: rng.integers(0, 300, 3, np.uint8), "does not hold"),
        (lambda rng: rng.integers(0, 3, 3, np.float32), "no such dtype"),
        (lambda rng: rng.random((3, -1)), "cannot be negative"),
        (lambda rng: rng.random(3, np.float16), "float32 or float64"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(outsize.InputError, match=words):
        call(default_rng(0))


def test_seeds_that_are_none_are_named():
    for seed in (-1, "a", 1.5):
        with pytest.raises(outsize.InputError, match="seed"):
            default_rng(seed)


def test_whole_ranges_of_a_dtype_can_be_drawn():
    rng = default_rng(2)
    for dtype in (np.uint64, np.int64):
        limits = np.iinfo(dtype)
        drawn = rng.integers(limits.min, int(limits.max) + 1, 4000, dtype).compute()
        assert drawn.dtype == dtype and drawn.min() < limits.min + 2**60 and drawn.max() > limits.max - 2**60
