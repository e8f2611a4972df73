"""Every format through the one door: what was written is what is read, for any region."""

from __future__ import annotations

import os
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from stores import WRITTEN, arrays, chunk_shapes, read, regions, select, write

from outsize.array.store import registry
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.store.registry import FORMATS, create_sink, open_store
from outsize.core.errors import InputError, StoreError


@pytest.mark.parametrize("suffix", WRITTEN)
@examples(25)
@given(data=st.data())
def test_what_a_sink_wrote_is_what_its_store_reads_in_any_region(suffix: str, data: st.DataObject) -> None:
    values = data.draw(arrays())
    region = data.draw(regions(values.shape))
    chunks = None
    if suffix in (".zarr", ".h5") and values.ndim:
        chunks = data.draw(st.none() | chunk_shapes(values.shape))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x" + suffix)
        store = write(create_sink(path, values.shape, values.dtype, chunks=chunks), values)
        np.testing.assert_array_equal(read(store), values)
        if suffix == ".bin":
            again = open_store(path, shape=values.shape, dtype=values.dtype)
        else:
            again = open_store(path)
        assert (again.shape, again.dtype) == (values.shape, values.dtype)
        np.testing.assert_array_equal(read(again, region), select(values, region))
        assert os.listdir(folder) == ["x" + suffix], "nothing but the output may be left"
        store.close()
        again.close()


@pytest.mark.parametrize("suffix", WRITTEN)
def test_nothing_stands_under_the_final_name_before_commit_and_abort_leaves_nothing(
    suffix: str, tmp_path: Path
) -> None:
    target = tmp_path / ("x" + suffix)
    sink = create_sink(target, (8, 8), "float32")
    sink.write(((0, 8), (0, 8)), np.ones((8, 8), np.float32), np.zeros(sink.extent(((0, 8), (0, 8))), np.uint8))
    sink.sync()
    assert not target.exists()
    assert os.path.exists(sink.partial)
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", WRITTEN)
def test_a_resumed_sink_keeps_what_was_written_before(suffix: str, tmp_path: Path) -> None:
    target = tmp_path / ("x" + suffix)
    chunks = (4, 8) if suffix in (".zarr", ".h5") else None
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    first = create_sink(target, (8, 8), "float32", chunks=chunks)
    region = ((0, 4), (0, 8))
    first.write(region, values[:4], np.zeros(first.extent(region), np.uint8))
    first.sync()
    if hasattr(first, "_file"):
        first._file.close()  # what the end of a process does
    second = create_sink(target, (8, 8), "float32", chunks=chunks, resume=True)
    assert second.partial == first.partial
    region = ((4, 8), (0, 8))
    second.write(region, values[4:], np.zeros(second.extent(region), np.uint8))
    np.testing.assert_array_equal(read(second.commit()), values)


@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".h5", ".safetensors"])
@pytest.mark.parametrize("chunks", [None, (3, 4)])
def test_a_store_opened_for_writing_changes_only_the_region_that_is_written(
    suffix: str, chunks: tuple[int, int] | None, tmp_path: Path
) -> None:
    if chunks and suffix not in (".zarr", ".h5"):
        pytest.skip("this format has no chunks")
    values = np.arange(70, dtype=np.int32).reshape(7, 10)
    path = tmp_path / ("x" + suffix)
    write(create_sink(path, values.shape, values.dtype, chunks=chunks), values).close()
    sink = open_store(path, mode="r+").update()
    region = ((2, 6), (3, 9))
    sink.write(region, np.full((4, 6), -1, np.int32), np.zeros(sink.extent(region), np.uint8))
    sink.commit()
    values[2:6, 3:9] = -1
    np.testing.assert_array_equal(read(open_store(path)), values)


@pytest.mark.parametrize("suffix", WRITTEN)
def test_a_store_opened_for_reading_refuses_to_be_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / ("x" + suffix)
    store = write(create_sink(path, (2,), "int8"), np.zeros(2, np.int8))
    with pytest.raises(InputError, match=r"mode='r\+'"):
        store.update()


