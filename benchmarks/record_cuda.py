# ruff: noqa: E501
"""Record, on a CUDA card, what training steps really ask of the caching allocator, operator by operator.

    python benchmarks/record_cuda.py OUT_FOLDER [seconds]

Writes `events.json.gz` (per case: peaks of each step, every allocation and free, and which operator made it) and
`sweep.json.gz` (single operators over many shapes: the bytes each one allocates besides its results). The rules in
`outsize/model/` that say what a CUDA kernel takes inside itself were read off these files.
"""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from estimate_models import Case, prepare
from torch.utils._python_dispatch import TorchDispatchMode

FORK = multiprocessing.get_context("fork")
FORKING = threading.Lock()
UNSEEN = "--unseen" in sys.argv
"""Measure the models that no rule was read from, without the operator log."""


def describe(value: Any) -> str:
    """A short signature of an argument: `f32[8,3,224,224]`, with the strides where they are not contiguous."""
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        strides = "" if value.is_contiguous() else "/" + ",".join(map(str, value.stride()))
        return f"{str(value.dtype)[6:]}[{shape}{strides}]{'' if value.is_cuda else '@' + value.device.type}"
    if isinstance(value, list | tuple):
        inside = [describe(item) for item in value[:64]]
        return f"({';'.join(inside)})"
    return repr(value)[:40]


