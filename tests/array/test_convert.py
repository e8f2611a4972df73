"""Conversions: the values NumPy would give, the error they cost, and nothing written where nothing was asked for."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import cgroup
import numpy as np
import pytest
from effort import examples, long
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from stores import arrays, read

from outsize.array.kernels.precision import Meter
from outsize.array.run.convert import convert
from outsize.array.store.registry import open_store
from outsize.cli import main
from outsize.core.errors import BudgetError, InputError, StoreError

NUMBERS = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]


def plain_cost(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """The same numbers, by the definition, element by element."""
    cost: dict[str, float] = dict.fromkeys(
        ("max_abs", "max_rel", "overflowed", "flushed", "nans_created", "changed"), 0
    )
    squares, kept = 0.0, 0
    integer = after.dtype.kind in "iu"
    limits = np.iinfo(after.dtype) if integer else None
    for x, y in zip(before.reshape(-1).tolist(), after.reshape(-1).tolist(), strict=True):
        finite = np.isfinite(x)
        if (limits is not None and (not finite or not limits.min <= int(x) <= limits.max)) or (
            not integer and finite and np.isinf(y)
        ):
            cost["overflowed"] += 1
        elif np.isnan(y):
            cost["nans_created"] += not np.isnan(x)
        elif finite:
            error = (
                abs(x - y)
                if isinstance(x, complex)
                else abs(
                    float(int(x) - int(y)) if isinstance(x, int) and float(y).is_integer() else float(x) - float(y)
                )
            )
            squares, kept = squares + error**2, kept + 1
            cost["changed"] += error > 0
            cost["flushed"] += x != 0 and y == 0
            cost["max_abs"] = max(cost["max_abs"], error)
            if x != 0 and y != 0:
                cost["max_rel"] = max(cost["max_rel"], error / abs(x))
    return cost | {"rms": (squares / kept) ** 0.5 if kept else 0.0}


@examples(150)
@given(data=st.data())
def test_the_cost_is_what_its_definition_says_for_any_two_types(data: st.DataObject) -> None:
    before = data.draw(
        st.sampled_from(["int8", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"])
    )
    targets = ["complex64", "complex128"] if before == "complex64" else NUMBERS[1:-1]
    values = data.draw(hnp.arrays(before, st.integers(0, 30)))
    after = data.draw(st.sampled_from(targets))
    with np.errstate(all="ignore"):
        cast = values.astype(after)
    meter = Meter(values.dtype, cast.dtype)
    meter.add(values[: values.size // 2], cast[: values.size // 2])
    meter.add(values[values.size // 2 :], cast[values.size // 2 :])
    got, want = meter.read(), plain_cost(values, cast)
    assert got.elements == values.size
    for name in ("overflowed", "flushed", "nans_created", "changed"):
        assert getattr(got, name) == want[name], name
    if not np.isinf(want["rms"]):
        for name in ("max_abs", "max_rel", "rms"):
            assert getattr(got, name) == pytest.approx(want[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("values", "after", "said"),
    [
        (np.array([2**53 + 1, 1]), "complex128", {"changed": 1, "max_abs": 1.0}),
        (np.array([1 + np.longdouble(2) ** -60]) * (1 + 0j), "complex128", {"changed": 1, "max_abs": 2.0**-60}),
        (np.array([1e300, 0.1]), "complex64", {"overflowed": 1, "changed": 1}),
        (np.array([np.nan, np.inf, 1, 0, 7]), "bool", {"overflowed": 3, "changed": 0}),
    ],
)
def test_what_complex_and_boolean_types_cannot_hold_is_counted(values: np.ndarray, after: str, said: dict) -> None:
    with warnings.catch_warnings():  # a mark would also catch what tests before have left to the collector
        warnings.simplefilter("error")
        cost = convert(values, None, after).precision
    assert not cost.exact
    assert {name: getattr(cost, name) for name in said} == said


def test_f16_is_float16_as_everywhere(tmp_path: Path) -> None:
    convert(np.zeros(3, "f4"), tmp_path / "y.npy", "f16")
    assert np.load(tmp_path / "y.npy").dtype == np.float16


@examples(30)
@given(data=st.data())
def test_converted_files_hold_what_numpys_astype_gives(data: st.DataObject) -> None:
    values = data.draw(arrays(["int16", "int64", "float32", "float64"]))
    after = data.draw(st.sampled_from(["float16", "float32", "float64", "int32"]))
    suffix = data.draw(st.sampled_from([".npy", ".zarr", ".h5", ".safetensors"]))
    with tempfile.TemporaryDirectory() as folder:
        source, target = os.path.join(folder, "x.npy"), os.path.join(folder, "y" + suffix)
        np.save(source, np.asfortranarray(values) if data.draw(st.booleans()) else values)
        done = convert(source, target, after, budget="64MiB")
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(read(open_store(target)), values.astype(after))
        assert done.precision.elements == values.size
        assert sorted(os.listdir(folder)) == ["x.npy", "y" + suffix]


def test_a_large_conversion_in_a_small_budget_measures_every_element_once(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3000, 1000)).astype("f4")
    values[0, :3] = [1e6, 1e-9, np.nan]
    np.save(tmp_path / "x.npy", values)
    done = convert(tmp_path / "x.npy", tmp_path / "y.zarr", "float16", budget="16MiB", chunks=(100, 1000))
    assert done.precision.elements == values.size
    assert (done.precision.overflowed, done.precision.flushed, done.precision.nans_created) == (1, 1, 0)
    checked = convert(tmp_path / "x.npy", None, "float16", budget="16MiB")
    assert checked.precision.rms == pytest.approx(done.precision.rms, rel=1e-12)
    assert checked.precision.max_rel == done.precision.max_rel
    assert checked.target is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.npy", "y.zarr"]
    assert any("bfloat16 has the range" in note for note in done.notes)


def test_bfloat16_is_written_to_safetensors_as_torch_would_round_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate(
        [np.random.default_rng(0).standard_normal(5000), [np.nan, np.inf, -np.inf, 0, -0.0, 3.4e38, 1e-40]]
    )
    np.save(tmp_path / "x.npy", values.astype("f4"))
    done = convert(tmp_path / "x.npy", tmp_path / "y.safetensors", "bfloat16")
    want = torch.from_numpy(values.astype("f4")).bfloat16().float().numpy()
    np.testing.assert_array_equal(read(open_store(tmp_path / "y.safetensors")), want)
    assert (done.dtype_after, done.bytes_after) == ("bfloat16", 2 * values.size)
    assert done.precision.overflowed == 1  # 3.4e38 rounds to infinity
    back = convert(f"{tmp_path}/y.safetensors::tensor", None, "float32")
    assert back.precision.exact and back.bytes_before == 2 * values.size
    with pytest.raises(InputError, match=r"only \.safetensors"):
        convert(tmp_path / "x.npy", tmp_path / "y.npy", "bfloat16")


def test_mistakes_and_damage_leave_no_output(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 100)))
    np.save(tmp_path / "c.npy", np.zeros(3, complex))
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(content[:-100])
    for call, kind, said in [
        (lambda: convert(tmp_path / "x.npy", tmp_path / "x.npy", "f4"), InputError, "also an input"),
        (lambda: convert(tmp_path / "c.npy", tmp_path / "y.npy", "f4"), InputError, "imaginary part"),
        (lambda: convert(tmp_path / "x.npy", tmp_path / "y.npy", "U8"), InputError, "must be numbers"),
        (lambda: convert(tmp_path / "cut.npy", tmp_path / "y.npy", "f4"), StoreError, "cut off"),
        (lambda: convert(tmp_path / "x.npy", tmp_path / "y.npy", "f4", budget=1000), BudgetError, "smallest budget"),
        (lambda: convert(tmp_path / "x.npy", tmp_path / "no" / "y.npy", "f4"), StoreError, "there is no folder"),
    ]:
        with pytest.raises(kind, match=said):
            call()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c.npy", "cut.npy", "x.npy"]
    assert (tmp_path / "x.npy").read_bytes() == content


def test_a_chunk_that_is_lost_on_the_way_leaves_no_output(tmp_path: Path) -> None:
    convert(np.arange(10000.0), tmp_path / "x.zarr", chunks=(100,))
    (tmp_path / "x.zarr" / "c" / "77").unlink()
    with pytest.raises(StoreError, match="missing"):
        convert(tmp_path / "x.zarr", tmp_path / "y.npy", "f4")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.zarr"]
    done = convert(tmp_path / "x.zarr", tmp_path / "y.npy", "f4", missing="fill")
    assert done.precision.elements == 10000


def test_the_command_converts_checks_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.linspace(0, 1e5, 1000))
    x, y = str(tmp_path / "x.npy"), str(tmp_path / "y.zarr")
    assert main(["convert", x, y, "--dtype", "float16", "--chunks", "100", "--budget", "64MiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["precision"]["overflowed"] > 0 and told["saved"] == 6000
    assert main(["convert", x, "--check", "--dtype", "float32"]) == 0
    assert "measured only" in " ".join(capsys.readouterr().out.split())
    assert main(["convert", x]) == 2
    assert main(["convert", x, y, "--chunks", "many"]) == 2
    assert main(["convert", str(tmp_path / "no.npy"), y]) == 2
    (tmp_path / "r.bin").write_bytes(np.arange(12, dtype="<i2").tobytes())
    raw = ["convert", str(tmp_path / "r.bin"), str(tmp_path / "r.npy"), "--shape=-1,2", "--raw-dtype", "<i2"]
    assert main(raw) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "r.npy"), np.arange(12).reshape(6, 2))


@pytest.mark.parametrize("target", ["y.npy", "y.zarr", "y.h5", "y.safetensors"])
def test_a_file_larger_than_a_real_memory_limit_is_converted_inside_it(target: str, tmp_path: Path) -> None:
    rows, limit = (50_000, 160 << 20) if long() else (25_000, 80 << 20)
    np.save(tmp_path / "x.npy", np.ones((rows, 1000), np.float32))  # 191 MiB, or half of that
    code = f"""
from outsize.array.run.convert import convert
done = convert("x.npy", "{target}", "float16", budget="48MiB")
assert done.precision.exact and done.precision.elements == {rows} * 1000
"""
    outcome = cgroup.run([sys.executable, "-c", code], limit, cwd=str(tmp_path))
    assert not outcome.killed and outcome.status == 0, outcome.stderr
    assert open_store(tmp_path / target).dtype == np.float16
