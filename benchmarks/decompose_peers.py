"""`outsize.decompose` beside TensorLy, pyttb and torchTT: `python benchmarks/decompose_peers.py --python PEERS/bin/python`.

A float32 cube of rank (30, 30, 30) with noise of 0.6 %, and one asked error for all. Each library is called as its
documentation advises: pyttb `hosvd(x, tol)`, torchTT `TT(x, eps)`, TensorLy `tucker(x, rank)`, which has no error to ask for and
is told the true ranks, with its default SVD and with the randomized one. Every call is a fresh process: the tensor is loaded,
then the call is timed (wall and processor), and what the highest resident set grew by is its memory. Ours runs before every peer
and after the last, so that a ratio compares neighbours on a machine that others use too. True errors are measured here, in
float64 from the factors, for all alike.

`PEERS` is an environment with `tensorly pyttb torchTT`; ours runs in the environment of this script. A table in Markdown is
printed; results of a date are in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ERROR, RANK = 0.01, 30
OURS = ("outsize", "outsize, from the file")
PEERS = ("pyttb", "torchTT", "TensorLy, randomized SVD", "TensorLy")
Rebuild = Callable[[int, int], Any]
"""Slab `start:stop` of the first axis, in float64."""


def main() -> None:
    """All of them, or one child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--data", default="/tmp/outsize-decompose")
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--timeout", type=int, default=300, help="seconds of wall time for one call")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    path = os.path.join(given.data, f"x{given.side}.npy")
    if given.child:
        print(json.dumps(measure(given.child, path), default=list))
        return
    os.makedirs(given.data, exist_ok=True)
    if not os.path.exists(path):
        shape = ",".join([str(given.side)] * 3)
        subprocess.run(
            [sys.executable, HERE / "decompose_data.py", path + ".part.npy", shape, str(RANK), "0.006"], check=True
        )
        os.replace(path + ".part.npy", path)
    rows = [run(given, OURS[0])]
    for peer in PEERS:
        rows += [run(given, peer), run(given, OURS[0])]
    rows.append(run(given, OURS[1]))
    print_ratios(rows)


def run(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """One library in a process of its own, as a row of the table."""
    python = sys.executable if name in OURS else given.python
    command = [python, __file__, "--data", given.data, "--side", str(given.side), "--child", name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout, check=False)
    except subprocess.TimeoutExpired:
        row = {"name": name, "failed": f"not finished in {given.timeout} s"}
    else:
        fine = ended.returncode == 0 and ended.stdout
        row = json.loads(ended.stdout.splitlines()[-1]) if fine else {"name": name, "failed": ended.stderr[-200:]}
    if "failed" in row:
        print(f"| {name} | {row['failed']} | | | | | |", flush=True)
    else:
        said = "-" if row["said"] is None else f"{row['said']:.5f}"
        print(
            f"| {name} | {row['seconds']:.1f} | {row['processor']:.1f} | {row['more'] / 2**20:,.0f} MiB | {tuple(row['ranks'])} "
            f"| {said} | {row['true']:.5f} |",
            flush=True,
        )
    return row


def print_ratios(rows: list[dict[str, Any]]) -> None:
    """Each peer beside ours of just before and after it."""
    for place, row in enumerate(rows):
        if row["name"] in OURS or "failed" in row:
            continue
        beside = [rows[place - 1], rows[place + 1]]
        parts = []
        for what in ("seconds", "processor", "more"):
            ours = sum(one[what] for one in beside) / len(beside)
            parts.append(f"{row[what] / ours:.1f}")
        print(
            f"{row['name']} / outsize: {parts[0]} times the seconds, {parts[1]} the processor time, {parts[2]} the memory"
        )


def measure(name: str, path: str) -> dict[str, Any]:
    """Load, call, and look at what came out."""
    begin = {"outsize": outsize_call, OURS[1]: outsize_call, "pyttb": pyttb_call, "torchTT": torchtt_call}.get(
        name, tensorly_call
    )(name, path)
    loaded, began, worked = highest(), time.perf_counter(), time.process_time()
    rebuild, ranks, said = begin()
    row = {
        "name": name, "seconds": time.perf_counter() - began, "processor": time.process_time() - worked,
        "more": highest() - loaded, "ranks": ranks, "said": said,
    }  # fmt: skip
    return row | {"true": true_error(path, rebuild)}


def highest() -> int:
    """The most bytes that were resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def true_error(path: str, rebuild: Rebuild, step: int = 16) -> float:
    """Relative Frobenius error."""
    x = np.load(path, mmap_mode="r")
    lost = norm = 0.0
    for start in range(0, x.shape[0], step):
        slab = x[start : start + step].astype(np.float64)
        lost += float(np.sum((slab - rebuild(start, min(x.shape[0], start + step))) ** 2))
        norm += float(np.sum(slab**2))
    return (lost / norm) ** 0.5


def of_tucker(core: Any, factors: Any) -> Rebuild:
    """Slabs of a Tucker decomposition."""
    core, factors = np.asarray(core, np.float64), [np.asarray(f, np.float64) for f in factors]

    def rebuild(start: int, stop: int) -> Any:
        made = np.tensordot(factors[0][start:stop], core, axes=(1, 0))
        for axis in (1, 2):
            made = np.moveaxis(np.tensordot(factors[axis], made, axes=(1, axis)), 0, axis)
        return made

    return rebuild


def outsize_call(name: str, path: str) -> Any:
    import outsize
    import outsize.factor.decompose

    outsize.decompose(np.ones((40, 40, 40)), "tucker")  # the others have their code loaded too
    x = np.load(path) if name == OURS[0] else path

    def begin() -> Any:
        made = outsize.decompose(x, "tucker", ERROR, budget="128MiB" if x is path else None)
        return of_tucker(made.form.core, made.form.factors), made.ranks, made.error

    return begin


def pyttb_call(name: str, path: str) -> Any:
    import pyttb

    x = pyttb.tensor(np.load(path), copy=False)

    def begin() -> Any:
        made = pyttb.hosvd(x, tol=ERROR, verbosity=0)
        return of_tucker(made.core.data, made.factor_matrices), made.core.shape, ERROR

    return begin


def tensorly_call(name: str, path: str) -> Any:
    from tensorly.decomposition import tucker

    x = np.load(path)
    options = {"svd": "randomized_svd"} if "randomized" in name else {}

    def begin() -> Any:
        core, factors = tucker(x, rank=[RANK] * 3, **options)
        return of_tucker(core, factors), core.shape, None

    return begin


def torchtt_call(name: str, path: str) -> Any:
    import torch
    import torchtt

    x = torch.from_numpy(np.load(path))

    def begin() -> Any:
        made = torchtt.TT(x, eps=ERROR)
        cores = [core.double().numpy() for core in made.cores]

        def rebuild(start: int, stop: int) -> Any:
            slab = cores[0][0, start:stop]
            for core in cores[1:]:
                slab = np.tensordot(slab, core, axes=(slab.ndim - 1, 0))
            return slab[..., 0]

        return rebuild, [int(rank) for rank in made.R[1:-1]], ERROR

    return begin


if __name__ == "__main__":
    main()