class Log(TorchDispatchMode):
    """Notes for every operator the range of allocator events that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = count_events()
        out = func(*args, **(kwargs or {}))
        end = count_events()
        if end > begin:
            keywords = {key: describe(value) for key, value in (kwargs or {}).items() if value is not None}
            text = f"{func}|{'|'.join(describe(arg) for arg in args)}|{keywords}=>{describe(out)}"
            self.rows.append((text, begin, end))
        return out


def count_events() -> int:
    stats = torch._C._cuda_memoryStats(0)["allocation"]["all"]
    return int(stats["allocated"]) + int(stats["freed"])


def read_events() -> list[int]:
    """Every allocation as its bytes, every free as minus the number (from 1) of the allocation it ends."""
    numbers: dict[int, int] = {}
    events: list[int] = []
    count = 0
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] == "alloc":
            count += 1
            numbers[entry["addr"]] = count
            events.append(entry["size"])
        elif entry["action"] == "free_requested":
            events.append(-numbers.pop(entry["addr"]))
    return events


def run_case(case: Case, logged: bool) -> dict[str, Any]:
    """Three steps of a case in this process."""
    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
    log, peaks, marks = Log(), [], []
    step = prepare(case)
    start = torch.cuda.memory_allocated()
    marks.append(count_events())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        if logged:
            with log:
                step()
        else:
            step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        marks.append(count_events())
    row: dict[str, Any] = {"case": case, "start": start, "peaks": peaks, "marks": marks, "events": read_events()}
    row["requested_peak"] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    if logged:
        signatures: dict[str, int] = {}
        row["ops"] = [(signatures.setdefault(text, len(signatures)), b, e) for text, b, e in log.rows]
        row["signatures"] = list(signatures)
    return row


def in_child(function: Any, *args: Any, limit: float = 150) -> Any:
    """`function(*args)` in a forked process, so that each starts with a fresh CUDA context."""
    queue = FORK.Queue()

    def body() -> None:
        try:
            queue.put(function(*args))
        except BaseException as error:
            queue.put(
                {
                    "args": [repr(arg) for arg in args],
                    "error": repr(error)[:400],
                    "trace": traceback.format_exc()[-1500:],
                }
            )

    with FORKING:  # one fork at a time: imported libraries may refuse it while a lock changes hands
        process = _start(body)
    try:
        return queue.get(timeout=limit)
    except Exception as error:
        return {"args": [repr(arg) for arg in args], "error": repr(error)}
    finally:
        process.join(5)
        process.kill()


def _start(body: Any) -> Any:
    for _ in range(50):
        process = FORK.Process(target=body)
        try:
            process.start()
        except RuntimeError:
            time.sleep(0.2)
        else:
            return process
    raise RuntimeError("the process could not be forked")


def grid() -> list[Case]:
    """Every model once, most in two or three settings."""
    small = {
        "vision": [(32, "adamw", "fp32"), (64, "adamw", "amp")],
        "text": [(4, "adamw", "fp32"), (8, "adamw", "amp")],
    }
    vision = ["alexnet", "resnet18", "resnet50", "resnext50_32x4d", "vgg16", "mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0",
              "efficientnet_b0", "densenet121", "convnext_tiny", "swin_t", "vit_b_16", "regnet_y_400mf", "shufflenet_v2_x1_0",
              "squeezenet1_1", "googlenet", "inception_v3", "wide_resnet50_2", "maxvit_t"]  # fmt: skip
    text = [
        "gpt2",
        "bert",
        "llama300m",
        "distilbert",
        "opt",
        "neox",
        "t5",
        "qwen2",
        "mistral",
        "electra",
        "lstm",
        "unet",
        "encoder",
    ]
    cases = [{"model": m, "batch": b, "optimizer": o, "precision": p} for m in vision for b, o, p in small["vision"]]
    cases += [{"model": m, "batch": b, "optimizer": o, "precision": p} for m in text for b, o, p in small["text"]]
    more: list[tuple[str, int, str, str, dict[str, Any]]] = [
        ("resnet50", 16, "sgd", "bf16", {}), ("resnet50", 32, "adamw", "amp", {"format": "channels_last"}),
        ("convnext_tiny", 16, "momentum", "bf16", {}), ("mobilenet_v2", 16, "adagrad", "fp32", {"format": "channels_last"}),
        ("gpt2", 4, "adagrad", "bf16", {}), ("gpt2", 4, "adamw", "amp", {"checkpoint": "non-reentrant"}),
        ("gpt2", 4, "sgd", "amp", {"accumulate": 3}), ("gpt2-eager", 4, "adamw", "fp32", {}),
        ("llama300m", 4, "adamw", "bf16", {"checkpoint": "reentrant"}), ("llama300m", 4, "momentum", "bf16", {}),
        ("bert", 4, "adamw-fused", "fp16-amp", {}), ("bert", 8, "adam", "fp32", {"set_to_none": False}),
        ("vit_b_16", 16, "adamw-loop", "bf16", {}), ("gpt2", 8, "sgd", "fp32", {"infer": True}),
        ("resnet50", 64, "sgd", "amp", {"infer": True}), ("resnet18", 32, "rmsprop", "fp16-amp", {}),
        ("llama300m", 2, "adamw", "amp", {"seq": 2048}), ("resnet50", 32, "sgd", "fp32", {"checkpoint": "whole"}),
    ]  # fmt: skip
    cases += [{"model": m, "batch": b, "optimizer": o, "precision": p, **extra} for m, b, o, p, extra in more]
    return cases


def unseen() -> list[Case]:
    """Models and settings that no rule was read from: they check the rules."""
    vision = ["resnet101", "densenet169", "mobilenet_v3_small", "swin_v2_t", "convnext_small", "shufflenet_v2_x0_5",
              "regnet_y_1_6gf", "efficientnet_b2", "vgg13", "efficientnet_v2_s", "regnet_x_3_2gf", "vit_l_16", "vgg11_bn"]  # fmt: skip
    text = ["albert", "bart", "gpt_neo", "bloom", "phi", "gemma", "deberta", "qwen3", "falcon", "roberta", "mixtral"]
    settings = {
        "vision": [(24, "adamw", "fp32"), (48, "momentum", "amp")],
        "text": [(3, "adamw", "fp32"), (6, "adagrad", "amp")],
    }
    cases = [{"model": m, "batch": b, "optimizer": o, "precision": p} for m in vision for b, o, p in settings["vision"]]
    cases += [{"model": m, "batch": b, "optimizer": o, "precision": p} for m in text for b, o, p in settings["text"]]
    cases += [
        {"model": m, "batch": 128, "optimizer": "sgd", "precision": "fp32"}
        for m in ("resnet50", "vgg16", "regnet_y_400mf")
    ]
    return cases


def main() -> None:
    out = Path(sys.argv[1])
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 400
    begin = time.time()
    rows: list[Any] = []

    def one(job: tuple[Case, bool]) -> None:
        if time.time() - begin < limit:
            row = in_child(run_case, *job)
            rows.append(row)
            print(round(time.time() - begin), job, row.get("peaks", row.get("error")), flush=True)

    from record_sweep import sweep

    with ThreadPoolExecutor(int(os.environ.get("WORKERS", "6"))) as pool:
        sweeps = pool.submit(list) if UNSEEN else pool.submit(in_child, sweep, limit=limit)
        kinds = (False,) if UNSEEN else (True, False)
        list(pool.map(one, itertools.product(unseen() if UNSEEN else grid(), kinds)))
        answer = sweeps.result()
    for name, data in (("events", rows), ("sweep", answer)):
        with gzip.open(out / f"{name}.json.gz", "wt") as file:
            json.dump(data, file)
    print(
        "done", round(time.time() - begin), answer.get("error") if isinstance(answer, dict) else len(answer), flush=True
    )


if __name__ == "__main__":
    import torchvision  # noqa: F401  (imported before the first fork)
    import transformers  # noqa: F401

    main()