def test_an_older_output_is_replaced_only_at_commit(tmp_path: Path) -> None:
    for suffix in (suffix for suffix in WRITTEN if suffix != ".bin"):
        path = tmp_path / ("x" + suffix)
        write(create_sink(path, (3,), "int8"), np.zeros(3, np.int8)).close()
        sink = create_sink(path, (4,), "int16")
        assert open_store(path).shape == (3,)
        np.testing.assert_array_equal(read(write(sink, np.arange(4, dtype=np.int16))), np.arange(4))
        assert open_store(path).shape == (4,)


def test_a_folder_that_is_not_zarr_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not overwritten"):
        create_sink(tmp_path / "x.zarr", (3,), "int8")
    (tmp_path / "x.npy").mkdir()
    with pytest.raises(InputError, match="folder"):
        create_sink(tmp_path / "x.npy", (3,), "int8")


@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_a_named_output_does_not_replace_a_file_that_holds_other_arrays(suffix: str, tmp_path: Path) -> None:
    def save(key: str) -> None:
        write(create_sink(f"{target}::{key}", (3,), np.float32), np.ones(3, np.float32)).close()

    target = tmp_path / f"x{suffix}"
    save("a/b")
    save("a/b")  # the same one again
    before = target.read_bytes()
    with pytest.raises(InputError, match="holds other arrays than 'c'"):
        save("c")
    assert target.read_bytes() == before


