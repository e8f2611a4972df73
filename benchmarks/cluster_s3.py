"""A cluster whose inputs and outputs lie in an object store: two Dask workers in memory control groups, moto as the S3 server.

python benchmarks/cluster_s3.py            needs s3fs, zarr and moto[server]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]
import clusters  # noqa: E402

import outsize  # noqa: E402
from outsize.core.units import MiB, format_bytes  # noqa: E402

BUDGET = 300 * MiB


def main() -> None:
    port = clusters._free_port()
    env = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
           "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    os.environ.update(env)
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run(env)
    finally:
        server.kill()
        server.wait()


def run(env: dict[str, str]) -> None:
    import s3fs
    import zarr

    for _ in range(100):
        try:
            s3fs.S3FileSystem().mkdir("bucket")
            break
        except Exception:  # the server is not there yet
            time.sleep(0.1)
    values = np.random.default_rng(0).normal(3, 2, (100_000, 128)).astype(np.float32)
    zarr.create_array("s3://bucket/x.zarr", data=values, chunks=(10_000, 128))
    x = outsize.open("s3://bucket/x.zarr")
    works = {
        "z-score": ((x - x.mean(axis=0)) / x.std(axis=0), (values - values.mean(0)) / values.std(0)),
        "gram": (x.T @ x, values.T @ values),
        "transpose": (x.T, values.T),
    }
    with (
        tempfile.TemporaryDirectory(prefix="outsize-s3-") as folder,
        clusters.dask_processes(Path(folder), 2, 700 * MiB, groups=True, slack=96 * MiB, env=env) as processes,
        outsize.cluster(processes.address),
    ):
        for name, (work, wanted) in works.items():
            target = f"s3://bucket/{name}.zarr"
            planned, began = work.plan(BUDGET, target).peak(), time.perf_counter()
            work.save(target, budget=BUDGET)
            seconds = time.perf_counter() - began
            right = np.allclose(outsize.open(target).compute(), wanted, rtol=1e-3, atol=1e-3)
            killed = sum(group.killed() for group in processes.groups)
            print(
                f"{name:10} {seconds:5.1f} s, planned {format_bytes(planned)}, right {right}, workers killed {killed}"
            )
    print("left in the bucket:", s3fs.S3FileSystem().ls("bucket", refresh=True))


if __name__ == "__main__":
    main()
