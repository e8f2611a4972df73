"""HDF5 datasets: contiguous ones read directly, chunked ones through h5py, and what that takes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from stores import arrays, chunk_shapes, peak_of, read, regions, select, write

from outsize.array.store.formats.flat import FlatSink, FlatStore
from outsize.array.store.formats.hdf5 import Hdf5Store
from outsize.array.store.registry import create_sink, open_store
from outsize.core.errors import InputError, StoreError

h5py = pytest.importorskip("h5py")


@examples(40)
@given(data=st.data())
def test_any_region_of_any_layout_is_what_h5py_wrote(data: st.DataObject) -> None:
    values = data.draw(arrays(["bool", "int16", "float32", ">f8", "complex64", "uint64"]))
    region = data.draw(regions(values.shape))
    options: dict[str, Any] = {}
    if values.ndim and values.size:
        chunks = data.draw(st.none() | chunk_shapes(values.shape))
        if chunks is not None:
            options["chunks"] = tuple(min(c, n) for c, n in zip(chunks, values.shape, strict=True))
            options |= data.draw(
                st.sampled_from([{}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}])
            )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.h5")
        with h5py.File(path, "w") as file:
            file.create_dataset("g/x", data=values, **options)
        store = open_store(f"{path}::/g/x")
        assert store.dtype == values.dtype
        np.testing.assert_array_equal(read(store, region), select(values, region))
        store.close()


def test_a_contiguous_dataset_is_read_and_written_without_the_library(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(1000.0)
    assert isinstance(open_store(tmp_path / "x.h5"), FlatStore)
    sink = create_sink(tmp_path / "y.h5::/deep/in/it", (500, 500), "f4")
    assert isinstance(sink, FlatSink)
    values = np.random.default_rng(0).standard_normal((500, 500)).astype("f4")
    write(sink, values)
    with h5py.File(tmp_path / "y.h5") as file:
        np.testing.assert_array_equal(file["/deep/in/it"][...], values)


def test_chunked_outputs_have_the_chunks_that_were_asked_for(tmp_path: Path) -> None:
    values = np.arange(70.0).reshape(7, 10)
    write(create_sink(tmp_path / "y.h5", values.shape, "f8", chunks=(3, 4), key="z"), values).close()
    with h5py.File(tmp_path / "y.h5") as file:
        assert file["z"].chunks == (3, 4)
        np.testing.assert_array_equal(file["z"][...], values)


def test_datasets_are_chosen_by_key(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["g/b"] = np.zeros(3), np.ones(4)
    with pytest.raises(InputError, match=r"2 arrays; say which, as .*::a or with key=: a, g/b"):
        open_store(tmp_path / "x.h5")
    with pytest.raises(InputError, match="did you mean 'g/b'"):
        open_store(tmp_path / "x.h5", key="g/bb")
    assert open_store(tmp_path / "x.h5", key="/g/b").shape == (4,)
    assert open_store(tmp_path / "x.h5", key="a").shape == (3,)


def test_text_empty_and_unallocated_datasets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["text"] = ["a", "bb"]
        file["empty"] = h5py.Empty("f4")
        file.create_dataset("late", shape=(3, 3), dtype="f4", fillvalue=5)
    with pytest.raises(StoreError, match="varying length"):
        open_store(tmp_path / "x.h5", key="text")
    with pytest.raises(StoreError, match="without a shape"):
        open_store(tmp_path / "x.h5", key="empty")
    np.testing.assert_array_equal(read(open_store(tmp_path / "x.h5", key="late")), np.full((3, 3), 5))


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.95])
def test_a_truncated_file_is_one_store_error(keep: float, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset(
            "x", data=np.random.default_rng(0).standard_normal((100, 100)), chunks=(50, 50), compression="gzip"
        )
    content = (tmp_path / "x.h5").read_bytes()
    (tmp_path / "x.h5").write_bytes(content[: int(keep * len(content))])
    with pytest.raises(StoreError, match="HDF5 cannot read") as caught:
        read(open_store(tmp_path / "x.h5"))
    assert "\n" not in str(caught.value)


@examples(60, derandomize=True)  # the library is in C: the same damage on every run
@given(data=st.data())
def test_damaged_bytes_give_values_or_an_error_of_ours(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.h5")
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(100.0).reshape(10, 10), chunks=(5, 5), compression="gzip")
        content = bytearray(Path(path).read_bytes())
        for _ in range(data.draw(st.integers(1, 8))):
            content[data.draw(st.integers(8, len(content) - 1))] = data.draw(st.integers(0, 255))
        Path(path).write_bytes(content)
        try:
            store = open_store(path, key="x")
            if np.prod([float(n) for n in store.shape]) < 10**5:
                read(store)
            store.close()
        except (StoreError, InputError, MemoryError):
            pass


READ = """
from stores import make_buffer
from outsize.array.store.registry import open_store
store = open_store(sys.argv[1])
region = ((100, 900), (30, 1000))
small = ((0, 1), (0, 1))
store.read(small, make_buffer(store.extent(small)))
extent = store.extent(region)
begin()
buffer = make_buffer(extent)
buffer[:] = 1  # as a pool's buffer that was used before
store.read(region, buffer)
end()
"""


@pytest.mark.parametrize("filters", ["none", "gzip", "gzip of constants", "lzf", "scaleoffset"])
def test_extent_is_above_all_memory_that_reading_takes_in_a_fresh_process(filters: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1024, 1024)).astype("f4")
    options: dict[str, Any] = {
        "none": {}, "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "gzip of constants": {"compression": "gzip", "shuffle": True}, "lzf": {"compression": "lzf"},
        "scaleoffset": {"scaleoffset": 3},
    }[filters]  # fmt: skip
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=0 * values if "constants" in filters else values, chunks=(512, 512), **options)
    store = open_store(tmp_path / "x.h5")
    assert isinstance(store, Hdf5Store)
    assert peak_of(READ, str(tmp_path / "x.h5")) <= store.extent(((100, 900), (30, 1000))) + 300_000
