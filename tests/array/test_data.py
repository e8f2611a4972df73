"""Rows for training: every row once, in any order that was promised, inside the budget, in any process."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from effort import examples, long
from hypothesis import given
from hypothesis import strategies as st
from stores import peak_of, write

from outsize.array.feed.source import DataSource
from outsize.array.store.registry import create_sink, open_store
from outsize.core.errors import BudgetError, InputError


def numbered(rows: int, width: int = 3) -> np.ndarray:
    """Rows that begin with their own number."""
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width)


@examples(60)
@given(
    rows=st.integers(0, 200), size=st.integers(1, 40), shuffle=st.booleans(), seed=st.integers(0, 9),
    window=st.none() | st.integers(1, 250) | st.just("all"), shards=st.integers(1, 4), stretch=st.integers(1, 60),
)  # fmt: skip
def test_every_row_comes_exactly_once_an_epoch(rows, size, shuffle, seed, window, shards, stretch) -> None:  # type: ignore[no-untyped-def]
    values = numbered(rows)
    source = DataSource(values, budget="4MiB")
    real = source._plan
    source._plan = lambda *a, **k: (stretch, real(*a, **k)[1])  # type: ignore[method-assign]
    seen: list[int] = []
    for number in range(shards):
        options = {"shuffle": shuffle, "seed": seed, "window": window, "shard": (number, shards)}
        batches = list(source.batches(size, **options))
        again = list(source.batches(size, **options))
        assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True)), "same seed, same order"
        assert all(len(batch) == size for batch in batches[:-1])
        seen += [int(row[0]) // 3 for batch in batches for row in batch]
    assert sorted(seen) == list(range(rows))
    if not shuffle and shards == 1:
        assert seen == list(range(rows))


def test_another_epoch_or_seed_is_another_order() -> None:
    source = DataSource(numbered(500), budget="4MiB")

    def order(**options: int) -> list[float]:
        return [row[0] for batch in source.batches(50, shuffle=True, **options) for row in batch]

    assert order() == order()
    assert order(epoch=1) != order()
    assert order(seed=1) != order()


def test_a_window_of_all_rows_is_a_uniform_shuffle() -> None:
    """Each row lands at each place about equally often: 5 standard deviations over 600 shuffles of 6 rows."""
    source = DataSource(numbered(6), budget="1MiB")
    counts = np.zeros((6, 6))
    for epoch in range(600):
        for place, row in enumerate(np.concatenate(list(source.batches(2, shuffle=True, window="all", epoch=epoch)))):
            counts[int(row[0]) // 3, place] += 1
    assert np.all(np.abs(counts - 100) < 5 * np.sqrt(100 * 5 / 6))


def test_rows_are_found_by_index_slice_and_list_like_numpys() -> None:
    values = numbered(300)
    source = DataSource(values, budget="1MiB")
    assert len(source) == 300
    np.testing.assert_array_equal(source[5], values[5])
    np.testing.assert_array_equal(source[-1], values[-1])
    np.testing.assert_array_equal(source[10:50:7], values[10:50:7])
    np.testing.assert_array_equal(source[[299, 0, 299, 7]], values[[299, 0, 299, 7]])
    np.testing.assert_array_equal(source[np.array([3, 1])], values[[3, 1]])
    np.testing.assert_array_equal(np.stack(source.__getitems__([8, 2, 250])), values[[8, 2, 250]])
    np.testing.assert_array_equal(np.stack(list(source)), values)
    with pytest.raises(IndexError):
        source[300]


@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".h5", ".safetensors"])
def test_every_store_feeds_rows_and_reopens_in_another_process(suffix: str, tmp_path: Path) -> None:
    values = numbered(100)
    chunks = (7, 2) if suffix in (".zarr", ".h5") else None
    write(create_sink(tmp_path / ("x" + suffix), values.shape, values.dtype, chunks=chunks), values).close()
    source = DataSource(tmp_path / ("x" + suffix), budget="8MiB")
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(np.concatenate(list(copy.batches(9))), values)
    np.testing.assert_array_equal(copy[[50, 3]], values[[50, 3]])


def test_two_arrays_are_walked_together() -> None:
    values, labels = numbered(90), np.arange(90)
    source = DataSource(values, labels, budget="1MiB")
    for rows, numbers in source.batches(8, shuffle=True, seed=3):
        np.testing.assert_array_equal(rows[:, 0], 3 * numbers)
    row, number = source[7]
    assert (row[0], number) == (21, 7)


def test_mistakes_are_said() -> None:
    with pytest.raises(InputError, match=r"same length along axis 0, these have \[3, 4\]"):
        DataSource(np.zeros(3), np.zeros(4))
    with pytest.raises(InputError, match="at least one"):
        DataSource()
    with pytest.raises(InputError, match="at least 1 row"):
        next(DataSource(np.zeros(3)).batches(0))


def test_what_does_not_fit_is_refused_with_the_smallest_budget(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 1000)))
    source = DataSource(tmp_path / "x.npy", budget="1MiB")
    with pytest.raises(BudgetError, match="the smallest that works") as caught:
        next(source.batches(500))
    assert caught.value.smallest is not None
    next(source.with_budget(caught.value.smallest).batches(500))
    with pytest.raises(BudgetError, match="window of 1000 rows") as caught:
        next(source.batches(4, shuffle=True, window="all"))
    assert caught.value.smallest is not None
    next(source.with_budget(caught.value.smallest).batches(4, shuffle=True, window="all"))
    with pytest.raises(BudgetError, match="rows hold"):
        source.take(range(500))


def test_rows_of_several_arrays_are_sized_together_and_the_smallest_budget_works(tmp_path: Path) -> None:
    values = np.arange(400 * 300, dtype=np.float64).reshape(400, 300)
    write(create_sink(tmp_path / "x.zarr", values.shape, values.dtype, chunks=(25, 300)), values).close()
    np.save(tmp_path / "y.npy", values[:, 0])
    source = DataSource(tmp_path / "x.zarr", tmp_path / "y.npy", budget=1)
    for ask in (lambda s: next(s.batches(3, shuffle=True)), lambda s: next(s.batches(3)), lambda s: s[[5, 399, 6]]):
        with pytest.raises(BudgetError, match="the smallest that works") as caught:
            ask(source)
        rows, firsts = ask(source.with_budget(caught.value.smallest))
        np.testing.assert_array_equal(rows[:, 0], firsts)
        with pytest.raises(BudgetError):
            ask(source.with_budget(caught.value.smallest - 1))


LOOP = """
import numpy as np
from outsize.array.feed.source import DataSource
source = DataSource(sys.argv[1], budget=int(sys.argv[2]))
next(source.batches(2, shuffle=True))
source = DataSource(sys.argv[1], budget=int(sys.argv[2]))
begin()
rows = 0
for batch in source.batches(32, shuffle=sys.argv[3] == "shuffled"):
    rows += len(batch)
