"""Safetensors, .npz members, folders of blocks and arrays in memory: read, refused, and bounded."""

from __future__ import annotations

import io
import json
import os
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from stores import arrays, make_buffer, peak_of, read, regions, select, write

from outsize.array.run.contents import show
from outsize.array.store.formats.flat import FlatStore
from outsize.array.store.formats.npz import DeflatedStore
from outsize.array.store.io.narrow_floats import float8_values
from outsize.array.store.registry import create_sink, open_store
from outsize.core.errors import InputError, StoreError

# safetensors


@examples(25)
@given(data=st.data())
def test_safetensors_written_by_its_own_library_is_read_in_any_region(data: st.DataObject) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    values, other = data.draw(arrays()), data.draw(arrays())
    region = data.draw(regions(values.shape))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.safetensors")
        numpy_io.save_file({"a.weight": values, "b": other}, path, metadata={"format": "np"})
        np.testing.assert_array_equal(read(open_store(path, key="a.weight"), region), select(values, region))
        np.testing.assert_array_equal(read(open_store(f"{path}::b")), other)


def test_our_safetensors_are_read_by_its_own_library(tmp_path: Path) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    for dtype in ("float32", "float16", "int8", "bool", "uint64", ">f4"):
        values = np.random.default_rng(0).integers(0, 2, (30, 7)).astype(dtype)
        write(create_sink(f"{tmp_path}/x.safetensors::layer.0", values.shape, values.dtype), values).close()
        loaded = numpy_io.load_file(tmp_path / "x.safetensors")
        np.testing.assert_array_equal(loaded["layer.0"], values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_that_numpy_lacks_are_read_as_the_same_values_in_float32(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensor = torch.randn(33, 65).to(getattr(torch, dtype))
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    store = open_store(tmp_path / "x.safetensors")
    assert store.dtype == np.float32
    region = ((3, 30), (7, 60))
    np.testing.assert_array_equal(read(store, region), tensor.float().numpy()[3:30, 7:60])
    assert store.traffic(((0, 33), (0, 65))) < 33 * 65 * 2 + 8192, "only the narrow bytes are moved"
    assert show(tmp_path / "x.safetensors").arrays[0].bytes == tensor.numel() * tensor.element_size()
    with pytest.raises(InputError, match="cannot write into it"):
        open_store(tmp_path / "x.safetensors", mode="r+")


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_all_256_values_of_a_one_byte_float_are_those_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    np.testing.assert_array_equal(float8_values(dtype), codes.float().numpy())


def table(rows: dict[str, Any], data: bytes = bytes(16)) -> bytes:
    text = json.dumps(rows).encode()
    return struct.pack("<Q", len(text)) + text + data


def row(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (table(row(shape=[10**18])), "damaged or truncated"),
        (table(row(shape=[4], offsets=[0, 10**18])), "damaged or truncated"),
        (table(row(offsets=[16, 32])), "damaged or truncated"),
        (table(row(offsets=[16, 0])), "row of the table is damaged"),
        (table(row(shape=[-4])), "row of the table is damaged"),
        (table(row(shape=["4"])), "row of the table is damaged"),
        (table(row(shape=4)), "row of the table is damaged"),
        (table(row(offsets=[0])), "row of the table is damaged"),
        (table({"x": 3}), "row of the table is damaged"),
        (table(row(dtype="F4")), "has dtype F4"),
        (table(row(dtype=["F32"])), "has dtype"),
        (table(row(), bytes(15)), "damaged or truncated"),
        (struct.pack("<Q", 5) + b'{"x":' + bytes(100), "table of tensors is damaged"),
        (struct.pack("<Q", 200_000_000) + b"{" + bytes(100), "safetensors"),
        (struct.pack("<Q", 4000) + b"[" * 4000, "safetensors"),
        (b"\x05\0\0", "safetensors"),
        (table({}), "holds no arrays"),
    ],
)
def test_a_hostile_table_is_one_clear_error(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises((StoreError, InputError), match=said) as caught:
        open_store(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_of_ten_thousand_tensors_lists_only_some(tmp_path: Path) -> None:
    rows = {f"layer.{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(10_000)}
    (tmp_path / "x.safetensors").write_bytes(table(rows, bytes(10_000)))
    with pytest.raises(InputError, match=r"10000 arrays.*and 9980 more") as caught:
        open_store(tmp_path / "x.safetensors")
    assert len(str(caught.value)) < 1000
    assert read(open_store(tmp_path / "x.safetensors", key="layer.77")).shape == (1,)


# npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@examples(25)
@given(data=st.data())
def test_a_member_of_an_npz_is_read_in_any_region(save: Any, data: st.DataObject) -> None:
    values = np.asarray(data.draw(arrays()), order=data.draw(st.sampled_from("CF")))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.npz")
        save(path, first=np.arange(5), x=values)
        store = open_store(path, key="x")
        assert isinstance(store, FlatStore if save is np.savez else DeflatedStore)
        for _ in range(3):  # forwards and backwards
            region = data.draw(regions(values.shape))
            np.testing.assert_array_equal(read(store, region), select(values, region))
        store.close()


def test_a_deflated_member_is_streamed_once_when_it_is_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).standard_normal((400, 1000))
    np.savez_compressed(tmp_path / "x.npz", x=values)
    store = open_store(tmp_path / "x.npz")
    opened = []
    real = zipfile.ZipFile.open
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *a, **k: (opened.append(1), real(*a, **k))[1])
    for start in range(0, 400, 50):
        region = ((start, start + 50), (0, 1000))
        np.testing.assert_array_equal(read(store, region), values[start : start + 50])
    assert len(opened) == 1
    store.close()


STREAM = """
from stores import make_buffer
from outsize.array.store.registry import open_store
store = open_store(sys.argv[1])
region = ((3900, 4000), (0, 1000))
begin()
store.read(region, make_buffer(store.extent(region)))
end()
"""


@pytest.mark.parametrize("content", ["noise", "zeros"])
def test_reading_the_end_of_a_deflated_member_takes_no_more_than_its_extent(content: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4000, 1000)) if content == "noise" else np.zeros((4000, 1000))
    np.savez_compressed(tmp_path / "x.npz", x=values)
    store = open_store(tmp_path / "x.npz")
    extent = store.extent(((3900, 4000), (0, 1000)))
    assert extent < 2_000_000 < values.nbytes
    assert peak_of(STREAM, str(tmp_path / "x.npz")) <= extent + 400_000  # Python and zlib touch 270 kB of their own


def test_damaged_members_are_one_clear_error(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((100, 100)))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(content[:-200])
    with pytest.raises(StoreError, match="damaged or truncated zip"):
        open_store(tmp_path / "cut.npz")
    content[40_000:40_040] = bytes(40)
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        read(open_store(tmp_path / "bad.npz"))


def member(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (member(b"{'descr':'<f8','fortran_order':False,'shape':(1000000000000000000,)}\n", bytes(64)), "cut off"),
        (member(b"{'descr':'|O','fortran_order':False,'shape':(1,)}\n", pickle_of := b"\x80\x04N."), "Python objects"),
        (member(b"__import__('os').system('x')\n"), "damaged"),
        (b"hello", "not a .npy"),
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_hostile_member_is_one_clear_error(content: bytes, said: str, compression: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", compression) as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(StoreError, match=said):
        open_store(tmp_path / "x.npz")


def test_a_zip_bomb_costs_no_more_than_what_is_asked_of_it(tmp_path: Path) -> None:
    """50 MB of zeros in 50 kB: opening and reading the first rows decompresses only those."""
    out = io.BytesIO()
    np.save(out, np.zeros(6_000_000))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", out.getvalue())
    store = open_store(tmp_path / "x.npz")
    np.testing.assert_array_equal(read(store, ((0, 10),)), np.zeros(10))


# a folder of blocks


@examples(25)
@given(data=st.data())
def test_blocks_of_a_folder_are_one_array_along_axis_0_in_natural_order(data: st.DataObject) -> None:
    values = data.draw(arrays(min_dims=1))
    cuts = sorted(data.draw(st.lists(st.integers(0, values.shape[0]), max_size=12)))
    region = data.draw(regions(values.shape))
    with tempfile.TemporaryDirectory() as folder:
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, values.shape[0]], strict=True)):
            block = np.asarray(values[start:stop], order=data.draw(st.sampled_from("CF")))
            np.save(os.path.join(folder, f"part{number}.npy"), block)
        store = open_store(folder)
        assert store.shape == values.shape
        np.testing.assert_array_equal(read(store, region), select(values, region))


