# ruff: noqa: E501
"""On a CUDA card: the peaks of the steps in `blind_models`, convolution workspaces, and the true largest batches, in one run.

    python benchmarks/blind_h200.py OUT_FOLDER CALLS.json.gz [seconds]

Each case runs in a forked process with a fresh context. Everything is written as it comes: `blind.jsonl` (peaks, and every
allocation and free), `convolutions.json.gz` (see `record_convolutions`), `largest.json` (which batches got through inside 8 GiB) and
`sweeps.json` (batch normalisation and recurrent layers: bytes inside single calls).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import record_convolutions
import torch
from record_cuda import in_child, read_events

BUDGET = 8 * 2**30
WRITING = threading.Lock()

LARGEST: tuple[tuple[str, str, str, int, int], ...] = (
    ("vgg16", "sgd", "fp32", 4, 88), ("vgg19", "adamw", "fp32", 4, 64), ("vgg11_bn", "momentum", "fp32", 4, 80), ("resnet101", "sgd", "fp32", 4, 60),
    ("wide_resnet50_2", "adamw", "amp", 4, 96), ("regnet_x_3_2gf", "sgd", "amp", 4, 140), ("efficientnet_v2_s", "sgd", "fp32", 4, 48), ("unet", "adam", "fp32", 4, 124),
)  # fmt: skip
"""Model of `estimate_models`, optimizer, precision, step of the batch, where to look first."""


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Peaks and events of three real steps."""
    from blind_models import prepare

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    step = prepare(case)
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return {"case": case, "peaks": peaks, "events": read_events()}


def try_batch(row: Any, batch: int) -> bool:
    """True where three steps with this batch get through inside the budget."""
    from estimate_models import prepare

    torch.set_num_threads(1)
    torch.cuda.set_per_process_memory_fraction(BUDGET / torch.cuda.get_device_properties(0).total_memory)
    try:
        step = prepare({"model": row[0], "batch": batch, "optimizer": row[1], "precision": row[2]})
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    except (torch.cuda.OutOfMemoryError, RuntimeError):
        return False
    return True


def find_largest(row: Any, deadline: float) -> dict[str, Any]:
    """The true largest batch by doubling the distance and halving it again, and every try."""
    unit, batch, tried = row[3], row[4], {}

    def through(size: int) -> bool:
        tried[size] = in_child(try_batch, row, size, limit=60) is True
        return tried[size]

    low, high, jump = 0, 0, 2 * unit
    if through(batch):
        low = batch
        while not high and time.time() < deadline:
            if through(low + jump):
                low, jump = low + jump, 2 * jump
            else:
                high = low + jump
    else:
        high = batch
        while not low and time.time() < deadline and high > unit:
            size = max(unit, high - jump)
            if through(size):
                low = size
            else:
                high, jump = size, 2 * jump
    while high - low > unit and time.time() < deadline:
        middle = (low + high) // 2 // unit * unit
        low, high = (middle, high) if through(middle) else (low, middle)
    return {
        "row": row,
        "true": low,
        "closed": high - low == unit,
        "tried": {str(k): v for k, v in sorted(tried.items())},
    }


def sweeps() -> list[Any]:
    """Bytes inside single calls of batch normalisation (channels last) and of recurrent layers, packed ones too."""
    rows: list[Any] = []
    aten, inside = torch.ops.aten, record_convolutions.inside
    for kind in (torch.float32, torch.float16):
        for n, c, size in ((16, 32, 56), (16, 96, 28), (32, 64, 56), (8, 320, 14), (64, 128, 28)):
            x = torch.rand(n, c, size, size, device="cuda").to(kind, memory_format=torch.channels_last)
            w = torch.ones(c, device="cuda")
            out = aten.cudnn_batch_norm(x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)
            size_of_x, given = x.numel() * x.element_size(), (x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)
            forward = inside(functools.partial(aten.cudnn_batch_norm, *given), size_of_x + 8 * c)
            saved = (x, out[0], w, w, w, out[1], out[2], 1e-5, out[3])
            back = inside(functools.partial(aten.cudnn_batch_norm_backward, *saved), size_of_x + 8 * c)
            rows.append(["batch_norm", str(kind), n, c, size, forward, out[3].numel(), back])
    for kind in ("LSTM", "GRU", "RNN"):
        for n, seq, width, hidden, layers, both, packed in ((24, 256, 384, 512, 2, False, False), (24, 256, 384, 512, 2, False, True), (20, 256, 384, 512, 2, True, True), (20, 256, 384, 512, 2, True, False),
                                                            (8, 100, 128, 256, 1, False, True), (8, 100, 128, 256, 1, False, False), (64, 50, 512, 1024, 3, False, True), (64, 50, 512, 1024, 3, False, False)):  # fmt: skip
            for half in (False, True):
                rows.append(
                    [
                        "rnn",
                        kind,
                        n,
                        seq,
                        width,
                        hidden,
                        layers,
                        both,
                        packed,
                        half,
                        _recurrent(kind, n, seq, width, hidden, layers, both, packed, half),
                    ]
                )
    return rows


