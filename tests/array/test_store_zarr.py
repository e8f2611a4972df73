"""Zarr arrays of both formats, every way of coding them, damaged ones, and what reading them takes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from stores import arrays, chunk_shapes, make_buffer, peak_of, read, regions, select, write

from outsize.array.store.formats.zarr import ZarrStore
from outsize.array.store.io.chunks import choose_chunks, cut_regular
from outsize.array.store.io.decompress import Coding
from outsize.array.store.registry import create_sink, open_store
from outsize.core.errors import InputError, StoreError

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec  # noqa: E402

CODINGS: dict[str, dict[str, Any]] = {
    "3 zstd": {},
    "3 none": {"compressors": None},
    "3 blosc": {"compressors": BloscCodec()},
    "3 gzip": {"compressors": GzipCodec(level=1)},
    "3 zstd, crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "3 transposed": {"filters": [TransposeCodec(order=(1, 0))]},
    "2 zstd": {"zarr_format": 2},
    "2 none": {"zarr_format": 2, "compressors": None},
    "2 blosc": {"zarr_format": 2, "compressors": numcodecs.Blosc()},
    "2 lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4()},
    "2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib(1)},
    "2 Fortran": {"zarr_format": 2, "order": "F"},
    "2 filtered": {"zarr_format": 2, "filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.BZ2(1)},
}


def make(path: Any, values: np.ndarray, chunks: tuple[int, ...], **options: Any) -> str:
    array = zarr.create_array(
        str(path), shape=values.shape, dtype=options.pop("dtype", values.dtype), chunks=chunks,
        config={"write_empty_chunks": True}, **options,
    )  # fmt: skip
    array[...] = values
    return str(path)


@pytest.mark.parametrize("coding", CODINGS)
@examples(6)
@given(data=st.data())
def test_any_region_of_any_coding_is_what_zarr_wrote(coding: str, data: st.DataObject) -> None:
    values = data.draw(arrays(["float32", "int32"], min_dims=2, max_dims=2, min_side=1))
    chunks = data.draw(chunk_shapes(values.shape))
    region = data.draw(regions(values.shape))
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(make(os.path.join(folder, "x.zarr"), values, chunks, **CODINGS[coding]))
        np.testing.assert_array_equal(read(store, region), select(values, region))


@examples(10)
@given(data=st.data())
def test_shards_and_other_byte_orders_are_read(data: st.DataObject) -> None:
    values = np.arange(12 * 8, dtype="f4").reshape(12, 8)
    region = data.draw(regions(values.shape))
    with tempfile.TemporaryDirectory() as folder:
        sharded = make(os.path.join(folder, "s.zarr"), values, (2, 2), shards=(6, 4))
        np.testing.assert_array_equal(read(open_store(sharded), region), select(values, region))
        for zarr_format in (2, 3):
            big = make(
                os.path.join(folder, f"b{zarr_format}.zarr"), values, (5, 3), dtype=">f4", zarr_format=zarr_format
            )
            np.testing.assert_array_equal(read(open_store(big), region), select(values, region))


@pytest.mark.parametrize("place", ["end", "start"])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_shards_are_read_without_the_library_and_a_damaged_index_is_one_error(
    place: str, compressors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zarr.codecs import ShardingCodec

    values = np.arange(64 * 48, dtype="f4").reshape(64, 48)
    values[:8, :8] = 0  # a chunk of the fill value, which a shard may leave out
    inner = [zarr.codecs.BytesCodec(), *([] if compressors is None else [ZstdCodec()])]
    codec = ShardingCodec(chunk_shape=(8, 8), codecs=inner, index_location=place)
    array = zarr.create(
        store=str(tmp_path / "x.zarr"), shape=values.shape, chunks=(32, 16), dtype="f4", codecs=[codec], fill_value=0,
        zarr_format=3,
    )  # fmt: skip
    array[...] = values
    store = open_store(tmp_path / "x.zarr")
    monkeypatch.setattr(type(store._array), "get_basic_selection", None)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(read(store), values)
    np.testing.assert_array_equal(read(store, ((3, 61), (7, 41))), values[3:61, 7:41])
    shard = tmp_path / "x.zarr" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[10 if place == "start" else -10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="checksum of its index"):
        read(store)
    np.testing.assert_array_equal(read(store, ((32, 64), (0, 48))), values[32:])
    shard.unlink()
    with pytest.raises(StoreError, match="missing='fill'"):
        read(store)
    values[:32, :16] = 0
    np.testing.assert_array_equal(read(open_store(tmp_path / "x.zarr", missing="fill")), values)


def test_chunks_of_a_reduction_are_cut_where_the_store_is_cut(tmp_path: Path) -> None:
    import outsize

    array = zarr.create_array(str(tmp_path / "x.zarr"), shape=(40_000, 256), chunks=(700, 256), dtype="f4")
    array[...] = 1
    for budget in ("64MiB", "24MiB", "8MiB"):
        plan = outsize.open(tmp_path / "x.zarr").sum().plan(budget)
        assert plan.steps[0].read == 58 * 700 * 256 * 4  # every chunk once


def test_groups_are_opened_by_key(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "g.zarr"), mode="w")
    group.create_array("a/b", shape=(3,), dtype="i4", config={"write_empty_chunks": True})[...] = [1, 2, 3]
    np.testing.assert_array_equal(read(open_store(f"{tmp_path}/g.zarr::a/b")), [1, 2, 3])
    np.testing.assert_array_equal(read(open_store(tmp_path / "g.zarr")), [1, 2, 3])  # the only one
    group.create_array("c", shape=(3,), dtype="i4")
    with pytest.raises(InputError, match="2 arrays; say which"):
        open_store(tmp_path / "g.zarr")
    with pytest.raises(InputError, match="did you mean 'a/b'"):
        open_store(tmp_path / "g.zarr", key="/a/bb")


@pytest.mark.parametrize("coding", ["3 zstd", "3 gzip", "2 zstd", "2 zlib"])
def test_a_missing_chunk_is_an_error_unless_it_is_to_be_filled(coding: str, tmp_path: Path) -> None:
    values = np.arange(1.0, 65.0).reshape(8, 8)
    path = make(tmp_path / "x.zarr", values, (4, 4), fill_value=7.0, **CODINGS[coding])
    os.unlink(os.path.join(path, "c/1/0" if coding[0] == "3" else "1.0"))
    with pytest.raises(StoreError, match=r"chunk file (c/1/0|1\.0) of .* is missing.*missing='fill'"):
        read(open_store(path))
    np.testing.assert_array_equal(read(open_store(path), ((0, 4), (0, 8))), values[:4])  # the others can be read
    values[4:, :4] = 7.0
    np.testing.assert_array_equal(read(open_store(path, missing="fill")), values)
    with pytest.raises(InputError, match="missing='ignore'"):
        open_store(path, missing="ignore")


def test_our_own_output_has_every_chunk_even_of_zeros(tmp_path: Path) -> None:
    store = write(create_sink(tmp_path / "x.zarr", (8, 8), "float32", chunks=(2, 2)), np.zeros((8, 8), np.float32))
    np.testing.assert_array_equal(read(store), np.zeros((8, 8)))
    assert len(list((tmp_path / "x.zarr" / "c").glob("*/*"))) == 16


@pytest.mark.parametrize("coding", ["3 zstd", "3 none", "3 blosc", "3 gzip", "3 zstd, crc32c", "2 lz4", "2 zlib"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "scrambled", "long"])
def test_a_damaged_chunk_is_one_store_error(coding: str, damage: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((64, 64))
    path = make(tmp_path / "x.zarr", values, (64, 64), **CODINGS[coding])
    chunk = Path(path) / ("c/0/0" if coding[0] == "3" else "0.0")
    content = chunk.read_bytes()
    damaged = {
        "truncated": content[: len(content) // 2], "empty": b"", "scrambled": b"\xff" * 40 + content[40:],
        "long": content + bytes(10**6),
    }[damage]  # fmt: skip
    chunk.write_bytes(damaged)
    if coding == "3 none" and damage == "scrambled":
        return  # without compression or checksum every content of the right length is valid
    if damage == "long" and coding in ("3 gzip", "2 zlib"):
        return  # these codings end before the end of the file, and what follows is not looked at
    with pytest.raises(StoreError) as caught:
        read(open_store(path))
    assert "\n" not in str(caught.value)


def test_a_chunk_that_claims_to_be_huge_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = make(tmp_path / "x.zarr", np.zeros((4, 4)), (4, 4))
    (Path(path) / "c/0/0").write_bytes(numcodecs.Zstd().encode(np.zeros(50_000_000, np.uint8)))
    with pytest.raises(StoreError, match="states 50000000 bytes, not 128"):
        read(open_store(path))


def test_a_zstd_chunk_that_does_not_state_its_size_is_read(tmp_path: Path) -> None:
    from outsize.array.store.io.decompress import _zstd_size

    values = np.arange(16.0).reshape(4, 4)
    path = make(tmp_path / "x.zarr", values, (4, 4))
    payload = values.tobytes()
    block = (1 | 0 << 1 | len(payload) << 3).to_bytes(3, "little") + payload  # one last block, raw
    frame = bytes.fromhex("28b52ffd") + b"\x00" + b"\x50" + block  # no content size, a window of 1 MiB
    assert _zstd_size(np.frombuffer(frame, np.uint8)) is None
    (Path(path) / "c/0/0").write_bytes(frame)
    np.testing.assert_array_equal(read(open_store(path)), values)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "many"}, {"data_type": "quaternion"}, {"codecs": [{"name": "magic"}]}, {"zarr_format": 9},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 4]}}}, {"node_type": "forest"},
    ],
)  # fmt: skip
def test_damaged_metadata_is_one_store_error(change: dict[str, Any], tmp_path: Path) -> None:
    path = make(tmp_path / "x.zarr", np.zeros((4, 4)), (4, 4))
    metadata = Path(path) / "zarr.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    with pytest.raises(StoreError):
        read(open_store(path))
    metadata.write_text("{")
    with pytest.raises(StoreError):
        open_store(path)


def test_an_array_that_claims_10_to_the_18_elements_opens_and_reads_only_what_is_asked(tmp_path: Path) -> None:
    path = make(tmp_path / "x.zarr", np.ones((4, 4)), (4, 4))
    metadata = Path(path) / "zarr.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"shape": [10**9, 10**9]}))
    store = open_store(path)
    np.testing.assert_array_equal(read(store, ((0, 4), (0, 4))), np.ones((4, 4)))
    with pytest.raises(StoreError, match="missing"):
        read(store, ((10**8, 10**8 + 1), (0, 1)))
    assert store.extent(((0, 10**9), (0, 10**9))) > 10**18  # what a plan then refuses


def test_chunks_of_objects_are_refused(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "x.zarr"), shape=(3,), dtype=str)
    with pytest.raises(StoreError):
        open_store(tmp_path / "x.zarr")


def test_unaligned_regions_written_by_many_threads_lose_nothing(tmp_path: Path) -> None:
    values = np.arange(40 * 12, dtype=np.int32).reshape(40, 12)
    sink = create_sink(tmp_path / "x.zarr", values.shape, values.dtype, chunks=(8, 5))

    def work(first: int) -> None:
        for row in range(first, 40, 4):
            region = ((row, row + 1), (0, 12))
            sink.write(region, values[row : row + 1], make_buffer(sink.extent(region)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(read(sink.commit()), values)


@examples(50)
@given(shape=st.lists(st.integers(0, 10**7), max_size=5), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_chosen_chunks_are_inside_the_target(shape: list[int], itemsize: int) -> None:
    chunks = choose_chunks(tuple(shape), itemsize, 8 * 2**20)
    assert all(1 <= c <= max(1, n) for c, n in zip(chunks, shape, strict=True))
    assert np.prod([float(c) for c in chunks]) * itemsize <= max(8 * 2**20, itemsize)


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
print(extent)
"""


