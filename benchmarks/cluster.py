"""Array work on the workers of a cluster, each in a memory control group of its own: ours beside dask.array and cubed.

    python benchmarks/cluster.py works [--engine ray] [--workers 2] [--rows 400000] [--limit 512MiB] [--budget 160MiB]
    python benchmarks/cluster.py kills [--engine ray] workers killed at 30 random moments, the scheduler once

Every row of `works` has a fresh cluster of Dask or Ray: a scheduler and workers as processes, each worker with its nanny (each
node with its raylet and agents) in a group with a hard limit. The engine is told a limit too. Printed: seconds, highest
anonymous memory of a worker above what it held before (beside the plan's), workers that died, whether the result is right.
On Ray a peer's start is part of its memory, since each job has processes of its own. Needs root and a memory control group.
Peers run where they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
import cgroup  # noqa: E402
import clusters  # noqa: E402

import outsize  # noqa: E402
import outsize.array as xp  # noqa: E402
from outsize.core.errors import ClusterError  # noqa: E402
from outsize.core.events import Started  # noqa: E402
from outsize.core.units import MiB, format_bytes, parse_bytes  # noqa: E402

WORKS: dict[str, Callable[..., Any]] = {
    "z-score": lambda x, a, b: (x - x.mean(axis=0)) / x.std(axis=0),
    "product": lambda x, a, b: a @ b,
    "transpose": lambda x, a, b: x.T,
    "sort": lambda x, a, b: xp.sort(x.reshape(-1)),
    "median": lambda x, a, b: xp.median(x, axis=0),
}
"""What is made of the tall array and of two square ones."""
SLACK = {"dask": 96 * MiB, "ray": 640 * MiB}
"""What the kernel allows a worker beside its limit: for its nanny, or its raylet, agents and object store."""


def make_data(folder: Path, rows: int, side: int) -> None:
    """tall.npy, a.npy, b.npy and zarr copies of them for cubed."""
    draw = np.random.default_rng(0)
    wide = draw.standard_normal((6, 512), np.float32)
    tall = np.lib.format.open_memmap(folder / "tall.npy", "w+", np.float32, (rows, 512))
    for low in range(0, rows, 20_000):
        few = draw.standard_normal((min(20_000, rows - low), 6), np.float32)
        tall[low : low + 20_000] = few @ wide + 0.01 * draw.standard_normal((len(few), 512), np.float32) + 1
    tall.flush()
    sides = [draw.standard_normal((length, 6), np.float32) for length in (rows // 1000, 1000, 512)]
    cube = np.lib.format.open_memmap(folder / "cube.npy", "w+", np.float32, (rows // 1000, 1000, 512))
    for low in range(0, len(cube), 20):
        part = np.einsum("ia,ja,ka->ijk", sides[0][low : low + 20], *sides[1:], optimize=True)
        cube[low : low + 20] = part + 0.01 * draw.standard_normal(part.shape, np.float32)
    cube.flush()
    for name in "ab":
        np.save(folder / f"{name}.npy", draw.random((side, side), np.float32))


def open_all(folder: Path) -> list[Any]:
    return [outsize.open(folder / f"{name}.npy") for name in ("tall", "a", "b")]


class Meter:
    """The most anonymous memory of each group, as often as it is looked at, above what it was at the start."""

    def __init__(self, groups: list[cgroup.Group]) -> None:
        self.groups = groups
        self.first = [group.anonymous() for group in groups]
        self.most = list(self.first)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            self.most = [max(most, group.anonymous()) for most, group in zip(self.most, self.groups, strict=True)]

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def above(self) -> int:
        """Bytes of the worker that took most."""
        return max((most - first for most, first in zip(self.most, self.first, strict=True)), default=0)


def run_ours(folder: Path, name: str, budget: int, target: Path) -> dict[str, Any]:
    if name.startswith("tucker"):
        return run_tucker(folder / ("tall.npy" if name == "tucker tall" else "cube.npy"), budget)
    work = WORKS[name](*open_all(folder))
    plan = work.plan(budget, target)
    work.save(target, budget=budget)
    return {"planned": plan.peak()}


def run_tucker(path: Path, budget: int) -> dict[str, Any]:
    made = outsize.decompose(path, "tucker", error=0.05, budget=budget)
    whole, lost, norm = np.load(path, mmap_mode="r"), 0.0, 0.0
    step = max(1, 32 * MiB // whole[0].nbytes)
    for low in range(0, len(whole), step):
        part = whole[low : low + step].astype(np.float64)
        norm += float((part**2).sum())
        lost += float(((np.asarray(made[low : low + step]) - part) ** 2).sum())
    error = (lost / norm) ** 0.5
    note = f"ranks {made.ranks}, error {made.error:.3g} promised, {error:.3g} seen"
    return {"planned": made.plan.peak(), "note": note, "right": error <= made.error <= 0.05}


def run_peer(peer: str, folder: Path, name: str, address: str, limit: int, target: Path) -> dict[str, Any]:
    """A peer in a process of its own, so that its failure is only its own."""
    command = [sys.executable, str(Path(__file__).with_name("cluster_peers.py")), peer, name, str(folder), address,
               str(limit), str(target)]  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.returncode == 0:
            return {}
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"failed": last[:110]}
    return {"failed": "not done after 240 s"}


def is_right(name: str, folder: Path, made: Path, reference: Path) -> bool:
    found, wanted = outsize.open(made), outsize.open(reference)
    if found.shape != wanted.shape:
        return False
    most = float(abs(wanted).max().compute())
    return float(abs(found - wanted).max().compute()) <= 2e-4 * most


def works(args: argparse.Namespace) -> None:
    limit, budget = parse_bytes(args.limit), parse_bytes(args.budget)
    rows: list[dict[str, Any]] = []
    with folder_of(args) as folder:
        make_data(folder, args.rows, args.side)
        for name in args.only.split(",") if args.only else [*WORKS, "tucker", "tucker tall"]:
            reference = folder / "reference.npy"
            if name in WORKS:
                WORKS[name](*open_all(folder)).save(reference, budget="1GiB")
            for peer in args.peers.split(","):
                if name.startswith("tucker") and peer != "outsize":
                    continue
                row = one_run(args, peer, name, folder, limit, budget)
                made = row.pop("made")
                row.setdefault("right", name in WORKS and made.exists() and is_right(name, folder, made, reference))
                rows.append(row)
                print(show(row), flush=True)
                shutil.rmtree(made, ignore_errors=True) if made.is_dir() else made.unlink(missing_ok=True)
    print(json.dumps(rows))


def one_run(args: argparse.Namespace, peer: str, name: str, folder: Path, limit: int, budget: int) -> dict[str, Any]:
    made = folder / (f"{peer}.zarr" if peer != "outsize" else "outsize.npy")
    with clusters.processes(
        args.engine, folder, args.workers, limit, groups=True, slack=SLACK[args.engine]
    ) as processes:
        before = processes.standing()
        with contextlib.ExitStack() as stack:
            if peer == "outsize":  # imports are no part of the measurement
                stack.enter_context(outsize.cluster(processes.address))
            meter = stack.enter_context(Meter(processes.groups))
            began = time.perf_counter()
            try:
                told = (
                    run_ours(folder, name, budget, made)
                    if peer == "outsize"
                    else run_peer(peer, folder, name, processes.address, limit, made)
                )
            except Exception as error:
                told = {"failed": f"{type(error).__name__}: {error}"[:110]}
            seconds = time.perf_counter() - began
        died = sum(one != other for one, other in zip(before, processes.standing(), strict=True))
        killed = sum(group.killed() for group in processes.groups)
        return {
            "work": name, "by": peer, "seconds": round(seconds, 1), "above": meter.above(), "died": died, "oom_killed": killed,
            "made": made, **told,
        }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    planned = f" (planned {format_bytes(row['planned'])})" if "planned" in row else ""
    end = f"FAILED {row['failed']}" if "failed" in row else f"right {row['right']} {row.get('note', '')}"
    return (f"{row['work']:11} {row['by']:8} {row['seconds']:7.1f} s  peak above start {format_bytes(row['above'])}{planned}  "
            f"died {row['died']} (by the kernel {row['oom_killed']})  {end}")  # fmt: skip


def kills(args: argparse.Namespace) -> None:
    """Workers killed at random moments over runs of all works, until so many are dead; then the scheduler."""
    limit, budget = parse_bytes(args.limit), parse_bytes(args.budget)
    draw, dead, runs = random.Random(7), 0, 0
    with folder_of(args) as folder:
        make_data(folder, args.rows, args.side)
        references = {}
        with clusters.processes(
            args.engine, folder, args.workers, limit, groups=True, slack=SLACK[args.engine]
        ) as processes:
            for name, work in WORKS.items():
                with outsize.cluster(processes.address):
                    work(*open_all(folder)).save(folder / f"whole-{name}.npy", budget=budget)
                references[name] = (folder / f"whole-{name}.npy").read_bytes()
                (folder / f"whole-{name}.npy").unlink()
            while dead < args.kills:
                name = list(WORKS)[runs % len(WORKS)]
                runs += 1
                killed = killed_run(processes, folder, name, budget, draw, min(4, args.kills - dead))
                dead += killed["kills"]
                equal = (folder / "z.npy").read_bytes() == references[name]
                left = [one for one in os.listdir(folder) if one.startswith(".")]
                print(
                    f"{name:10} {killed['kills']} workers killed, equal bytes {equal}, left {left}, {killed['told']}",
                    flush=True,
                )
                assert equal and not left
        print(f"{dead} workers killed in {runs} runs")
        for name in ("z-score", "sort") if args.engine == "dask" else ():  # a driver of Ray ends with its head
            lose_scheduler(args, folder, limit, budget, name, references[name])


def killed_run(
    processes: clusters.Processes, folder: Path, name: str, budget: int, draw: random.Random, most: int
) -> dict[str, Any]:
    stop, count = threading.Event(), [0]

    def kill() -> None:
        while count[0] < most and not stop.wait(draw.uniform(0.2, 1.6)):
            count[0] += processes.kill_worker(draw.randrange(len(processes.workers)))

    with (
        outsize.cluster(processes.address, workers=len(processes.workers)),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        killer = threading.Thread(target=kill)
        killer.start()
        WORKS[name](*open_all(folder)).save(folder / "z.npy", budget=budget)
        stop.set()
        killer.join()
    return {
        "kills": count[0],
        "told": [str(one.message).partition(": ")[2] for one in told if "tasks" in str(one.message)],
    }


def kill_when_begun(processes: clusters.Processes, folder: Path) -> None:
    """The scheduler, a moment after the first tiles of the output are in the journal."""
    log = folder / ".z.npy.outsize-partial.journal" / "log"
    while not (log.exists() and "tile" in log.read_text()):
        time.sleep(0.02)
    time.sleep(0.3)
    processes.kill_scheduler()


def lose_scheduler(
    args: argparse.Namespace, folder: Path, limit: int, budget: int, name: str, reference: bytes
) -> None:
    target = folder / "z.npy"
    target.unlink(missing_ok=True)
    with clusters.processes(
        args.engine, folder, args.workers, limit, groups=True, slack=SLACK[args.engine]
    ) as processes:
        threading.Thread(target=kill_when_begun, args=(processes, folder)).start()
        try:
            with outsize.cluster(processes.address):
                WORKS[name](*open_all(folder)).save(target, budget=budget)
            print(f"{name}: done before the scheduler was killed")
            return
        except ClusterError as error:
            print(f"{name}: {error}")
    done: list[Any] = []
    with (
        clusters.processes(
            args.engine, folder, args.workers, limit, groups=True, slack=SLACK[args.engine]
        ) as processes,
        outsize.cluster(processes.address),
    ):
        WORKS[name](*open_all(folder)).save(target, budget=budget, progress=done.append)
    steps = [(one.step, f"{one.done / max(1, one.bytes):.0%}") for one in done if isinstance(one, Started)]
    left = [one for one in os.listdir(folder) if one.startswith(".")]
    print(f"{name}: scheduler killed, resumed; already done of each step that ran: {steps}; equal bytes "
          f"{target.read_bytes() == reference}, left {left}")  # fmt: skip


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="outsize-cluster-", dir=args.folder) as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("works", "kills"))
    parser.add_argument("--engine", choices=tuple(clusters.ENGINES), default="dask")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--limit", default="512MiB", help="of a worker")
    parser.add_argument("--budget", default="160MiB", help="of a worker, for ours")
    parser.add_argument("--peers", default="outsize,dask,cubed")
    parser.add_argument("--only", help="some works, with commas")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--folder", help="where data and results go")
    args = parser.parse_args()
    {"works": works, "kills": kills}[args.what](args)


if __name__ == "__main__":
    main()
