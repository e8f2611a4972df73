"""Factors in files: the same bits come back, and what is damaged or hostile is one sentence."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from effort import examples
from factor_forms import close, dense, factors, make
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize import BudgetError, InputError, StoreError
from outsize.core.noun import Known
from outsize.core.outcomes.factoring import Spectrum
from outsize.factor import Factored
from outsize.factor.formats import Narrow


@given(factors(), st.sampled_from([0.0, 1 / 3, 1e-7]))
@examples(60)
def test_what_is_written_comes_back_bit_by_bit(tmp_path_factory, form, error):
    spectra = (Spectrum(name="mode 0", values=(3.0, 1 / 7), kept=1, length=9),)
    f = Factored(
        form, error=error, known=Known.ESTIMATE, asked=0.5, norm=np.pi, original="int16", notes=("a 'note'", "ü"), spectra=spectra
    )  # fmt: skip
    path = tmp_path_factory.mktemp("factors") / f"x{form.suffixes[0]}"
    saved, opened = f.save(path), outsize.open(path)
    for same in (saved, opened):
        assert isinstance(same, Factored) and type(same.form) is type(form) and same.shape == form.shape
        assert {name: array.tobytes() for name, array in same.form.arrays().items()} == {
            name: array.tobytes() for name, array in form.arrays().items()
        }
        assert (same.error, same.known, same.asked, same.notes, same.spectra) == (
            error,
            Known.ESTIMATE,
            0.5,
            f.notes,
            spectra,
        )
        assert same.facts.norm == np.pi and same.ratio == f.ratio and same.dtype == form.dtype
    assert os.listdir(path.parent) == [path.name]  # nothing is left beside it


def test_any_reader_of_safetensors_opens_the_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    form = make("tucker", (5, 6), (2, 3), "float32")
    Factored(form, error=0.1).save(tmp_path / "x.safetensors")
    there = safetensors.load_file(tmp_path / "x.safetensors")
    assert {name: array.tobytes() for name, array in there.items()} == {
        n: a.tobytes() for n, a in form.arrays().items()
    }
    assert isinstance(outsize.open(tmp_path / "x.safetensors"), Factored)


def test_another_suffix_rebuilds_and_a_wrong_one_is_refused(tmp_path):
    form = make("tt", (5, 6, 7), (2, 3, 2), "float64")
    f = Factored(form, error=0.1)
    close(np.load(f.save(tmp_path / "x.npy").node.store.name), dense(form), "float64")
    with pytest.raises(InputError, match=r"another format than tt: write .tt or .safetensors"):
        f.save(tmp_path / "x.tucker")
    with pytest.raises(InputError, match="cannot write"):
        f.save(tmp_path / "x.nothing")
    with pytest.raises(StoreError, match="there is no folder"):
        f.save(tmp_path / "no" / "x.tt")
    with pytest.raises(InputError, match=r"decompose"):
        outsize.array.ones((3, 3)).save(tmp_path / "x.tucker")


def test_a_narrow_type_is_written_as_it_is(tmp_path):
    x = np.linspace(0, 1, 600, dtype="float32").reshape(20, 30)
    there = outsize.array.asarray(x)
    f = Factored(Narrow(there.astype("float16").astype("float32"), "float16"), error=1e-3, original="float32")
    assert (
        f.ratio == 2
        and f.method == "float16"
        and f.ranks == ()
        and f.norm() == pytest.approx(np.linalg.norm(x), rel=1e-3)
    )
    assert np.array_equal(f[3:5].compute(), x[3:5].astype("float16").astype("float32"))
    f.save(tmp_path / "x.safetensors")
    assert outsize.open(tmp_path / "x.safetensors").dtype == np.float16
    narrow = Factored(Narrow(there, "bfloat16"), error=1e-2)
    narrow.save(tmp_path / "y.safetensors")
    assert os.path.getsize(tmp_path / "y.safetensors") == 4096 + 1200
    with pytest.raises(InputError, match="which has no factors"):
        f.truncate(0.1)


def split(data: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(table: object, rest: bytes) -> bytes:
    text = json.dumps(table, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + rest


def changed(table: dict, *path: str, value: object) -> dict:
    """The table with one value of it replaced, or removed where that is None."""
    table = json.loads(json.dumps(table))
    inner = table
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return table


HOSTILE = {
    "metadata without a method": (("__metadata__", "method"), None, "metadata are damaged"),
    "a method of the future": (("__metadata__", "method"), "tucker-2", "holds 'tucker-2' of version 1"),
    "another version": (("__metadata__", "version"), "2", "version 2"),
    "a version that is no number": (("__metadata__", "version"), "one", "metadata are damaged"),
    "an error that is no number": (("__metadata__", "error"), "little", "metadata are damaged"),
    "a negative error": (("__metadata__", "error"), "-1", "metadata are damaged"),
    "NaN as error": (("__metadata__", "error"), "nan", "metadata are damaged"),
    "a dtype that is none": (("__metadata__", "original"), "O|pickle", "metadata are damaged"),
    "spectra that are none": (("__metadata__", "spectra"), '{"a": 1}', "metadata are damaged"),
    "deep notes": (("__metadata__", "notes"), "[" * 100_000, "metadata are damaged"),
    "pairs that are none": (("__metadata__", "complex128"), "core", "not of pairs of float64"),
    "a missing factor": (("factor1",), None, "a core of (2, 3) needs factors of (length, (2, 3)), not (5, 2)"),
    "a factor too many": (
        ("factor9",), {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "factor9 belong to no factor",
    ),
    "a shape that does not fit": (("factor1", "shape"), [3, 6], "needs factors"),
    "a shape of too many bytes": (("factor1", "shape"), [2**40, 2**20], "damaged or truncated"),
    "negative lengths": (("factor1", "shape"), [-3, -6], "damaged"),
    "offsets beyond the file": (("factor1", "data_offsets"), [2**40, 2**40 + 72], "damaged or truncated"),
    "integers": (("core", "dtype"), "I32", "factors are of float32"),
    "half precision": (("core", "dtype"), "Q4", "has dtype Q4"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence(tmp_path, name):
    where, value, words = HOSTILE[name]
    path = tmp_path / "x.tucker"
    Factored(make("tucker", (5, 6), (2, 3), "float32"), error=0.1, original="float32").save(path)
    table, rest = split(path.read_bytes())
    table = changed(table, *where, value=value)
    if name == "integers":  # all of them, or they would be seen as floats beside integers
        table = {key: row if key == "__metadata__" else row | {"dtype": "I32"} for key, row in table.items()}
    path.write_bytes(join(table, rest))
    with pytest.raises(StoreError) as told:
        outsize.open(path)
    assert words in str(told.value) and "\n" not in str(told.value) and str(path) in str(told.value)


@given(st.integers(0, 10_000), st.integers(0, 255))
@examples(120)
def test_a_damaged_file_opens_or_says_so(tmp_path_factory, place, value):
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / "x.tt"
    Factored(make("tt", (5, 6, 4), (2, 3, 2), "float64"), error=0.1).save(path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(data)
    for bytes_ in (bytes(data), bytes(data[: place % len(data)])):
        path.write_bytes(bytes_)
        try:
            outsize.open(path).compute()
        except StoreError as error:
            assert "\n" not in str(error)
        except InputError as error:  # the metadata may no longer say that these are factors: several tensors, then
            assert "\n" not in str(error)


def test_factors_larger_than_the_budget_are_refused_before_they_are_read(tmp_path):
    Factored(make("svd", (4000, 50), (40, 2), "float64"), error=0.1).save(tmp_path / "x.svd")
    with (
        outsize.budget(host="1MiB"),
        pytest.raises(BudgetError, match=r"holds 1.2. MiB of factors, which are kept in memory"),
    ):
        outsize.open(tmp_path / "x.svd")
    opened = outsize.open(tmp_path / "x.svd")
    plan = opened.array.plan("4MiB")
    assert f"factors of {tmp_path}/x.svd" in {part.name for step in plan.steps for part in step.parts}
    assert opened.nbytes < plan.smallest <= plan.peak() <= 4 << 20
    with pytest.raises(BudgetError, match="the smallest budget that works"):
        opened.array.save(tmp_path / "y.npy", budget="1MiB")


def test_a_failing_write_leaves_nothing_and_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.cp"
    old = Factored(make("cp", (5, 6), (2, 2), "float32"), error=0.1)
    old.save(path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="no space is left"):
        Factored(make("cp", (50, 60), (2, 2), "float32"), error=0.1).save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x.cp"] and np.array_equal(outsize.open(path).compute(), old.compute())
