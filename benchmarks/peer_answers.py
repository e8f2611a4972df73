"""Whether all contestants of `arrays.py` answer the same: every one on small files, against NumPy in memory.

    python benchmarks/peer_answers.py [--scale 64]

Nothing is timed and nothing limited. A contestant that is not installed, or fails, is named; the exit status is 1 where an answer
differs. The columns of Q and of singular vectors have no sign of their own, so what is compared is what they make.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data as inputs
import lane_peers
import numpy as np
from peers import CAN

HERE = Path(__file__).resolve().parent
Found = dict[str, Any]
"""Name of a result -> its values."""


def answers(folder: Path) -> dict[str, Found]:
    """Work -> its results, of NumPy."""
    x, whole = np.load(folder / "tall.npy"), np.load(folder / "whole.npy")
    a, b = np.load(folder / "a.npy"), np.load(folder / "b.npy")
    some, unit = x[: inputs.part(inputs.SORTED_ROWS, len(x))], x[: inputs.COSINE_ROWS]
    unit = unit / np.sqrt((unit * unit).sum(axis=1, keepdims=True))
    grown = np.exp(x - x.max(axis=1, keepdims=True))
    score = (x - x.mean(axis=0, dtype="f8")) / x.std(axis=0, dtype="f8")
    return {
        "sum": {"": x.sum(dtype="f8")},
        "expression": {"": np.sqrt(np.abs(np.sin(x) * x + 2)).mean(dtype="f8")},
        "normalise": {"z": score},
        "zscore-512": {"z": score},
        "matmul": {"c": a @ b},
        "transpose": {"t": x.T},
        "softmax": {"s": grown / grown.sum(axis=1, keepdims=True)},
        "layernorm": {"l": (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)},
        "cosine": {"c": unit @ unit[:4096].T},
        "argmax": {"i": x.argmax(axis=1)},
        "three": {"m": x.mean(axis=0), "r": x.max(axis=1), "q": np.sqrt(x)},
        "sort": {"s": np.sort(some.reshape(-1))},
        "median": {"": np.median(some)},
        "unique": {"u": np.unique(whole)},
        "rfft": {"f": np.fft.rfft(some, axis=0)},
        "rsvd": {"s": np.linalg.svdvals(x)[:1]},
        "qr": {"q @ r": x, "q.T @ q": np.eye(x.shape[1])},
    }


def load(out: Path, name: str) -> Any:
    """A result in whatever form it was left."""
    if " @ " in name:
        left, right = name.split(" @ ")
        first = load(out, left[0])
        return (first.T if left.endswith(".T") else first) @ load(out, right)
    found = next(path for path in sorted(out.glob(f"{name}.*")) if path.suffix != ".part")
    if found.suffix == ".npy":
        return np.load(found)
    if found.suffix == ".zarr":
        import zarr

        return zarr.open(str(found), mode="r")[...]
    if found.suffix == ".b2nd":
        import blosc2

        return blosc2.open(str(found), mode="r")[:]
    import pyarrow.parquet as pq

    return pq.read_table(str(found))["v"].to_numpy()


def run(command: list[str], work: str, folder: Path, out: Path) -> str:
    """What a contestant printed, or an error."""
    out.mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
    told = [sys.executable, *command, work, str(folder), str(out), "900MB"]
    done = subprocess.run(told, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return done.stdout


def verdict(make: Callable[[], str], work: str, out: Path, wanted: Found) -> str:
    """`same`, or what is not."""
    try:
        printed = make()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    for name, values in wanted.items():
        got = load(out, name) if name else float(printed.split()[0])
        if work == "rsvd":  # of noise only the first singular value stands out
            got = got[:1]
        if np.shape(got) != np.shape(values):
            return f"{name or 'the number'} DIFFERS: its shape is {np.shape(got)}, not {np.shape(values)}"
        exact = np.asarray(values).dtype.kind not in "fc"
        near = exact or np.allclose(got, values, rtol=2e-3, atol=2e-3 * float(np.abs(values).max()))
        if not near or (exact and not np.array_equal(got, values)):
            return f"{name or 'the number'} DIFFERS"
    return "same"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=64)
    parser.add_argument("--works", nargs="*")
    parser.add_argument("--peers", nargs="*", default=["ours", *CAN])
    args = parser.parse_args()
    differ = False
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        inputs.make(folder, args.scale)
        inputs.make_whole(folder, args.scale)
        if {"duckdb", "dask"} & set(args.peers):
            lane_peers.make_tables(folder)
        if "blosc2" in args.peers:
            inputs.make_blosc2(folder)
        for work, wanted in answers(folder).items():
            if args.works and work not in args.works:
                continue
            for peer in args.peers:
                if peer != "ours" and work not in CAN[peer]:
                    continue
                command = [str(HERE / "ours.py")] if peer == "ours" else [str(HERE / "peers.py"), peer]
                out = folder / f"{peer}-{work}"
                said = verdict(
                    lambda command=command, work=work, out=out: run(command, work, folder, out), work, out, wanted
                )
                differ |= "DIFFERS" in said
                print(f"{work:<11} {peer:<9} {said}", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
