"""`outsize.decompose` beside its floors: `python benchmarks/decompose.py arena|auto --data FOLDER`; peers: `decompose_peers.py`.

`arena`  A tensor of 6.4 GB (3-D by Tucker, 4-D by tensor train) under a hard limit of 512 MiB, in a fresh process. In the same
         process, before: the time to read the file directly, and the time that the Gram matrix of the first mode would take at
         the rate of BLAS (float32, `a.T @ a`). After it, outside the limit, the true error.
`auto`   Eight kinds of data: what is chosen, its size, the true error.

Results of a date are in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ARENA = {
    "tucker": ("x3.npy", "1536,1024,1024", "40", "0.006", "tucker", 1024),
    "tt": ("x4.npy", "128,128,96,1024", "20", "0.006", "tt", 1024),
}
"""method -> file, shape, rank, noise, kind, and the length of the mode whose Gram matrix is the floor."""
ERROR = 0.01


def main() -> None:
    """Run what was asked for, or one child of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["arena", "auto", "child-arena"])
    parser.add_argument("--data", default="/tmp/outsize-decompose")
    parser.add_argument("--limit", default="512M")
    parser.add_argument("--name", default="tucker")
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    os.makedirs(given.data, exist_ok=True)
    {"arena": arena, "auto": auto, "child-arena": child_arena}[given.what](given)


def make(folder: str, name: str, *how: str) -> str:
    """The path of a tensor, made if it is not there."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        subprocess.run([sys.executable, str(HERE / "decompose_data.py"), path + ".part.npy", *how], check=True)
        os.replace(path + ".part.npy", path)
    return path


def arena(given: argparse.Namespace) -> None:
    """Each method under the limit, then its true error."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import cgroup

    import outsize

    for method in given.only or ARENA:
        name, *how, _ = ARENA[method]
        make(given.data, name, *how)
        command = [sys.executable, __file__, "child-arena", "--data", given.data, "--name", method]
        ended = cgroup.run(command, _bytes(given.limit), 900)
        if not ended.fine:
            print(
                json.dumps(
                    {"method": method, "status": ended.status, "killed": ended.killed, "why": ended.stderr[-500:]}
                )
            )
            continue
        row = json.loads(ended.stdout.splitlines()[-1])
        made = outsize.open(os.path.join(given.data, f"found.{method}"))
        path = os.path.join(given.data, name)
        error = true_error(
            path, lambda start, stop, made=made: np.asarray(made[start:stop].compute(), np.float64), step=8
        )
        held = error <= row["said"] <= row["asked"]
        print(json.dumps(row | {"true": error, "promise held": held, "peak of the group": ended.peak}), flush=True)


def _bytes(text: str) -> int:
    return int(text.rstrip("M")) << 20


def child_arena(given: argparse.Namespace) -> None:
    """Floors and decomposition in one process."""
    import outsize
    import outsize.factor.decompose

    name, *_, length = ARENA[given.name]
    path = os.path.join(given.data, name)
    shape = np.load(path, mmap_mode="r").shape
    size = int(np.prod(shape))
    reading, gram = time_reading(path), time_gram(size, int(length))
    steps: list[tuple[str, float]] = []
    began = time.perf_counter()
    made = outsize.decompose(
        path, given.name, ERROR, listener=lambda e: steps.append((e.step, e.seconds)) if hasattr(e, "seconds") else None
    )
    seconds = time.perf_counter() - began
    floor = max(reading, gram)
    made.save(os.path.join(given.data, f"found.{given.name}"))
    row = {
        "method": given.name, "shape": shape, "asked": ERROR, "said": made.error, "ranks": made.ranks, "bytes": made.nbytes,
        "ratio": round(made.ratio), "seconds": round(seconds, 2), "direct read": round(reading, 2),
        "Gram at BLAS rate": round(gram, 2), "times the floor": round(seconds / floor, 2),
        "passes over the data": round(made.facts.plan.read / (size * 4), 2), "projected": made.facts.plan.peak(),
        "steps": [(step, round(took, 2)) for step, took in steps],
    }  # fmt: skip
    print(json.dumps(row, default=list), flush=True)


