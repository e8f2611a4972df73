"""Work whose stores lie behind an address: a local server that speaks S3, or fsspec's own file systems."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cluster import SMALL, Lossy, engine

import outsize
from outsize.array.tuning import use
from outsize.core.errors import ClusterError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("zarr")


@pytest.fixture(params=["memory", "s3"])
def address(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty place."""
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        yield "memory://bucket"
        return
    pytest.importorskip("moto.server", reason="moto[server] is not installed: benchmarks/cluster_s3.py has a proof")
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        for _ in range(100):
            try:
                s3fs.S3FileSystem().mkdir("bucket")
                break
            except Exception:
                time.sleep(0.1)
        yield "s3://bucket"
    finally:
        server.kill()
        server.wait()


def put(address: str, name: str, values: Any) -> Any:
    import zarr

    zarr.create_array(f"{address}/{name}.zarr", data=values, chunks=(500, values.shape[1]))
    return outsize.open(f"{address}/{name}.zarr")


def listed(address: str) -> list[str]:
    files, inside = fsspec.core.url_to_fs(address)
    files.invalidate_cache()
    return sorted(os.path.basename(path.rstrip("/")) for path in files.ls(inside, detail=False))


def test_tasks_read_and_write_behind_an_address(address: str) -> None:
    values = np.random.default_rng(0).normal(3, 2, (4000, 60)).astype(np.float32)
    x = put(address, "x", values)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    with engine(Lossy(-1)) as made:
        z.save(f"{address}/z.zarr", budget="256MiB", chunks=(700, 60))
        (x.T @ x).save(f"{address}/g.zarr", budget="256MiB")
    assert len(made.ran) > 4
    np.testing.assert_allclose(
        outsize.open(f"{address}/z.zarr").compute(), (values - values.mean(0)) / values.std(0), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(outsize.open(f"{address}/g.zarr").compute(), values.T @ values, rtol=1e-3)
    assert listed(address) == ["g.zarr", "x.zarr", "z.zarr"], "nothing is left in scratch"


def test_a_lost_scheduler_is_gone_on_from_behind_an_address(address: str) -> None:
    x = put(address, "x", np.random.default_rng(0).random((4000, 60)))
    z = x / x.std(axis=0)
    with engine(Lossy(-1)) as whole:
        z.save(f"{address}/whole.zarr", budget="256MiB", chunks=(300, 60))
    lost = len(whole.ran) - 3
    with engine(Lossy(lost)), pytest.raises(ClusterError):
        z.save(f"{address}/z.zarr", budget="256MiB", chunks=(300, 60))
    with pytest.raises(outsize.StoreError):
        outsize.open(f"{address}/z.zarr")  # no array before all of it is there
    with engine(Lossy(-1)) as second:
        z.save(f"{address}/z.zarr", budget="256MiB", chunks=(300, 60))
    assert len(second.ran) == len(whole.ran) - lost
    np.testing.assert_array_equal(
        outsize.open(f"{address}/z.zarr").compute(), outsize.open(f"{address}/whole.zarr").compute()
    )
    assert listed(address) == ["whole.zarr", "x.zarr", "z.zarr"]


def test_one_process_writes_there_too(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12000.0).reshape(3000, 4))
    x = outsize.open(tmp_path / "x.npy")
    with use(SMALL):
        x.sum(axis=1).save("memory://one/s.zarr", budget="64MiB", chunks=(128,))
        np.testing.assert_array_equal(outsize.open("memory://one/s.zarr").compute(), x.sum(axis=1).compute())
        with pytest.raises(outsize.InputError, match="exists, and an object store replaces nothing in one step"):
            (x + 1).save("memory://one/s.zarr", budget="64MiB")
        with pytest.raises(outsize.InputError, match="only zarr arrays are written behind an address"):
            x.save("memory://one/s.npy", budget="64MiB")


def test_what_lies_between_steps_needs_a_disk(tmp_path: Path) -> None:
    import outsize.array as xp

    np.save(tmp_path / "x.npy", np.random.default_rng(0).random(200_000))
    with engine(Lossy(-1)), pytest.raises(outsize.InputError, match="a folder on a disk that every worker reaches"):
        xp.sort(outsize.open(tmp_path / "x.npy")).save("memory://one/sorted.zarr", budget="64MiB")