def _recurrent(
    kind: str, n: int, seq: int, width: int, hidden: int, layers: int, both: bool, packed: bool, half: bool
) -> Any:
    """Every allocation and free of one forward and one backward pass."""
    layer = getattr(torch.nn, kind)(width, hidden, num_layers=layers, bidirectional=both, batch_first=True).cuda()
    x = torch.rand(n, seq, width, device="cuda", requires_grad=True)
    lengths = torch.tensor([max(1, seq - (7 * i) % seq) for i in range(n)])
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=10_000)
    with torch.autocast("cuda", dtype=torch.float16, enabled=half):
        given: Any = (
            torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False) if packed else x
        )
        out = layer(given)[0]
        out = out.data if packed else out
    out.float().sum().backward()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [
        (entry["size"] if entry["action"] == "alloc" else -entry["size"])
        for entry in trace
        if entry["action"] in ("alloc", "free_requested")
    ]


def main() -> None:
    import torchvision  # noqa: F401  (imported before the first fork)
    import transformers  # noqa: F401
    from blind_models import cases, second_cases

    out, calls = Path(sys.argv[1]), sys.argv[2]
    limit, begin = float(sys.argv[3]) if len(sys.argv) > 3 else 150.0, time.time()
    large: list[Any] = []

    def one(case: dict[str, Any]) -> None:
        if time.time() - begin > limit - 8:
            return
        row = in_child(measure, case, limit=70)
        row = row if "peaks" in row else {"case": case, **row}
        with WRITING, (out / "blind.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(round(time.time() - begin), list(case.values()), row.get("peaks", row.get("error")), flush=True)

    def trial(row: Any) -> None:
        found = find_largest(row, begin + limit - 10)
        with WRITING:
            large.append(found)
            (out / "largest.json").write_text(json.dumps(large))
        print(round(time.time() - begin), found, flush=True)

    def sweep() -> None:
        (out / "sweeps.json").write_text(json.dumps(in_child(sweeps, limit=100)))
        print(round(time.time() - begin), "sweeps", flush=True)

    second = bool(os.environ.get("SECOND"))
    hidden = [] if second else [hide(out, part) for part in range(4)]
    workers = int(os.environ.get("WORKERS", "8"))
    with ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(one, case) for case in (second_cases() if second else cases())]
        jobs += [] if second else [pool.submit(sweep), *[pool.submit(trial, row) for row in LARGEST]]
        recording = threading.Thread(target=record, args=(calls, str(out / "convolutions.json.gz"), limit - 15))
        recording.start()
        for job in jobs:
            try:
                job.result()
            except Exception as error:
                print("failed", repr(error)[:300], flush=True)
        recording.join()
    for process in hidden:
        process.wait(20)
    print("done", round(time.time() - begin), flush=True)
    os._exit(0)


def hide(out: Path, part: int) -> Any:
    """A process that cannot see the card and estimates a part of the cases."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PART": f"{part}/4"}
    words = [sys.executable, str(Path(__file__).with_name("blind_estimate.py")), str(out / f"hidden{part}.json")]
    return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)


def record(calls: str, target: str, seconds: float) -> None:
    words = [sys.executable, record_convolutions.__file__, "measure", calls, target, str(seconds)]
    print(subprocess.run(words, capture_output=True, text=True).stdout[-500:], flush=True)


if __name__ == "__main__":
    main()
