"""How long planning takes: everything from `.plan()` until the first byte would be read, in milliseconds of processor time.

    python benchmarks/planning.py [--against OTHER/src] [--works sum fft ...] [--rounds 5]

Nothing is read, so the files are holes of the right size. Every number is the best of some calls, the expression built anew
for each. With another tree's `src`, both are run in turn, in fresh processes, and the ratio of their best is printed; `same`
says whether both read and write the same bytes in as many passes, for else the times are of different work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHAPES = {"tall": (3_075_200, 512), "a": (16_384, 16_384), "b": (16_384, 16_384), "image": (1, 256, 1024, 1021)}
BUDGETS = {"small": "64MiB", "medium": "1GiB", "large": "14GiB"}


def works() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Name -> what makes the array to plan, of the opened files."""
    import filters
    import numpy as np

    import outsize.array as xp

    def softmax(x: Any) -> Any:
        grown = xp.exp(x - x.max(axis=1, keepdims=True))
        return grown / grown.sum(axis=1, keepdims=True)

    def layer_norm(x: Any) -> Any:
        return (x - x.mean(axis=1, keepdims=True)) / xp.sqrt(x.var(axis=1, keepdims=True) + 1e-5)

    def filtered(x: Any) -> Any:
        return xp.map_overlap(filters.gauss5, x, depth=(0, 0, 2, 2), boundary="reflect", memory=3)

    return {
        "sum": lambda f: f["tall"].sum(),
        "expression": lambda f: np.sqrt(np.abs(np.sin(f["tall"]) * f["tall"] + 2)).mean(),
        "written expression": lambda f: np.sqrt(np.abs(np.sin(f["tall"]) * f["tall"] + 2)),
        "z-score": lambda f: (f["tall"] - f["tall"].mean(axis=0)) / f["tall"].std(axis=0),
        "product": lambda f: f["a"] @ f["b"],
        "transpose": lambda f: f["tall"].T,
        "filter": lambda f: filtered(f["image"]),
        "softmax": lambda f: softmax(f["tall"]),
        "layer norm": lambda f: layer_norm(f["tall"]),
        "sort": lambda f: xp.sort(f["tall"], axis=1),
        "sort of columns": lambda f: xp.sort(f["tall"], axis=0),
        "median": lambda f: xp.median(f["tall"], axis=1),
        "quantile": lambda f: xp.quantile(f["a"], 0.25, axis=0),
        "tensordot": lambda f: xp.tensordot(f["image"], f["a"][:1021, :64], axes=((3,), (0,))),
        "fft": lambda f: xp.fft.rfft(f["tall"], axis=1),
        "cumsum": lambda f: xp.cumulative_sum(f["tall"], axis=0),
        "reshape": lambda f: xp.reshape(f["tall"], (-1, 1922)),
        "three at once": lambda f: {
            "m.npy": f["tall"].mean(axis=0),
            "r.npy": f["tall"].max(axis=1),
            "q.npy": xp.sqrt(f["tall"]),
        },
    }


def plan(wanted: Any, budget: str) -> Any:
    """The plan of an array, or of several in one walk."""
    if not isinstance(wanted, dict):
        return wanted.plan(budget=budget)
    from outsize.array.run.results import plan_nodes

    return plan_nodes({path: array.node for path, array in wanted.items()}, budget)


def child(folder: str, names: list[str], seconds: float) -> None:
    """Print {work: {budget: (milliseconds, what the plan moves)}} of the tree on the path."""
    import outsize

    files = {stem: outsize.open(f"{folder}/{stem}.npy") for stem in SHAPES}
    found: dict[str, Any] = {}
    for name, make in works().items():
        for size, budget in BUDGETS.items() if name in names else ():
            try:
                made = plan(make(files), budget)
            except Exception as error:  # the other tree has no rule for it, or it does not fit
                found.setdefault(name, {})[size] = (None, type(error).__name__)
                continue
            least, end, calls = math.inf, time.process_time() + seconds, 0
            while calls < 3 or (time.process_time() < end and calls < 50):
                wanted = make(files)
                begin = time.process_time()
                plan(wanted, budget)
                least, calls = min(least, time.process_time() - begin), calls + 1
            moved = [(step.read, step.written) for step in made.steps]
            found.setdefault(name, {})[size] = (least * 1e3, moved)
    print(json.dumps(found))


def run(tree: Path, folder: str, names: list[str], seconds: float) -> dict[str, Any]:
    """A fresh process on a tree."""
    env = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", folder, "--seconds", str(seconds)]
    command += ["--works", *names] if names else []
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def merge(best: dict[str, Any], new: dict[str, Any]) -> None:
    """Keep the least of each time."""
    for name, rows in new.items():
        for size, (time_, moved) in rows.items():
            old = best.setdefault(name, {}).get(size)
            if old is None or (time_ is not None and time_ < old[0]):
                best[name][size] = (time_, moved)


def show(ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    """The table."""
    against = " other ms | ratio | same |" if theirs is not None else ""
    print(f"| work | budget | ms |{against}\n|---|---|---|{'---|---|---|' if against else ''}")
    ratios = []
    for name, rows in ours.items():
        for size, (time_, moved) in rows.items():
            line = f"| {name} | {size} | {'-' if time_ is None else f'{time_:.1f}'} |"
            if theirs is not None:
                other, other_moved = theirs.get(name, {}).get(size, (None, None))
                both = time_ is not None and other is not None
                ratios += [(time_ / other, moved == other_moved)] if both else []
                ratio, same = (f"{time_ / other:.2f}", "yes" if moved == other_moved else "no") if both else ("-", "-")
                line += f" {'-' if other is None else f'{other:.1f}'} | {ratio} | {same} |"
            print(line)
    for word, kept in (("all", ratios), ("the same plan", [row for row in ratios if row[1]])):
        if kept:
            mean = math.exp(sum(math.log(ratio) for ratio, _ in kept) / len(kept))
            print(f"\ngeometric mean of {len(kept)} ratios ({word}): {mean:.2f}, largest {max(kept)[0]:.2f}")


def make_files(folder: str) -> None:
    """Files with a header and a hole."""
    import numpy as np

    for stem, shape in SHAPES.items():
        with open(f"{folder}/{stem}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 4 * math.prod(shape))


def main() -> None:
    """Run what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src folder of another tree")
    parser.add_argument("--works", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each tree")
    parser.add_argument("--seconds", type=float, default=0.2, help="processor time for each number in each process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.works or list(works()), args.seconds)
        return
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_files(folder)
        for _ in range(args.rounds):
            merge(ours, run(HERE.parent / "src", folder, args.works, args.seconds))
            if args.against is not None:
                merge(theirs, run(args.against, folder, args.works, args.seconds))
    show(ours, theirs if args.against is not None else None)


if __name__ == "__main__":
    main()