end()
assert rows == 16384
"""


@pytest.mark.parametrize("order", ["shuffled", "in order"])
@pytest.mark.parametrize("budget", [4 << 20, 12 << 20])
def test_an_epoch_never_holds_more_than_its_budget_in_a_fresh_process(order: str, budget: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((16384, 1024), np.float32))  # 64 MiB
    assert peak_of(LOOP, str(tmp_path / "x.npy"), str(budget), order) <= budget + 300_000


torch_workers = pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2 if long() else 1, "spawn")])


@torch_workers
def test_pytorchs_loader_reads_it_as_a_map_in_any_kind_of_worker(
    workers: int, start: str | None, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    values = numbered(64)
    np.save(tmp_path / "x.npy", values)
    source = DataSource(tmp_path / "x.npy", budget="4MiB")
    source[0]  # files are open before the fork
    loader = torch.utils.data.DataLoader(
        source, batch_size=10, shuffle=True, num_workers=workers, multiprocessing_context=start
    )
    rows = torch.cat(list(loader))
    assert rows.dtype == torch.float32
    np.testing.assert_array_equal(rows.numpy()[np.argsort(rows[:, 0].numpy())], values)


@torch_workers
def test_pytorchs_loader_streams_shuffled_batches_shared_by_its_workers(
    workers: int, start: str | None, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    values = np.zeros((600, 2000), np.float64)
    values[:, 0] = np.arange(600)
    write(create_sink(tmp_path / "x.zarr", values.shape, values.dtype, chunks=(20, 2000)), values).close()
    dataset = DataSource(tmp_path / "x.zarr", budget="8MiB").to_torch(16, shuffle=True, seed=1)
    dataset.set_epoch(2)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=start)
    batches = list(loader)
    order = torch.cat(batches)[:, 0].numpy()
    np.testing.assert_array_equal(np.sort(order), np.arange(600))
    assert not np.array_equal(order, np.arange(600))


def test_tensorflow_reads_batches() -> None:
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed here")
    values = numbered(50)
    dataset = DataSource(values, np.arange(50), budget="1MiB").to_tensorflow(8, shuffle=True)
    rows = [(row.numpy(), label.numpy()) for row, label in dataset]
    assert sum(len(label) for _, label in rows) == 50
    assert dataset.element_spec[0].dtype == tf.float32


def test_a_source_says_what_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(10))
    text = repr(DataSource(tmp_path / "x.npy", budget="1MiB"))
    assert "10 rows" in text and "1.00 MiB" in text
    assert open_store(tmp_path / "x.npy").shape == (10, 3)


def test_a_lazy_array_feeds_rows_and_one_with_a_reduction_says_to_save_it(tmp_path: Path) -> None:
    from outsize.array.api.lazy import Array
    from outsize.array.graph.build import source as make_source

    values = numbered(5000)
    np.save(tmp_path / "x.npy", values)
    stored = Array(make_source(open_store(tmp_path / "x.npy")))
    np.testing.assert_array_equal(np.concatenate(list(DataSource(stored, budget="8MiB").batches(999))), values)
    lazy = (stored[10:4000] * 2 + 1).astype("float64")
    source = DataSource(lazy, budget="8MiB")
    assert source.specs == (((3,), np.dtype("float64")),)
    np.testing.assert_array_equal(np.concatenate(list(source.batches(64))), values[10:4000] * 2.0 + 1)
    np.testing.assert_array_equal(source[[7, 3000]], values[[17, 3010]] * 2.0 + 1)
    with pytest.raises(InputError, match="save it first"):
        DataSource(stored - stored.mean(axis=0))
