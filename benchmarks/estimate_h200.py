# ruff: noqa: E501
"""Projected against measured, on a CUDA card: peaks of training steps, their bounds, and the largest batch that fits.

    python benchmarks/estimate_h200.py OUT_FOLDER [seconds]

Every case is estimated in a process that cannot see the card (`CUDA_VISIBLE_DEVICES=""`) and measured in another, fresh one.
torch's MemTracker and accelerate's formula stand in the same table (torchinfo too, where it is installed). Then the largest
batch of ten models inside 8 GiB (a memory fraction) is projected and tried. Writes `estimate.json` and `estimate.md`.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from estimate_models import Case, build, loss_of, make_batch, prepare
from record_cuda import grid, in_child, unseen

BUDGET = 8 * 2**30
LARGEST: tuple[tuple[str, str, str, int], ...] = (
    ("resnet50", "adamw", "fp32", 4), ("vgg16", "sgd", "fp32", 4), ("mobilenet_v2", "momentum", "amp", 8),
    ("convnext_tiny", "adamw", "amp", 4), ("vit_b_16", "adamw", "amp", 4), ("densenet121", "sgd", "fp32", 4),
    ("gpt2", "adamw", "amp", 1), ("bert", "adamw", "fp32", 1), ("llama300m", "momentum", "bf16", 1), ("t5", "adagrad", "amp", 1),
)  # fmt: skip
"""Model, optimizer, precision, step of the batch."""


def key_of(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


# what runs without the card


def project(case: Case) -> dict[str, Any]:
    """Our estimate of one case."""
    import outsize

    begin = time.time()
    footprint = outsize.estimate(lambda step: step(), build=lambda: (prepare(case),))
    amounts = {name: getattr(footprint, f"peak_{name}") for name in ("requested", "allocated", "reserved")}
    out: dict[str, Any] = {name: [amount.bytes, amount.bound] for name, amount in amounts.items()}
    return {**out, "use": footprint.device_use.bytes, "seconds": time.time() - begin, "notes": list(footprint.notes)}


def project_largest(row: tuple[str, str, str, int]) -> dict[str, Any]:
    """The largest batch of one model that fits in the budget."""
    from outsize.core.cards import find_card
    from outsize.model.estimation.growth import search
    from outsize.model.estimation.job import Job

    model, optimizer, precision, unit = row

    def make(batch: int) -> tuple[Any, ...]:
        return (prepare({"model": model, "batch": batch, "optimizer": optimizer, "precision": precision}),)

    job = Job(lambda step: step(), (), make, "cuda:0", find_card("H200"), 3)
    play = lambda size: job.replay(job.trace(size))  # noqa: E731
    small, double = play(4 * unit).likely.peak.reserved, play(8 * unit).likely.peak.reserved
    guess = int((BUDGET - small) / max(1, (double - small) / (4 * unit))) + 4 * unit
    found = search("8 GiB", BUDGET, play, guess, unit)
    return {"largest": found.largest, "unit": unit}


def hidden(argument: str) -> None:
    """The process without the card: estimates the cases given as JSON, prints JSON lines."""
    kind, items = json.loads(argument)
    for item in items:
        try:
            answer = project(item) if kind == "case" else project_largest(tuple(item))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps([item, answer]), flush=True)


def run_hidden(kind: str, items: list[Any]) -> list[Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, __file__, "--hidden", json.dumps([kind, items])],
        env=environment,
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]
    return rows if rows else [[items[0], {"error": answer.stderr[-300:]}]]


# what runs on the card


def measure(case: Case) -> dict[str, Any]:
    """Peaks of three real steps."""
    torch.manual_seed(0)
    step = prepare(case)
    for _ in range(3):
        step()
        torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def try_batch(row: tuple[str, str, str, int], batch: int) -> bool:
    """True where three steps with this batch get through inside the budget."""
    model, optimizer, precision, _ = row
    torch.cuda.set_per_process_memory_fraction(BUDGET / torch.cuda.get_device_properties(0).total_memory)
    try:
        step = prepare({"model": model, "batch": batch, "optimizer": optimizer, "precision": precision})
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def memtracker(case: Case) -> dict[str, Any]:
    """What torch's own tracker says on fake tensors."""
    from estimate_models import OPTIMIZERS, _autocast
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        with torch.device("cuda"):
            model = build(case["model"]).train()
        data = make_batch(case, "cuda")
        optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *data)
        with tracker:
            for number in range(2):
                with _autocast(case):
                    loss = loss_of(case, model, data)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return {"allocated": max(sum(v for k, v in per.items() if str(k) != "Total") for per in peak.values())}


def formula(case: Case) -> int:
    """accelerate's estimate for Adam: weights, gradients and two states."""
    from accelerate import init_empty_weights
    from accelerate.utils.modeling import compute_module_sizes

    with init_empty_weights():
        model = build(case["model"])
    return 4 * int(compute_module_sizes(model)[""])


# the table


