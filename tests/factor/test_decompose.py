"""The promise of `decompose`: true <= said <= asked, for any shape, rank, dtype, budget and tiles; and what it refuses."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.array.device.find import make_fake
from outsize.array.tuning import Tuning, use
from outsize.factor.algorithms.device_stream import DeviceStreamPass
from outsize.factor.formats.rounding import round_tucker, tucker_bytes

SMALL_TILES = replace(Tuning(), small=0, chunk=8192, largest=8192, least_box=2048)


def low_rank(shape: tuple[int, ...], rank: int, noise: float, dtype: Any, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind

    def numbers(*lengths: int) -> np.ndarray:
        made = draws.standard_normal(lengths)
        return made + 1j * draws.standard_normal(lengths) if kind == "c" else made

    x = numbers(*(min(rank, n) for n in shape))
    for axis, n in enumerate(shape):
        x = np.moveaxis(np.tensordot(numbers(n, x.shape[axis]), x, axes=(1, axis)), 0, axis)
    x = x / np.abs(x).max() + noise * numbers(*shape)
    return np.round(x * 1000).astype(dtype) if kind in "iu" else x.astype(dtype)


def true_error(made: Any, x: np.ndarray) -> float:
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    norm = float(np.linalg.norm(wide))
    away = float(np.linalg.norm(np.asarray(made.array.compute()).astype(wide.dtype) - wide))
    return away / norm if norm else away


@examples(60)
@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple),
    rank=st.integers(1, 6), noise=st.sampled_from([0.0, 1e-8, 1e-3, 0.3]), error=st.sampled_from([0.3, 0.01, 1e-3, 1e-6, 1e-9]),
    dtype=st.sampled_from(["f2", "f4", "f8", "c8", "c16", "i2", "u1", "i8"]), method=st.sampled_from(["tucker", "tt"]),
    seed=st.integers(0, 99), tiles=st.sampled_from([None, SMALL_TILES]), budget=st.sampled_from([None, 1 << 20, 200 << 10]),
)  # fmt: skip
def test_true_error_is_within_said_and_said_within_asked(
    shape: Any, rank: int, noise: float, error: float, dtype: str, method: str, seed: int, tiles: Any, budget: Any
) -> None:
    x = low_rank(shape, rank, noise, dtype, seed)
    if dtype == "u1":
        x = np.abs(x)
    with use(tiles or Tuning()):
        try:
            made = outsize.decompose(x, method, error, budget=budget)
        except outsize.BudgetError as refused:
            assert refused.smallest is not None and refused.smallest > budget
            return
    assert made.shape == x.shape
    assert true_error(made, x) <= made.error <= error
    assert made.facts.plan.peak() <= (budget or 1 << 60)


@pytest.mark.parametrize(("shape", "dtype"), [((19, 3, 7), "u1"), ((30, 20, 10), "c16"), ((12, 13, 5, 9, 8), "f8")])
def test_a_train_counts_cuts_inside_its_ends_at_any_angle_to_what_the_passes_lost(shape: Any, dtype: str) -> None:
    x = np.abs(low_rank(shape, 2, 0.0, dtype)) if dtype == "u1" else low_rank(shape, 6, 0.05, dtype)
    with use(SMALL_TILES):
        for wish in ({"error": 0.3}, {"rank": 4}):
            made = outsize.decompose(x, "tt", **wish)
            assert true_error(made, x) <= made.error <= wish.get("error", 1.5)


@pytest.mark.parametrize("method", ["tucker", "tt", "svd"])
def test_ranks_that_are_given_are_kept_and_their_error_is_said(method: str) -> None:
    x = low_rank((40, 50) if method == "svd" else (20, 24, 28), 9, 0.1, "f8")
    for tiles in (Tuning(), SMALL_TILES):
        with use(tiles):
            made = outsize.decompose(x, method, rank=3)
        assert set(made.ranks) == {3}
        assert true_error(made, x) <= made.error < 1
        best = _hosvd_error(x, 3) if method == "tucker" else None
        assert best is None or made.error <= 1.02 * best


def _hosvd_error(x: np.ndarray, rank: int) -> float:
    core = x
    for axis in range(x.ndim):
        u = np.linalg.svd(np.moveaxis(core, axis, 0).reshape(core.shape[axis], -1), full_matrices=False)[0][:, :rank]
        core = np.moveaxis(np.tensordot(u.T, core, axes=(1, axis)), 0, axis)
    return float(np.sqrt(1 - np.linalg.norm(core) ** 2 / np.linalg.norm(x) ** 2))


@pytest.mark.parametrize(("rank", "again"), [(4, False), (24, True)])
def test_a_basis_grows_where_later_chunks_hold_what_the_sample_did_not(rank: int, again: bool) -> None:
    x = low_rank((400, 40, 60), 3, 0.0, "f8")
    x[203] = low_rank((40, 60), rank, 0.0, "f8", seed=5)
    with use(SMALL_TILES):
        made = outsize.decompose(x, "tucker", 1e-3)
    assert true_error(made, x) <= made.error <= 1e-3
    assert made.ratio > 4
    assert any("Gram" in step.name for step in made.facts.plan.steps) == again


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tiles", [Tuning(), SMALL_TILES])
def test_what_is_no_number_is_refused_by_its_place(value: float, tiles: Tuning) -> None:
    x = low_rank((20, 30, 40), 3, 0.0, "f4")
    x[7, 11, 13] = value
    with use(tiles), pytest.raises(outsize.InputError, match=r"x\[7, 11, 13\] is"):
        outsize.decompose(x, "tucker")


@pytest.mark.parametrize("fill", [0.0, 3.5, 1e-30])
@pytest.mark.parametrize("method", ["tucker", "tt", "auto"])
def test_constants_have_rank_one(fill: float, method: str) -> None:
    made = outsize.decompose(np.full((30, 20, 25), fill, np.float32), method)
    assert set(made.ranks) == {1}
    assert true_error(made, np.full((30, 20, 25), fill, np.float32)) <= made.error <= 0.01


def test_values_whose_squares_overflow_are_refused_with_the_way_out() -> None:
    with pytest.raises(outsize.InputError, match=r"decompose x / 1e\+200"):
        outsize.decompose(np.full((4, 5, 6), 1e200), "tucker")


def test_a_largest_difference_is_measured() -> None:
    x = low_rank((20, 24, 28), 6, 1e-3, "f4")
    made = outsize.decompose(x, "tucker", "1e-2 max")
    assert np.abs(np.asarray(made.array.compute()) - x).max() <= 1e-2 * np.abs(x).max()


def test_auto_takes_the_smallest_and_says_where_data_are_not_low_rank() -> None:
    x = low_rank((30, 40, 50), 4, 1e-4, "f4")
    sizes = [outsize.decompose(x, method).nbytes for method in ("tucker", "tt")]
    assert outsize.decompose(x).nbytes <= min(sizes)
    noise = np.random.default_rng(0).standard_normal((30, 40, 50))
    made = outsize.decompose(noise)
    assert made.method in ("zfp", "float16") and made.nbytes <= noise.nbytes // 4
    assert true_error(made, noise) <= made.error <= 0.01
    (note,) = made.facts.notes
    assert "not low-rank at this error: no decomposition saves more than 0 % (tucker would take" in note
    assert f"{made.method} keeps each element with fewer digits, and saves" in note and "tt would take" in note
    made = outsize.decompose(noise, "float16")
    assert true_error(made, noise) <= made.error <= 0.01


@pytest.mark.parametrize("dtype", ["f4", "i2", "c8"])
def test_auto_refuses_what_nothing_makes_smaller(dtype: str) -> None:
    noise = (1000 * np.random.default_rng(0).standard_normal((20, 30, 40))).astype(dtype)
    with pytest.raises(
        outsize.InputError, match=r"^nothing saves more than \d %.*not low-rank \(tucker would take .*, tt would"
    ):
        outsize.decompose(noise, error=1e-8 if dtype == "f4" else 1e-3)


def test_auto_says_that_a_budget_is_too_small_and_not_that_data_have_no_structure() -> None:
    x = low_rank((60, 70, 80), 5, 1e-3, "f4")
    with use(replace(Tuning(), small=0)), pytest.raises(outsize.BudgetError, match="the smallest budget is"):
        outsize.decompose(x, budget=100_000)


def test_cp_says_a_measured_error_and_that_nothing_is_promised() -> None:
    pytest.importorskip("tensorly")
    draws = np.random.default_rng(3)
    x = np.einsum("ir,jr,kr->ijk", *(draws.standard_normal((n, 3)) for n in (12, 14, 16)))
    made = outsize.decompose(x, "cp", 0.01)
    assert made.ranks[0] <= 4
    assert true_error(made, x) <= made.error <= 0.01
    assert any("no theorem" in note for note in made.facts.notes)
    assert any("core consistency" in note for note in made.facts.notes)
    noise = draws.standard_normal((12, 14, 16))
    with pytest.raises(outsize.InputError, match="cp reached an error"):
        outsize.decompose(noise, "cp", 1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "hosvd"}, "method='hosvd' is none"), ({"error": 0}, "between 1e-12 and 1"), ({"error": "much"}, "is none"),
        ({"method": "svd"}, "svd is for matrices"), ({"rank": 3}, "rank= needs a method"),
        ({"method": "tucker", "rank": (2, 3)}, "takes one whole number, or 3"),
        ({"device": "nothing"}, "device='nothing' is none"), ({"error": 1}, "between 1e-12 and 1"),
        ({"error": float("nan")}, "between 1e-12 and 1"), ({"error": None}, "is no number"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said_in_one_sentence(arguments: Any, words: str) -> None:
    with pytest.raises(outsize.InputError, match=words):
        outsize.decompose(np.ones((4, 5, 6)), **arguments)


def test_a_plan_reads_nothing_and_says_what_would_be_read(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", low_rank((40, 50, 60), 4, 0.0, "f4"))
    with use(replace(Tuning(), small=0)):
        plan = outsize.decompose(tmp_path / "x.npy", "tucker", budget="4MiB", dry_run=True)
        made = outsize.decompose(tmp_path / "x.npy", "tucker", budget="4MiB")
    assert plan.fits and plan.steps and plan.read >= 40 * 50 * 60 * 4
    assert any("projection" in step.name for step in plan.steps)
    assert made.facts.plan.read <= 5 * 40 * 50 * 60 * 4  # of so little, samples are most


@pytest.mark.parametrize("method", ["tucker", "tt", "svd"])
def test_the_first_reading_goes_through_a_device(method: str) -> None:
    x = low_rank((200, 60) if method == "svd" else (20, 48, 64), 4, 1e-4, "f4")
    with outsize.budget(device="1MiB"):
        made = outsize.decompose(x, method, 0.01, device="fake")
        plan = outsize.decompose(x, method, 0.01, device="fake", dry_run=True)
    assert true_error(made, x) <= made.error <= 0.01 and max(made.ranks) <= 6
    for steps in (made.facts.plan.steps, plan.steps):
        assert any(peak.pool.kind == "device" for step in steps for peak in step.peaks)


@examples(40)
@given(
    st.tuples(*[st.integers(10, 70)] * 3), st.integers(1, 9), st.sampled_from([1e-4, 0.003, 0.02]), st.sampled_from([0.01, 0.05]),
    st.sampled_from(["f4", "f8", "c8", "i2"]), st.integers(0, 99),
)  # fmt: skip
def test_modes_that_a_device_projects_keep_the_promise(
    shape: tuple[int, ...], rank: int, noise: float, error: float, dtype: str, seed: int
) -> None:
    x = low_rank(shape, min(rank, *shape), noise, dtype, seed)
    with use(replace(Tuning(), device_least=0)), outsize.budget(device="1MiB"):
        made = outsize.decompose(x, "tucker", error, device="fake")
    assert true_error(made, x) <= made.error <= error


def test_what_is_left_in_memory_is_projected_by_the_device_too() -> None:
    x = low_rank((90, 70, 48), 5, 1e-4, "f4")
    with use(replace(Tuning(), device_least=0)), outsize.budget(device="1MiB"):
        made = outsize.decompose(x, "tucker", 0.01, device="fake")
        plan = outsize.decompose(x, "tucker", 0.01, device="fake", dry_run=True)
    for steps in (made.facts.plan.steps, plan.steps):
        there = [step.name.split(":")[0] for step in steps if any(peak.pool.kind == "device" for peak in step.peaks)]
        assert there == ["projection of axes 1 and 0", "projection of axis 2"]  # in memory, axis 1 is the fastest


def test_two_modes_that_do_not_shrink_together_do_so_one_after_another() -> None:
    x = low_rank((40, 64, 48), 3, 1e-4, "f4")
    x[9] += np.random.default_rng(0).standard_normal((64, 48)).astype("f4")  # no sample of a few chunks sees all of it
    with use(replace(SMALL_TILES, device_slot=1 << 14)), outsize.budget(device="1MiB"):
        made = outsize.decompose(np.ascontiguousarray(x), "tucker", 1e-3, device="fake", budget="32MiB")
        plan = outsize.decompose(np.ascontiguousarray(x), "tucker", 1e-3, device="fake", budget="32MiB", dry_run=True)
    assert true_error(made, x) <= made.error <= 1e-3
    assert plan.fits and made.facts.plan.fits
    tried = [step.name.partition(":")[0] for step in made.facts.plan.steps if step.name.startswith("projection")]
    assert tried[0] == "projection of axes 2 and 1" and "projection of axis 2" in tried[1:]


@pytest.mark.parametrize("method", ["tucker", "tt", "svd"])
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_numbers_lose_no_more_through_a_device(method: str, dtype: str) -> None:
    x = low_rank((200, 60) if method == "svd" else (20, 48, 64), 4, 1e-4, dtype)
    with outsize.budget(device="1MiB"):
        made = outsize.decompose(x, method, 0.01, device="fake")
    assert true_error(made, x) <= made.error <= 0.01 and max(made.ranks) <= 6
    assert any(peak.pool.kind == "device" for step in made.facts.plan.steps for peak in step.peaks)


def test_a_rank_is_found_through_a_device_whatever_the_order_in_memory() -> None:
    x = np.asfortranarray(low_rank((9, 1, 9, 20), 2, 1e-3, "f4"))
    with outsize.budget(device="64KiB"):
        made = outsize.decompose(x, "tucker", rank=2, device="fake")
    assert true_error(made, x) <= made.error <= 0.01 and made.ranks == (2, 1, 2, 2)


def test_errors_that_a_device_cannot_tell_are_left_to_the_processor() -> None:
    x = low_rank((20, 48, 64), 4, 0.0, "f8")
    with outsize.budget(device="1MiB"):
        made = outsize.decompose(x, "tucker", 1e-7, device="fake")
    assert true_error(made, x) <= made.error <= 1e-7


def test_the_data_cross_the_link_once() -> None:
    x = low_rank((90, 70, 48), 5, 1e-4, "f4")
    with outsize.budget(device="4MiB"):
        plan = outsize.decompose(x, "tucker", 0.01, device="fake").facts.plan
    sent = [level.amount for step in plan.steps for level in step.levels if level.name == "link in"]
    assert sent == [x.nbytes]


@pytest.mark.parametrize("seed", range(4))
def test_a_basis_grows_through_a_device_and_every_run_gives_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = np.random.default_rng(seed)
    x = low_rank((40, 64, 48), 3, 1e-4, "f4", seed)
    x[7] += 0.02 * draws.standard_normal((64, 3)).astype("f4") @ draws.standard_normal((3, 48)).astype("f4")
    here, fold = [], DeviceStreamPass._fold_here
    monkeypatch.setattr(
        DeviceStreamPass, "_fold_here", lambda self, *given: (here.append(given[0]), fold(self, *given))
    )
    runs = []
    with use(replace(SMALL_TILES, device_slot=4096)), outsize.budget(device="256KiB"):
        for number in range(3):
            runs.append(outsize.decompose(x, "tucker", 1e-3, device=make_fake(256 << 10, seed=number), budget="24MiB"))
    assert here and len(here) % 3 == 0  # the processor folded what no sample had seen
    assert true_error(runs[0], x) <= runs[0].error <= 1e-3
    for other in runs[1:]:
        assert np.array_equal(other[...].compute(), runs[0][...].compute())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_named_through_a_device(bad: float) -> None:
    x = low_rank((20, 48, 64), 4, 1e-4, "f4")
    x[13, 5, 7] = bad
    with outsize.budget(device="1MiB"), pytest.raises(outsize.InputError, match=r"x\[13, 5, 7\] is (nan|inf)"):
        outsize.decompose(x, "tucker", 0.01, device="fake")


def test_zeros_through_a_device() -> None:
    x = low_rank((20, 48, 64), 4, 1e-4, "f4")
    x[3:15] = 0
    with outsize.budget(device="1MiB"):
        made = outsize.decompose(x, "tucker", 0.01, device="fake")
        nothing = outsize.decompose(np.zeros_like(x), "tucker", 0.01, device="fake")
    assert true_error(made, x) <= made.error <= 0.01
    assert not np.asarray(nothing[...].compute()).any()


def test_a_device_too_small_for_a_chunk_leaves_the_work_to_the_processor() -> None:
    x = low_rank((20, 48, 64), 4, 1e-4, "f4")
    with outsize.budget(device="1KiB"):
        made = outsize.decompose(x, "tucker", 0.01, device="fake")
    assert true_error(made, x) <= made.error <= 0.01
    notes = [note for step in made.facts.plan.steps for note in step.notes]
    assert any(note.startswith("on the processor: a chunk takes") and "1.00 KiB may be held" in note for note in notes)


@pytest.mark.parametrize("method", ["tucker", "tt", "cp", "zfp", "float16", "auto"])
def test_zeros_are_zeros_in_every_method(method: str) -> None:
    pytest.importorskip({"cp": "tensorly", "zfp": "zfpy"}.get(method, "numpy"))
    made = outsize.decompose(np.zeros((20, 30, 40), np.float32), method)
    assert made.error == 0 and not np.asarray(made.array.compute()).any()


def test_one_axis_has_no_cp_and_ranks_may_be_an_array() -> None:
    with pytest.raises(outsize.InputError, match="cp needs two axes"):
        outsize.decompose(np.ones(50), "cp")
    assert outsize.decompose(np.ones((5, 6, 7)), "tucker", rank=np.array([1, 2, 3])).ranks == (1, 2, 3)


def test_a_core_that_float32_cannot_hold_is_kept_in_double_precision() -> None:
    x = low_rank((20, 30, 40), 2, 0.0, "f4")
    x *= np.float32(3e38) / np.abs(x).max()
    for wish in ({"error": 0.01}, {"rank": 2}):
        made = outsize.decompose(x, "tucker", **wish)
        assert made.form.core.dtype == np.float64 and true_error(made, x) <= made.error <= 0.01


@pytest.mark.parametrize("shape", [(60_000, 20), (7, 90_000), (5, 30_000, 4)])
def test_a_tall_core_is_cut_in_little_more_than_itself(shape: tuple[int, ...]) -> None:
    core = low_rank(shape, 3, 1e-6, np.float64)
    tracemalloc.start()
    cut = round_tucker(core, [np.zeros((0, 0))] * core.ndim, 1e-6 * float(np.linalg.norm(core)) ** 2, None)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken <= tucker_bytes(shape, shape, core.itemsize) <= 2.5 * core.nbytes
    made, *bases = cut.arrays
    for mode, basis in enumerate(bases):
        np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-12)
        made = np.moveaxis(np.tensordot(basis, made, axes=(1, mode)), 0, mode)
    assert float(np.linalg.norm(made - core)) ** 2 <= cut.lost2 * (1 + 1e-9)
    assert cut.kept == tuple(min(3, n) for n in shape)