@pytest.mark.parametrize(
    "coding", ["3 zstd", "3 blosc", "3 none", "3 gzip", "2 lz4", "2 filtered", "sharded", "constant"]
)
def test_extent_is_above_all_memory_that_reading_takes_in_a_fresh_process(coding: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1024, 1024)).astype("f4")
    if coding == "constant":
        path = make(tmp_path / "x.zarr", np.zeros_like(values), (512, 512), compressors=GzipCodec(level=1))
    elif coding == "sharded":
        path = make(tmp_path / "x.zarr", values, (256, 256), shards=(512, 512))
    else:
        path = make(tmp_path / "x.zarr", values, (512, 512), **CODINGS[coding])
    extent = ZarrStore(path).extent(((100, 900), (30, 1000)))
    assert peak_of(READ, path) <= extent + 300_000, "300 kB: the interpreter's own growth"


WRITE = """
import numpy as np
from stores import make_buffer
from outsize.array.store.registry import create_sink
sink = create_sink(sys.argv[1], (1024, 1024), "f4", chunks=(512, 512), compress=sys.argv[2] == "yes")
block = np.random.default_rng(0).standard_normal((1024, 1024)).astype("f4")
sink.write(((0, 1), (0, 1)), block[:1, :1], make_buffer(1))
low, high = int(sys.argv[3]), int(sys.argv[4])
region = ((0, high), (low, high))
begin()
buffer = make_buffer(sink.extent(region))
buffer[:] = 1
sink.write(region, block[:high, low:high], buffer)
end()
"""