def test_bytes_decide_the_format_and_not_the_name(tmp_path: Path) -> None:
    values = np.arange(6.0)
    np.save(tmp_path / "x.npy", values)
    (tmp_path / "x.npy").rename(tmp_path / "weights.h5")
    np.testing.assert_array_equal(read(open_store(tmp_path / "weights.h5")), values)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.npy", b"hello, this is text", "not .npy"),
        ("x.npz", b"hello, this is text", "not .npz"),
        ("x.h5", b"hello, this is text", "not HDF5"),
        ("x.pt", b"hello, this is text", "not torch"),
        ("x.safetensors", b"hello, this is text", "not safetensors"),
        ("x.xyz", b"hello, this is text", "shape= and dtype="),
        ("x.npy", b"", "empty"),
        ("x.npz", b"PK\x03\x04" + b"\0" * 100, "zip"),
        ("x.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 100, "HDF5"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_one_clear_error(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreError, match=said) as caught:
        open_store(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_missing_files_folders_and_devices_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        open_store(tmp_path / "nothing.npy")
    with pytest.raises(StoreError, match="folder without zarr metadata"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="neither a file nor a folder"):
        open_store("/dev/null")
    with pytest.raises(StoreError, match="folder"):
        open_store(tmp_path, shape=(3,), dtype="f4")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_said_plainly(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.npy").chmod(0)
    with pytest.raises(StoreError, match="Permission denied"):
        open_store(tmp_path / "x.npy")


def test_a_file_that_cannot_be_opened_names_the_system_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(StoreError, match=r"x\.npy: Permission denied"):
        open_store(tmp_path / "x.npy")


def test_mistakes_in_what_is_asked_are_input_errors(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.bin").write_bytes(bytes(12))
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    for call, said in [
        (lambda: open_store(tmp_path / "x.npy", key="a"), "one array"),
        (lambda: open_store(tmp_path / "x.npy", mode="w"), "mode"),
        (lambda: open_store(tmp_path / "x.npy", offset=3), "shape= and dtype="),
        (lambda: open_store(tmp_path / "x.bin"), "shape= and dtype="),
        (lambda: open_store(tmp_path / "x.bin", shape=(3,)), "both"),
        (lambda: open_store(tmp_path / "x.bin", shape=(3,), dtype="f4", offset=-1), "offset"),
        (lambda: open_store(tmp_path / "x.npz", mode="r+"), "cannot be written in place"),
        (lambda: open_store(object()), "cannot open a object"),
        (lambda: open_store(f"{tmp_path}/x.npz::a", key="b"), "two keys"),
        (lambda: create_sink(tmp_path / "y.xyz", (3,), "f4"), r"\.npy"),
        (lambda: create_sink(tmp_path / "y.npy", (3,), "f4", chunks=(1,)), "no chunks"),
        (lambda: create_sink(tmp_path / "y.npy", (3,), "f4", key="a"), "one array"),
        (lambda: create_sink(tmp_path / "y.npy", (3,), "bfloat16"), "NumPy has no bfloat16"),
        (lambda: create_sink(tmp_path / "y.zarr", (3,), "f4", chunks=(0,)), "1 or more"),
        (lambda: create_sink(tmp_path / "y.h5", (3,), "f4", chunks=(1, 1)), "one length"),
        (lambda: create_sink(tmp_path / "y.safetensors", (3,), "c16"), "cannot hold"),
    ]:
        with pytest.raises(InputError, match=said):
            call()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.bin", "x.npy", "x.npz"]


def test_every_format_is_one_row_with_its_own_suffixes() -> None:
    suffixes = [suffix for row in FORMATS for suffix in row.suffixes]
    assert len(suffixes) == len(set(suffixes))


def test_a_file_of_more_axes_than_numpy_has_is_refused(tmp_path) -> None:
    header = repr({"descr": "<f4", "fortran_order": False, "shape": (1,) * 65}).encode().ljust(1013) + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4))
    with pytest.raises(StoreError, match="65 axes: NumPy has at most 64"):
        open_store(tmp_path / "x.npy")


def test_every_formats_module_has_what_its_row_says() -> None:
    for row in FORMATS:
        said = {"recognise": not row.magic, "open_file": True, "describe": row.writes, "wrap": bool(row.library)}
        wanted = {name for name, has in said.items() if has}
        assert {name for name in ("recognise", "open_file", "describe", "wrap") if hasattr(row.module, name)} == wanted


def test_a_new_format_is_a_module_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of numbers, one a line, kept in memory: everything else goes on as before."""
    toy = types.ModuleType("outsize.array.store.formats.toy")
    toy.recognise = lambda path, head, size: head.startswith(b"#toy")  # type: ignore[attr-defined]
    toy.open_file = lambda path, options: MemoryStore(np.loadtxt(path), path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, toy.__name__, toy)
    monkeypatch.setattr(registry, "FORMATS", (registry.Format("toy", "toy", (".toy",)), *FORMATS))
    (tmp_path / "x.toy").write_text("#toy\n1\n2\n")
    assert open_store(tmp_path / "x.toy").shape == (2,)
    with pytest.raises(InputError, match=r"\(toy\) cannot be written in place"):
        open_store(tmp_path / "x.toy", mode="r+")
    with pytest.raises(InputError, match=r"must end in one of \.zarr"):
        create_sink(tmp_path / "y.toy", (3,), "f4")
    (tmp_path / "z.toy").write_text("none")
    with pytest.raises(StoreError, match="is not toy"):
        open_store(tmp_path / "z.toy")


def test_a_missing_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"pip install 'outsize\[zarr\]'"):
        open_store(tmp_path / "x.zarr")
    with pytest.raises(InputError, match=r"pip install 'outsize\[hdf5\]'"):
        open_store(tmp_path / "x.h5")
    with pytest.raises(InputError, match=r"pip install 'outsize\[hdf5\]'"):
        create_sink(tmp_path / "y.h5", (3,), "f4")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000000)}", "cut off"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}", "shape"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}", "Python objects"),
        ("__import__('os').abort()", "damaged"),
        ("{'descr': '<f8'}", "damaged"),
    ],
)
def test_a_hostile_npy_header_is_one_clear_error(header: str, said: str, tmp_path: Path) -> None:
    text = header.ljust(117) + "\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(80))
    with pytest.raises(StoreError, match=said) as caught:
        open_store(tmp_path / "x.npy")
    assert "\n" not in str(caught.value)