def time_reading(path: str) -> float:
    """Seconds to read a file directly, in 16 MiB transfers by two threads."""
    import mmap

    handle, total = os.open(path, os.O_RDONLY | os.O_DIRECT), os.path.getsize(path)
    step = 16 << 20

    def read(first: int) -> None:
        buffer = mmap.mmap(-1, step)
        for offset in range(first * step, total, 2 * step):
            os.preadv(handle, [buffer], offset)

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 1)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    os.close(handle)
    return seconds


def time_gram(size: int, length: int) -> float:
    """Seconds that a Gram matrix takes at the rate of BLAS, from the best of five panels."""
    panel = np.random.default_rng(0).random((8192, length), dtype=np.float32)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        panel.T @ panel
        best = min(best, time.perf_counter() - began)
    return best * size / panel.size


def true_error(path: str, rebuild: Any, step: int = 16) -> float:
    """Relative Frobenius error of slabs that `rebuild(start, stop)` makes."""
    x = np.load(path, mmap_mode="r")
    lost = norm = 0.0
    for start in range(0, x.shape[0], step):
        slab = x[start : start + step].astype(np.float64)
        lost += float(np.sum((slab - rebuild(start, min(x.shape[0], start + step))) ** 2))
        norm += float(np.sum(slab**2))
    return (lost / norm) ** 0.5


def auto(given: argparse.Namespace) -> None:
    """What `auto` takes of eight kinds of data."""
    import outsize

    for name, x in kinds().items():
        try:
            made = outsize.decompose(x)
        except outsize.OutsizeError as error:
            print(f"| {name} | refused | {error} | | |")
            continue
        wide = x.astype(np.float64)
        norm = float(np.linalg.norm(wide)) or 1.0
        error = float(np.linalg.norm(np.asarray(made.array.compute(), np.float64) - wide)) / norm
        print(
            f"| {name} | {made.method} {made.ranks} | {made.nbytes:,} of {x.nbytes:,} bytes | {error:.2e} | {made.error:.2e} |"
        )


def kinds() -> dict[str, Any]:
    """Eight kinds of data."""
    draws = np.random.default_rng(1)
    shape = (90, 100, 110)
    core = draws.standard_normal((8, 8, 8))
    low = core
    for axis, n in enumerate(shape):
        low = np.moveaxis(np.tensordot(np.linalg.qr(draws.standard_normal((n, 8)))[0], low, axes=(1, axis)), 0, axis)
    low += 0.004 * np.linalg.norm(low) / np.sqrt(low.size) * draws.standard_normal(shape)
    a, b, c = np.meshgrid(*(np.linspace(0, 3, n) for n in shape), indexing="ij")
    frame, down, across = np.ogrid[:120, :80, :90]
    spot = 100 * np.exp(-((down - 20 - frame * 0.3) ** 2 + (across - 30 - 10 * np.sin(frame / 15)) ** 2) / 80)
    video = spot + 60 * np.sin(across / 9) * np.cos(down / 7) + 0.1 * draws.standard_normal((120, 80, 90))
    tiny = np.tensordot(
        draws.standard_normal((3, 3)), draws.standard_normal((3, 6)), axes=(1, 0)
    ) @ draws.standard_normal((6, 400))
    tiny = tiny[:, None, :] * np.sin(np.arange(300) / 20)[None, :, None] + 0.001 * draws.standard_normal((3, 300, 400))
    spikes = np.where(draws.random(shape) < 0.001, 100 * draws.standard_normal(shape), 0)
    broken = low.copy()
    broken[3, 5, 7] = np.nan
    return {
        "low-rank": low.astype("f4"), "smooth field": (np.sin(a * b) + np.exp(-((c - a) ** 2))).astype("f4"),
        "video-like": video.astype("f4"), "random": draws.standard_normal(shape).astype("f4"),
        "sparse spikes": spikes.astype("f4"),
        "integers": np.round(low / np.abs(low).max() * 30000).astype("i2"), "one mode tiny": tiny.astype("f4"),
        "NaN inside": broken.astype("f4"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