@pytest.mark.parametrize("compress", ["yes", "no"])
@pytest.mark.parametrize(("low", "high"), [(0, 1024), (5, 1000)])
def test_extent_is_above_all_memory_that_writing_takes_in_a_fresh_process(
    compress: str, low: int, high: int, tmp_path: Path
) -> None:
    sink = create_sink(tmp_path / "y.zarr", (1024, 1024), "f4", chunks=(512, 512))
    peak = peak_of(WRITE, str(tmp_path / "x.zarr"), compress, str(low), str(high))
    assert peak <= sink.extent(((0, high), (low, high))) + 300_000
    shutil.rmtree(sink.partial)


@pytest.mark.parametrize("how", ["in place", "in a group", "resumed"])
def test_chunks_of_fill_values_are_written_like_all_others(tmp_path: Path, how: str) -> None:
    values = np.ones((6, 4), "f4")
    path = str(tmp_path / "x.zarr")
    zeros, region = np.zeros((3, 4), "f4"), ((0, 3), (0, 4))
    if how == "resumed":
        first = create_sink(path, values.shape, values.dtype, chunks=(3, 4))
        first.write(((3, 6), (0, 4)), values[3:], make_buffer(first.extent(region)))
        sink = create_sink(path, values.shape, values.dtype, chunks=(3, 4), resume=True)
    elif how == "in place":
        make(path, values, (3, 4))
        sink = open_store(path, mode="r+").update()
    else:
        zarr.open_group(path, mode="w").create_array("a/x", shape=(6, 4), dtype="f4", chunks=(3, 4))[...] = values
        sink = open_store(path, key="a/x", mode="r+").update()
    sink.write(region, zeros, make_buffer(sink.extent(region)))
    sink.commit()
    store = open_store(path, key="a/x" if how == "in a group" else None)
    np.testing.assert_array_equal(read(store, ((0, 6), (0, 4))), np.concatenate([zeros, values[3:]]))


