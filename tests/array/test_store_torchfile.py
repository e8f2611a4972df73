"""Files of torch.save, read without torch and without running what they say."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from stores import read

from outsize.array.store.registry import open_store
from outsize.core.errors import InputError, StoreError

torch = pytest.importorskip("torch")

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32",
]  # fmt: skip


def make_tensor(dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype == "bool":
        return torch.rand(shape) > 0.5
    if dtype.startswith(("int", "uint")):
        return torch.randint(0, 100, shape).to(getattr(torch, dtype))
    return torch.randn(shape).to(getattr(torch, dtype))


def expected(tensor: Any) -> np.ndarray:
    narrow = tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    return (tensor.float() if narrow else tensor).detach().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_dtype_is_read_as_torch_would(dtype: str, tmp_path: Path) -> None:
    tensor = make_tensor(dtype, (5, 7))
    torch.save(tensor, tmp_path / "x.pt")
    np.testing.assert_array_equal(read(open_store(tmp_path / "x.pt")), expected(tensor))


VIEWS = [
    lambda x: x, lambda x: x.t(), lambda x: x[2:5], lambda x: x[:, 1:4], lambda x: x[::2, ::3], lambda x: x[3],
    lambda x: x[:0], lambda x: x[1, 2], lambda x: x[:, :1].expand(8, 6), lambda x: x.reshape(2, 4, 6).permute(2, 0, 1),
    lambda x: x[:1].expand(3, 6),
]  # fmt: skip


@pytest.mark.parametrize("view", range(len(VIEWS)))
@examples(8)
@given(data=st.data())
def test_views_are_read_through_their_strides(view: int, data: st.DataObject) -> None:
    import tempfile

    tensor = VIEWS[view](torch.arange(48.0).reshape(8, 6))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tensor, os.path.join(folder, "x.pt"))
        store = open_store(os.path.join(folder, "x.pt"))
        region = []
        for length in store.shape:
            start = data.draw(st.integers(0, length))
            region.append((start, data.draw(st.integers(start, length))))
        want = tensor.numpy()[tuple(slice(*axis) for axis in region)]
        np.testing.assert_array_equal(read(store, tuple(region)), want)


def test_a_checkpoint_is_walked_by_key(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "c.pth")
    np.testing.assert_array_equal(read(open_store(f"{tmp_path}/c.pth::model/weight")), layer.weight.detach().numpy())
    momentum = open_store(tmp_path / "c.pth", key="optimizer/state/0/exp_avg")
    assert momentum.shape == (3, 4)
    with pytest.raises(
        InputError, match=r"holds \d+ arrays; say which, as .*::model/weight or with key=: model/weight, model/bias"
    ):
        open_store(tmp_path / "c.pth")
    with pytest.raises(InputError, match="did you mean 'model/weight'"):
        open_store(tmp_path / "c.pth", key="model/weigth")


def test_parameters_and_ordered_dictionaries_are_known(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    torch.save(collections.OrderedDict(a=parameter), tmp_path / "x.pt")
    np.testing.assert_array_equal(read(open_store(tmp_path / "x.pt")), parameter.detach().numpy())


def hostile(folder: Path, pickled: bytes, extra: dict[str, bytes] | None = None) -> Path:
    path = folder / "hostile.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, content in (extra or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


class Evil:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_pickle_runs_nothing(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "owned"
    path = hostile(tmp_path, pickle.dumps({"x": Evil(str(target))}, protocol))
    with pytest.raises(StoreError):
        open_store(path)
    assert not target.exists()


def test_tensors_beside_something_hostile_can_still_be_read(tmp_path: Path) -> None:
    target = tmp_path / "owned"
    torch.save({"x": torch.arange(3.0), "bad": Evil(str(target))}, tmp_path / "x.pt")
    np.testing.assert_array_equal(read(open_store(tmp_path / "x.pt", key="x")), [0, 1, 2])
    assert not target.exists()


def rebuild(storage: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A pickle of one tensor, written by hand."""

    class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
        def persistent_id(self, item: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if item == "STORAGE" else None

    out = io.BytesIO()
    writer = Pickler(out, 2)

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, ("STORAGE", offset, shape, strides, False, {})

    writer.dump(Tensor())
    return out.getvalue()


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "said"),
    [
        (0, (10**18,), (1,), "damaged"),
        (0, (2, 2), (2, 10**15), "damaged"),
        (5, (1,), (1,), "damaged"),
        (-1, (1,), (1,), "does not describe tensors"),
        (0, (-4,), (1,), "does not describe tensors"),
        (0, (2, 2), (1,), "does not describe tensors"),
    ],
)
def test_a_tensor_that_reaches_outside_its_storage_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    path = hostile(tmp_path, rebuild(b"", offset, shape, strides), {"data/0": bytes(16)})
    with pytest.raises(StoreError, match=said):
        open_store(path)


def test_a_hand_written_tensor_inside_its_storage_is_read(tmp_path: Path) -> None:
    content = np.arange(4, dtype="<f4").tobytes()
    path = hostile(tmp_path, rebuild(b"", 0, (2, 2), (2, 1)), {"data/0": content})
    np.testing.assert_array_equal(read(open_store(path)), [[0, 1], [2, 3]])
    with pytest.raises(StoreError, match="missing"):
        open_store(hostile(tmp_path, rebuild(b"", 0, (2, 2), (2, 1))))


@examples(150)
@given(st.data())
def test_damaged_files_give_a_store_error_and_nothing_else(data: st.DataObject) -> None:
    import tempfile

    out = io.BytesIO()
    torch.save({"a": torch.arange(5.0), "b": [torch.ones(2, 2)]}, out)
    content = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(4, len(content)))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.pt")
        Path(path).write_bytes(content[:length])
        with contextlib.suppress(StoreError, InputError):
            read(open_store(path, key="a"))


@examples(300)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_pickle_give_a_value_or_an_error_of_ours(data: bytes) -> None:
    from outsize.array.store.formats.torchfile import _Bad, walk_pickle

    with contextlib.suppress(_Bad):
        walk_pickle(data)


def test_the_old_format_says_how_to_convert_it(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(StoreError, match="old format"):
        open_store(tmp_path / "old.pt")


def test_a_program_is_told_from_a_file_of_tensors(tmp_path: Path) -> None:
    path = hostile(tmp_path, pickle.dumps({}, 2), {"constants.pkl": b"", "code/x.py": b""})
    with pytest.raises(StoreError, match="TorchScript"):
        open_store(path)


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    import tracemalloc

    torch.save({"x": torch.zeros(4_000_000)}, tmp_path / "x.pt")
    tracemalloc.start()
    open_store(tmp_path / "x.pt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
