"""The largest batch inside 8 GiB, projected without the card and then found by trying; after that what torch's MemTracker says.

    python benchmarks/largest_h200.py OUT_FOLDER [seconds]

Every projection runs in a process that cannot see the card, every try in a fresh one under a memory fraction of 8 GiB: upwards
from the projected batch until a step fails, downwards if the projected one itself does. Results are written after every case, so
that a run that is cut short keeps what it has: `largest.json`, then `memtracker.json` for the steps of `results/h200_measured_*`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from estimate_h200 import LARGEST, key_of, memtracker, run_hidden, try_batch
from record_cuda import in_child

MORE: tuple[tuple[str, str, str, int], ...] = (
    ("swin_t", "adamw", "amp", 4),
    ("regnet_y_400mf", "momentum", "fp32", 8),
    ("qwen2", "adamw", "amp", 1),
    ("unet", "adam", "fp32", 4),
)
"""Further models, as in `LARGEST`."""
HIGHEST = 6
"""How many steps above the projected batch are tried."""
WRITING = threading.Lock()


def find_true(row: tuple[str, str, str, int], projected: int) -> dict[str, Any]:
    """The true largest batch near a projected one, and every try."""
    unit, tried = row[3], {}

    def gets_through(batch: int) -> bool:
        answer = in_child(try_batch, row, batch, limit=90)
        tried[str(batch)] = answer if isinstance(answer, bool) else answer.get("error", repr(answer))[:200]
        return answer is True

    batch = max(projected, unit)
    if gets_through(batch):
        while batch < projected + HIGHEST * unit and gets_through(batch + unit):
            batch += unit
    else:
        batch -= unit
        while batch > 0 and not gets_through(batch):
            batch -= unit
    return {"true": batch, "tried": tried}


def keep(path: Path, rows: list[Any], row: Any) -> None:
    """Add a row and write the file anew."""
    with WRITING:
        rows.append(row)
        path.write_text(json.dumps(rows))
    print(json.dumps(row)[:240], flush=True)


def largest(out: Path, begin: float) -> None:
    """Project and try every model."""
    rows: list[Any] = []

    def one(row: tuple[str, str, str, int]) -> None:
        found = run_hidden("largest", [row])[0][1]
        answer = {"row": row, "projected": found.get("largest"), "error": found.get("error")}
        if answer["projected"] is not None:
            answer |= find_true(row, answer["projected"])
        keep(out / "largest.json", rows, answer | {"seconds": round(time.time() - begin)})

    with ThreadPoolExecutor(len(LARGEST) + len(MORE)) as pool:
        list(pool.map(one, LARGEST + MORE))


def peers(out: Path, begin: float, limit: float) -> None:
    """MemTracker for the steps whose peaks were measured on the card, for as long as there is time."""
    source = sorted((Path(__file__).parent / "results").glob("h200_measured_*.json"))[-1]
    cases = [row["case"] for row in json.loads(source.read_text())["rows"]]
    cases = [case for case in cases if len(case) == 4 and case["precision"] in ("fp32", "amp")]
    rows: list[Any] = []

    def one(case: dict[str, Any]) -> None:
        left = limit - (time.time() - begin)
        if left > 5:
            answer = in_child(memtracker, case, limit=min(60, left))
            keep(out / "memtracker.json", rows, {"case": key_of(case), **_short(answer)})

    with ThreadPoolExecutor(14) as pool:
        list(pool.map(one, sorted(cases, key=lambda case: case["precision"], reverse=True)))


def _short(answer: Any) -> dict[str, Any]:
    return {"allocated": answer["allocated"]} if "allocated" in answer else {"error": answer.get("error", "")[:200]}


def main() -> None:
    import torchvision  # noqa: F401  (imported before the first fork)
    import transformers  # noqa: F401

    out, limit, begin = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 300.0, time.time()
    largest(out, begin)
    peers(out, begin, limit)
    print("done", round(time.time() - begin), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