@pytest.mark.parametrize("form", ["C", "F", "chunks"])
def test_ranks_of_all_read_an_array_as_it_lies(form: str, tmp_path: Path) -> None:
    import outsize
    import outsize.array as xp

    a = np.random.default_rng(0).normal(size=(1500, 2100)).astype("f4")
    if form == "chunks":
        x = outsize.open(make(tmp_path / "x.zarr", a, (500, 300)))
    else:
        np.save(tmp_path / "x.npy", np.asfortranarray(a) if form == "F" else a)
        x = outsize.open(tmp_path / "x.npy")
    budget, first = 16 << 20, 0 if form == "chunks" else 3  # rows that begin inside of chunks are read in parts of them
    for lazy, want, digits in (
        (xp.median(x), np.median(a), 2), (xp.median(x * 2, keepdims=True), np.median(a * 2, keepdims=True), 2),
        (xp.quantile(x[first:], [0.1, 0.9]), np.quantile(a[first:], [0.1, 0.9]), 3),
    ):  # fmt: skip
        assert lazy.plan(budget).read <= (digits + 0.3) * a.nbytes
        np.testing.assert_array_equal(lazy.compute(budget), want)


def test_a_budget_just_above_the_smallest_reads_whole_chunks(tmp_path: Path) -> None:
    import outsize
    import outsize.array as xp

    x = outsize.open(make(tmp_path / "x.zarr", np.ones((4000, 1000), "f4"), (1000, 500)))
    for lazy in (x.sum(), x.mean(axis=0), xp.median(x)):
        plan = lazy.plan(lazy.plan("1GiB").smallest + 2 * 1000 * 500 * 4)
        assert plan.read <= 2 * 3 * x.nbytes  # of two digits; it was 500 times for a sum


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
    st.data(),
)
def test_chunks_of_a_straight_region_are_whole_and_in_one_piece(
    chunk: tuple[int, ...], chunks: tuple[int, ...], step: tuple[int, ...], data: Any
) -> None:
    shape = tuple(c * n for c, n in zip(chunk, chunks, strict=True))
    store = object.__new__(ZarrStore)
    store._chunk, store.dtype, store._coding = chunk, np.dtype("i4"), Coding(None, np.dtype("i4"), "C")  # type: ignore[misc]
    region = tuple(
        (low, min(n, low + s))
        for n, s in zip(shape, step, strict=True)
        for low in [data.draw(st.sampled_from(range(0, n, s)))]
    )
    block = np.zeros(tuple(b - a for a, b in region), "i4")
    targets = [block[piece.target] for piece in cut_regular(region, chunk)]
    if store._lies_straight(region):
        assert all(target.shape == chunk and target.flags.c_contiguous for target in targets)
    elif all(s % c == 0 for s, c in zip(step, chunk, strict=True)) and len(targets) > 1:
        cut_short = any((b - a) % s for (a, b), s in zip(region, step, strict=True))
        assert cut_short or not all(target.flags.c_contiguous for target in targets)
