"""Every store under the engine: results as NumPy's, and the memory of the process inside the budget, in a fresh
process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import long
from stores import peak_of, read

from outsize.array.store.registry import open_store

LARGE, SMALL = (12000, 32 << 20), (6000, 16 << 20)
"""Rows of 4 KiB, of 48 MiB of float32 and of half of that, with a budget that is less."""
COLUMNS = 1024

WORK = """
from outsize.array.api.lazy import Array
from outsize.array.graph.build import source
from outsize.array.store.registry import open_store
budget = int(sys.argv[3])
x = Array(source(open_store(sys.argv[1])))
z = x[:100] * 2 + 1
z.save(sys.argv[2] + ".warm" + sys.argv[2][sys.argv[2].rindex("."):], budget=budget)
z = x * 2 + 1
plan = z.plan(budget)
assert plan.peak() <= budget
begin()
z.save(sys.argv[2], budget=budget)
end()
"""


def make(kind: str, folder: Path, values: np.ndarray) -> str:
    path = str(folder / f"x.{kind.split()[0]}")
    if kind == "zarr":
        import zarr

        zarr.create_array(path, shape=values.shape, dtype=values.dtype, chunks=(500, 512))[...] = values
    elif kind == "zarr gzip":
        import zarr

        codec = zarr.codecs.GzipCodec(level=1)
        zarr.create_array(path, shape=values.shape, dtype="f4", chunks=(500, 512), compressors=codec)[...] = values
    elif kind == "h5 gzip":
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, chunks=(500, 512), compression="gzip", compression_opts=1)
    elif kind == "npz":
        np.save(folder / "member.npy", values)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.write(folder / "member.npy", "x.npy")
    elif kind == "blocks":
        os.mkdir(path)
        for start in range(0, len(values), 1000):
            np.save(f"{path}/{start}.npy", values[start : start + 1000])
    else:
        np.save(path, values)
    return path


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("zarr", "z.npy"), ("zarr gzip", "z.npy"), ("h5 gzip", "z.npy"), ("npz", "z.npy"), ("blocks", "z.npy"),
        ("npy", "z.zarr"), ("npy", "z.h5"), ("npy", "z.safetensors"),
    ],
)  # fmt: skip
def test_a_save_from_and_to_every_store_stays_inside_its_budget(kind: str, target: str, tmp_path: Path) -> None:
    if kind.startswith("zarr") or target.endswith("zarr"):
        pytest.importorskip("zarr")
    if kind.startswith("h5") or target.endswith("h5"):
        pytest.importorskip("h5py")
    rows, budget = LARGE if long() or (kind, target) == ("npy", "z.zarr") else SMALL  # whose own chunks are larger
    values: Any = np.random.default_rng(0).integers(0, 1000, (rows, COLUMNS)).astype("f4")
    path = make(kind, tmp_path, values)
    peak = peak_of(WORK, path, str(tmp_path / target), str(budget))
    store = open_store(tmp_path / target)
    np.testing.assert_array_equal(read(store), values * 2 + 1)
    assert peak <= budget + (4 << 20), (
        f"{peak / 2**20:.1f} MiB in a budget of {budget >> 20} MiB; 4 MiB is the interpreter's own"
    )


SAVE = """
import sys
from outsize.array.api.lazy import Array
from outsize.array.graph.build import source
from outsize.array.store.registry import open_store
x = Array(source(open_store(sys.argv[1])))
options = {"chunks": (500, 512)} if sys.argv[2].endswith(("zarr", "h5")) else {}
print("GO", flush=True)
(x * 2 + 1).save(sys.argv[2], budget=int(sys.argv[3]), **options)
print("DONE", flush=True)
"""


@pytest.mark.parametrize("target", ["z.zarr", "z.h5", "z.safetensors"])
def test_a_save_killed_at_random_moments_is_taken_up_again_and_byte_equal(target: str, tmp_path: Path) -> None:
    pytest.importorskip({"z.zarr": "zarr", "z.h5": "h5py"}.get(target, "numpy"))
    rows, budget = LARGE if long() else SMALL
    values = np.random.default_rng(0).integers(0, 1000, (rows, COLUMNS)).astype("f4")
    np.save(tmp_path / "x.npy", values)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    command = [sys.executable, "-c", SAVE, str(tmp_path / "x.npy"), str(tmp_path / target), str(budget * 3 // 4)]
    moments = random.Random(target)
    for _ in range(5):
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None and run.stdout.readline() == "GO\n"
        time.sleep(moments.uniform(0.02, 0.4))
        run.kill()
        run.wait()
        if os.path.exists(tmp_path / target):
            break
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_array_equal(read(open_store(tmp_path / target)), values * 2 + 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.npy", target]
