"""Outsize, its peers and the machine's floor on the same work, the same files and the same hard limit, in one run.

    python benchmarks/arrays.py --data FOLDER [--works sum softmax ...] [--peers blosc2 ...] [--seconds 90] [--scale 6]
    python benchmarks/arrays.py --data FOLDER --arena --before c92106c --peers --repeat 3    two trees in turn, 10 minutes

Every run is a fresh process in a memory cgroup (the limit includes the interpreter), on a cold page cache. Prints wall
seconds, ratios to the best surviving peer and to the floor measured in the same minute, and the highest anonymous
memory; leaves the rows in benchmarks/results/. Needs root and a memory cgroup; `dask`, `cubed` and `blosc2` where
those peers are wanted. The inputs (9.5 GB, and as much again for blosc2's copies) are made on the first run, or a part of
them: `--scale 6` makes files and limits smaller by six. `--before` runs the library as it stood at a commit with the same
script, files, limits and packages, in turn with this tree; c92106c is the last commit before the house's second draft.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import data as inputs
import lane_peers
from peers import CAN

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import cgroup  # noqa: E402

MiB = 1 << 20
WORKS = {
    "sum": 512, "expression": 512, "normalise": 1024, "matmul": 1024, "transpose": 1024, "filter": 512, "softmax": 1024,
    "layernorm": 1024, "cosine": 1024, "argmax": 512, "zscore-512": 512, "zscore-2048": 2048, "zscore-8192": 8192, "three": 1024,
    "sort": 1024, "median": 1024, "unique": 1024, "rfft": 1024, "rsvd": 1024, "qr": 1024,
}  # fmt: skip
"""Work -> limit in MiB."""
ARENA = ("sum", "expression", "normalise", "matmul", "transpose", "filter")
"""Works that every commit since the first arena can do."""
NEEDS = {"matmul": ("a", "b"), "filter": ("image",), "unique": ()}
"""Work -> its files, where it is not the tall one."""
INTERPRETER = 100
"""MiB of a limit that Python and its libraries take."""
PEERS = ("memmap", "chunked", "dask", "cubed", "blosc2", "duckdb")
TABLES = ("sort", "median", "unique")
"""Works for which numbers are also written as tables."""
OURS = {"outsize": HERE.parent / "src"}
"""Contestant -> the library that it runs; `--before` adds another."""


def cold(out: Path) -> None:
    """An empty output folder, and inputs that are not in the page cache."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.sync()
    for path in (path for path in out.parent.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def limit_of(work: str, scale: int) -> int:
    """The limit of a work in MiB; on files that are smaller by `scale`, what is left to data is smaller by as much."""
    return INTERPRETER + (WORKS[work] - INTERPRETER) // scale


def floor(work: str, data: Path, out: Path, limit: int) -> float:
    """Seconds of the floor, in a process of its own without a limit."""
    cold(out)
    done = subprocess.run(
        [sys.executable, str(HERE / "floor.py"), work, str(data), str(out), str(limit)], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def one(
    name: str, work: str, data: Path, out: Path, seconds: float, budget: int = 0, scale: int = 1
) -> cgroup.Outcome:  # fmt: skip
    """One contestant on one work; ours inside `budget` MiB and a limit of 100 MiB more, where one is given."""
    cold(out)
    limit = (budget + INTERPRETER if budget else limit_of(work, scale)) * MiB
    script = ["ours.py"] if name in OURS else ["peers.py", name]
    memory = f"{int(limit * 0.78) // 10**6}MB"
    command = [sys.executable, str(HERE / script[0]), *script[1:], work, str(data), str(out), memory]
    command += [f"{budget}MiB"] if budget else []
    return cgroup.run(command, limit, seconds, env=environment(name))


def environment(name: str) -> dict[str, str]:
    """A contestant's library on the path, its bytecode kept as an installed package keeps it."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return env | {"PYTHONPATH": os.pathsep.join([str(OURS.get(name, OURS["outsize"])), env.get("PYTHONPATH", "")])}


def unpack(commit: str, folder: Path) -> Path:
    """The library as it stood at a commit. Not below the inputs, where the page cache is emptied before each run."""
    packed = subprocess.run(
        ["git", "-C", str(HERE.parent), "archive", f"{commit}:src"], check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return folder


def compile_once(name: str) -> None:
    """Writes a library's bytecode, and makes sure that its contestant imports it."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(OURS[name])], check=True, env=environment(name))
    asked = [sys.executable, "-c", "import outsize; print(outsize.__file__)"]
    found = subprocess.run(asked, check=True, env=environment(name), capture_output=True, text=True).stdout.strip()
    assert Path(found).is_relative_to(OURS[name]), f"{name} imports {found}"


def show(work: str, name: str, outcome: cgroup.Outcome) -> str:
    """One line of the table."""
    state = "" if outcome.fine else "killed" if outcome.killed else "too slow" if outcome.status is None else "failed"
    return (
        f"{work:<11} {name:<9} {outcome.seconds:8.2f} s   anon {outcome.anonymous / MiB:7.0f} MiB   "
        f"cgroup {outcome.peak / MiB:7.0f} MiB   {state}"
    )


def _worked(outcome: cgroup.Outcome) -> float:
    """Seconds of our own process between its imports and its end, as it told them."""
    return float(outcome.stdout.rpartition("worked ")[2].split()[0])


def against(rows: dict[str, list[cgroup.Outcome]]) -> str:
    """The older tree beside this one: the best seconds of each, and the highest anonymous memory."""
    fine = {name: [outcome for outcome in rows[name] if outcome.fine] for name in OURS}
    if not all(fine.values()):
        return "a tree failed"
    ours, before = (min(outcome.seconds for outcome in fine[name]) for name in ("outsize", "before"))
    held, then = (max(outcome.anonymous for outcome in fine[name]) / MiB for name in ("outsize", "before"))
    return f"ours / before {ours / before:.2f}, anonymous {held:.0f} / {then:.0f} MiB"


def contest(work: str, args: argparse.Namespace) -> dict[str, object]:
    """All contestants on one work, and the ratios."""
    out = args.data / "out"
    limit = limit_of(work, args.scale)
    floors = [floor(work, args.data, out, limit)]
    rows: dict[str, list[cgroup.Outcome]] = {}
    peers = [peer for peer in args.peers if work in CAN[peer] and not args.budget]
    for name in [*OURS] * args.repeat + peers:
        rows.setdefault(name, []).append(one(name, work, args.data, out, args.seconds, args.budget, args.scale))
        print(show(work, name, rows[name][-1]), flush=True)
        if not rows[name][-1].fine and name in OURS:
            print(rows[name][-1].stdout[-2000:], rows[name][-1].stderr[-2000:])
    floors.append(floor(work, args.data, out, limit))
    shutil.rmtree(out, ignore_errors=True)
    ours = min((o.seconds for o in rows["outsize"] if o.fine), default=None)
    best = min(((o[0].seconds, n) for n, o in rows.items() if n not in OURS and o[0].fine), default=None)
    line = f"{work:<11} floor     {min(floors):8.2f} s   "
    if ours is not None:
        worked = min(_worked(o) for o in rows["outsize"] if o.fine)
        line += f"ours / floor {ours / min(floors):.2f}, without Python's start {worked / min(floors):.2f}   "
        line += f"best peer ({best[1]}) / ours {best[0] / ours:.2f}" if best else "no peer survived" if peers else ""
    if "before" in OURS:
        line += against(rows)
    print(line + "\n", flush=True)
    return {
        "work": work, "limit_mib": limit, "floor_s": min(floors), "ours_s": ours, "best_peer": best and best[1],
        "best_peer_s": best and best[0],
        "rows": {
            n: [{k: v for k, v in asdict(o).items() if not k.startswith("std")} for o in found] for n, found in rows.items()
        },
    }  # fmt: skip


def main() -> int:
    """Run what was asked for and leave the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("OUTSIZE_DATA", "data")))
    parser.add_argument("--works", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--arena", action="store_true", help=f"only these works: {' '.join(ARENA)}")
    parser.add_argument(
        "--before", default="", metavar="COMMIT", help="the library of this commit in turn with this one"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--seconds", type=float, default=90, help="time limit of one run")
    parser.add_argument("--budget", type=int, default=0, help="MiB for outsize, without peers; else the limit decides")
    parser.add_argument("--repeat", type=int, default=2, help="runs of outsize; the best counts")
    parser.add_argument("--scale", type=int, default=1, help="files and limits are smaller by this")
    args = parser.parse_args()
    args.works = list(ARENA) if args.arena else args.works
    with cgroup.limited(1 << 30):  # says why, where none can be made
        pass
    stems = tuple({stem for work in args.works for stem in NEEDS.get(work, ("tall",))})
    inputs.make(args.data, args.scale, stems)
    tables = set(args.works) & set(TABLES) and {"duckdb", "dask"} & set(args.peers)
    if "unique" in args.works or tables:
        inputs.make_whole(args.data, args.scale)
    if tables:
        inputs.make(args.data, args.scale, ("tall",))
        lane_peers.make_tables(args.data)
    if "blosc2" in args.peers:
        copied = {stem for work in args.works if work in CAN["blosc2"] for stem in NEEDS.get(work, ("tall",))}
        inputs.make_blosc2(args.data, tuple(sorted(copied)))
    with tempfile.TemporaryDirectory() as folder:
        if args.before:
            OURS["before"] = unpack(args.before, Path(folder))
        for name in OURS:
            compile_once(name)
        results = [contest(work, args) for work in args.works]
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    target = HERE / "results" / f"arrays-{stamp}.json"
    target.parent.mkdir(exist_ok=True)
    machine = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}"
    load = os.getloadavg()
    target.write_text(json.dumps({"date": stamp, "machine": machine, "load": load, "works": results}, indent=1) + "\n")
    print(f"written to {target.relative_to(HERE.parent)}; load average at the end {load[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
