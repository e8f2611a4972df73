"""Handles of h5py and zarr-python: read piece by piece where they lie, like their paths, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from effort import long

import outsize

h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
X = np.arange(60.0).reshape(12, 5)


@pytest.mark.parametrize("layout", [{}, {"chunks": (4, 5)}, {"chunks": (4, 5), "compression": "gzip"}])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_an_h5py_dataset_is_read_where_it_lies(tmp_path: Path, layout: dict[str, object], mode: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("group/x", data=X, **layout)
    with h5py.File(tmp_path / "x.h5", mode) as file:
        if mode == "r+":
            file["group/x"][0] = -1  # not yet in the file
        x = outsize.open(file["group/x"])
        assert not x.node.store.resident
        np.testing.assert_array_equal((x + 1).compute(), file["group/x"][...] + 1)
        x.node.store.close()
        assert file["group/x"][1, 0] == 5, "the user's file stays open"


def test_an_h5py_dataset_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=X)
        with pytest.raises(outsize.InputError, match=r"give one of its datasets"):
            outsize.open(file)
    with pytest.raises(outsize.InputError, match="is closed"):
        outsize.open(dataset)
    with h5py.File(tmp_path / "x.h5", "r") as file, pytest.raises(outsize.InputError, match="reading only"):
        outsize.open(file["x"], mode="r+")


def test_a_zarr_array_is_read_from_its_folder(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "g.zarr", mode="w")
    made = group.create_array("a/x", shape=X.shape, chunks=(4, 5), dtype="f8")
    made[...] = X
    for given in (made, zarr.open_array(tmp_path / "g.zarr" / "a" / "x", mode="r")):
        x = outsize.open(given)
        assert not x.node.store.resident
        np.testing.assert_array_equal(x.compute(), X)
    with pytest.raises(outsize.InputError, match="give one of its arrays"):
        outsize.open(group)
    with pytest.raises(outsize.InputError, match="MemoryStore, which Outsize does not read piece by piece"):
        outsize.open(zarr.array(X))


WHOLE = """
import resource, sys, numpy as np, outsize
which, path, budget = sys.argv[1:]
if which == "h5py":
    import h5py
    source = h5py.File(path)["x"]
else:
    import zarr
    source = zarr.open_array(path, mode="r")
outsize.open(source)[:64].sum().compute(budget)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = float(outsize.open(source).sum().compute(budget))
assert found == outsize.open(source).size, found
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("which", ["h5py", "h5py in chunks", "zarr"])
def test_a_fresh_process_holds_the_budget_and_not_the_array(tmp_path: Path, which: str) -> None:
    mib = 64 if long() else 32
    shape, path, budget = (1 << 12, mib << 6), tmp_path / "x", mib * 3 // 8
    if which == "zarr":
        zarr.create_array(path, shape=shape, chunks=(256, shape[1]), dtype="f4")[...] = 1
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", shape, "f4", chunks=(256, shape[1]) if "chunks" in which else None)[...] = 1
    words = [which.partition(" ")[0], str(path), f"{budget}MiB"]
    done = subprocess.run([sys.executable, "-c", WHOLE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= budget + 12 < mib, "the array was loaded whole"


def test_what_a_library_decodes_as_a_whole_is_decoded_once_for_a_product_and_a_sum():
    from outsize.array.api.lazy import Array
    from outsize.array.graph.build import source
    from outsize.array.store.formats.pieces import ObjectStore

    x = Array(source(ObjectStore(np.ones((400_000, 4), "f4"), (100_000, 4), 5.0, "groups")))
    assert (x.T @ x).plan(budget="64MiB").read == x.nbytes
    wide = Array(source(ObjectStore(np.ones((4096, 4096), "f4"), (1024, 1024), 5.0, "chunks")))
    (step,) = wide.sum().plan(budget="256MiB").steps
    assert step.read == wide.nbytes
    assert any("workers" in part.name and not part.name.startswith("1 ") for part in step.parts)