@examples(25)
@given(data=st.data())
def test_blocks_called_by_their_place_are_a_grid(data: st.DataObject) -> None:
    values = data.draw(arrays(["int16"], min_dims=2, max_dims=3))
    rows = sorted(data.draw(st.lists(st.integers(0, values.shape[0]), max_size=3)))
    columns = sorted(data.draw(st.lists(st.integers(0, values.shape[1]), max_size=3)))
    region = data.draw(regions(values.shape))
    with tempfile.TemporaryDirectory() as folder:
        for i, (a, b) in enumerate(zip([0, *rows], [*rows, values.shape[0]], strict=True)):
            for j, (c, d) in enumerate(zip([0, *columns], [*columns, values.shape[1]], strict=True)):
                np.save(os.path.join(folder, f"tile_{i}-{j}.npy"), values[a:b, c:d])
        store = open_store(folder)
        assert store.shape == values.shape
        np.testing.assert_array_equal(read(store, region), select(values, region))


def test_blocks_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    def folder(name: str, **blocks: np.ndarray) -> Path:
        (tmp_path / name).mkdir()
        for key, block in blocks.items():
            np.save(tmp_path / name / f"{key.replace('_', '-')}.npy", block)
        return tmp_path / name

    with pytest.raises(StoreError, match=r"b\.npy is int32 .* must agree"):
        open_store(folder("dtype", a=np.zeros((2, 2)), b=np.zeros((2, 2), np.int32)))
    with pytest.raises(StoreError, match=r"b\.npy has length 3 along axis 1, its neighbours have 2"):
        open_store(folder("length", a=np.zeros((2, 2)), b=np.zeros((2, 3))))
    with pytest.raises(StoreError, match=r"block 1-0\.npy of a grid of 2 x 2 is missing"):
        open_store(folder("hole", **{"0_0": np.zeros((2, 2)), "0_1": np.zeros((2, 2)), "1_1": np.zeros((2, 2))}))
    with pytest.raises(StoreError, match="0-d"):
        open_store(folder("scalar", a=np.zeros(())))
    with pytest.raises(StoreError, match="axes"):
        open_store(folder("flat", **{"0_0": np.zeros(2), "0_1": np.zeros(2)}))
    (folder("damaged", a=np.zeros(3)) / "b.npy").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match=r"b\.npy is not a \.npy"):
        open_store(tmp_path / "damaged")