def collect(limit: float) -> dict[str, Any]:
    begin = time.time()
    cases = grid() + unseen()
    rows: dict[str, dict[str, Any]] = {key_of(case): {"case": case} for case in cases}
    groups = [cases[start::10] for start in range(10)]
    with ThreadPoolExecutor(10) as blind, ThreadPoolExecutor(7) as card:
        largest = [blind.submit(run_hidden, "largest", [row]) for row in LARGEST]
        estimates = [blind.submit(run_hidden, "case", group) for group in groups]
        measured = {key_of(case): card.submit(_within, begin + limit, measure, case) for case in cases}
        plain = [
            case for case in cases if len(case) == 4 and (case["optimizer"], case["precision"]) == ("adamw", "fp32")
        ]
        tracked = {key_of(case): card.submit(_within, begin + limit, memtracker, case) for case in plain}
        for future in estimates:
            for case, answer in future.result():
                rows[key_of(case)]["projected"] = answer
        for name, future in measured.items():
            rows[name]["measured"] = future.result()
        tries = [card.submit(check_largest, future.result()[0]) for future in largest]
        for name, future in tracked.items():
            rows[name]["memtracker"] = future.result()
        batches = [future.result() for future in tries]
    return {"rows": list(rows.values()), "largest": batches, "seconds": time.time() - begin, "torch": torch.__version__}


def _within(deadline: float, function: Any, case: Case) -> dict[str, Any]:
    if time.time() > deadline:
        return {"error": "no time left"}
    answer = in_child(function, case)
    return answer if isinstance(answer, dict) else {"error": repr(answer)}


def check_largest(answer: Any) -> dict[str, Any]:
    """Try the projected batch and those above it."""
    row, found = answer
    if "error" in found:
        return {"row": row, **found}
    batch, unit = found["largest"], found["unit"]
    tried = {batch: in_child(try_batch, tuple(row), batch)}
    above = batch + unit
    while above <= batch + 4 * unit:
        tried[above] = in_child(try_batch, tuple(row), above)
        if tried[above] is not True:
            break
        above += unit
    return {"row": row, "projected": batch, "unit": unit, "tried": {str(k): v for k, v in tried.items()}}


def summarise(data: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [f"# Projected against measured, NVIDIA H200, torch {data['torch']}, {datetime.date.today()}", ""]
    lines += [
        "| case | measured allocated | error | bound | measured reserved | error | bound | MemTracker | accelerate |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    errors: dict[str, list[float]] = {
        "allocated": [],
        "reserved": [],
        "allocated bound": [],
        "reserved bound": [],
        "memtracker": [],
    }
    failed = []
    for row in data["rows"]:
        name, real, ours = key_of(row["case"]), row.get("measured", {}), row.get("projected", {})
        if "error" in ours or not ours:
            failed.append(f"{name}: {ours.get('error')}")
        if "allocated" not in real or "allocated" not in ours:
            continue
        cells = [name]
        for kind in ("allocated", "reserved"):
            point, bound = ours[kind]
            errors[kind].append(point / real[kind] - 1)
            errors[f"{kind} bound"].append(bound / real[kind])
            cells += [f"{real[kind] / 2**20:,.0f} MiB", f"{point / real[kind] - 1:+.2%}", f"{bound / real[kind]:.3f}x"]
        peer = row.get("memtracker", {})
        if "allocated" in peer:
            errors["memtracker"].append(peer["allocated"] / real["allocated"] - 1)
        cells.append(
            f"{peer['allocated'] / real['allocated'] - 1:+.1%}" if "allocated" in peer else ("failed" if peer else "-")
        )
        cells.append(f"{row['formula'] / real['allocated'] - 1:+.0%}" if "formula" in row else "-")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_statistics(errors), f"- failed: {len(failed)} {failed}"]
    if not data["largest"]:
        return "\n".join(lines) + "\n"
    lines += ["", "## Largest batch inside 8 GiB", ""]
    lines += ["| model | projected | step | tried (batch: got through) |", "|---|---|---|---|"]
    for row in data["largest"]:
        lines.append(
            f"| {'-'.join(map(str, row['row'][:3]))} | {row.get('projected')} | {row.get('unit')} | {row.get('tried', row.get('error'))} |"
        )
    return "\n".join(lines) + "\n"


def _statistics(errors: dict[str, list[float]]) -> list[str]:
    out = []
    for kind in ("allocated", "reserved", "memtracker"):
        if not errors[kind]:
            continue
        sizes = [abs(error) for error in errors[kind]]
        out.append(
            f"- {kind}: median error {statistics.median(sizes):.3%}, worst {max(sizes):.2%}, {len(errors[kind])} cases"
        )
    for kind in ("allocated bound", "reserved bound"):
        values = errors[kind] or [0.0]
        below = sum(value < 1 for value in values)
        out.append(
            f"- {kind}: below the truth {below} times, median {statistics.median(values):.3f}x, lowest {min(values):.3f}x"
        )
    return out


def main() -> None:
    if sys.argv[1] == "--hidden":
        hidden(sys.argv[2])
        return
    multiprocessing.set_start_method("fork")
    import torchvision  # noqa: F401  (imported before the first fork)
    import transformers  # noqa: F401

    out = Path(sys.argv[1])
    data = collect(float(sys.argv[2]) if len(sys.argv) > 2 else 300)
    (out / "estimate.json").write_text(json.dumps(data))
    sizes: dict[str, int] = {}
    for row in data["rows"]:
        if row["case"]["optimizer"] == "adamw" and row["case"]["precision"] == "fp32":
            name = row["case"]["model"]
            try:
                sizes[name] = sizes.get(name) or formula(row["case"])
                row["formula"] = sizes[name]
            except Exception as error:
                print("accelerate", name, repr(error)[:100])
    (out / "estimate.json").write_text(json.dumps(data))
    table = summarise(data)
    (out / "estimate.md").write_text(table)
    print(table[-6000:])


if __name__ == "__main__":
    main()