def test_a_folder_of_more_blocks_than_may_be_open_is_read(tmp_path: Path) -> None:
    import resource

    for number in range(300):
        np.save(tmp_path / f"{number}.npy", np.full(3, number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        np.testing.assert_array_equal(read(open_store(tmp_path)), np.repeat(np.arange(300), 3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# arrays in memory


def test_a_tensor_of_torch_is_opened_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(2, 3)
    store = open_store(tensor)
    tensor[0, 0] = 99
    assert read(store)[0, 0] == 99
    assert store.extent(((0, 2), (0, 3))) == 0
    np.testing.assert_array_equal(read(open_store(tensor.t())), tensor.t().numpy())
    np.testing.assert_array_equal(read(open_store(torch.nn.Parameter(tensor))), tensor.numpy())
    narrow = tensor.to(torch.bfloat16)
    np.testing.assert_array_equal(read(open_store(narrow), ((0, 1), (1, 3))), narrow.float().numpy()[:1, 1:])


def test_anything_with_numpys_own_protocols_is_opened_without_a_copy() -> None:
    class Foreign:
        def __init__(self) -> None:
            self.data = np.arange(4)
            self.__array_interface__ = self.data.__array_interface__

    foreign = Foreign()
    store = open_store(foreign)
    foreign.data[0] = 7
    assert read(store)[0] == 7
    store = open_store(np.arange(3), mode="r+")
    store.update().write(((0, 1),), np.array([5]), make_buffer(1))
    assert read(store)[0] == 5


def test_an_array_on_a_device_or_of_objects_is_refused() -> None:
    class OnDevice:
        device = "cuda:0"

        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(InputError, match=r"lies on cuda:0.*\.cpu\(\)"):
        open_store(OnDevice())
    with pytest.raises(InputError, match="Python objects"):
        open_store(np.array([object()]))
