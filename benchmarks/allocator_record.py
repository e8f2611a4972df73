"""Record what torch's real CUDA allocator does, case by case, on a machine with a GPU.

    python benchmarks/allocator_record.py OUT.tar        # all cases, each in a fresh process, several at a time
    python benchmarks/allocator_record.py --case NAME FILE.json.gz

In: nothing but torch, torchvision and transformers (random weights). Out: for each case one gzipped JSON file with
torch's own trace from the start of the process, in columns (action, address in steps of 512 bytes from the lowest, bytes,
stream), and torch's own statistics, which the tests hold the replay against. The files that the tests use are in
tests/allocator/data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MiB = 2**20
ACTIONS = {
    "alloc": "a",
    "free_requested": "r",
    "free_completed": "f",
    "segment_alloc": "A",
    "segment_free": "F",
    "segment_map": "M",
    "segment_unmap": "U",
    "oom": "o",
    "snapshot": "s",
}
EXPANDABLE = "expandable_segments:True"
HOST_STATS = ("allocated_bytes", "active_bytes", "reserved_bytes", "segments", "active_requests", "allocations")
VECTORS = [1, 513, 1048576, 1048577, 8519680, 10485760, 10485761, 19922944, 22020095, 104857601, 123456789]


# -- workloads -------------------------------------------------------------------------------------------------------


def image_steps(name: str, batches: tuple[int, ...], amp: bool = False) -> dict[str, Any]:
    import torch
    import torchvision

    model = getattr(torchvision.models, name)(weights=None).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device="cuda")
        y = torch.randint(0, 1000, (batch,), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def text_steps(batches: tuple[int, ...], amp: bool = False, length: int = 512) -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches:
        ids = torch.randint(0, 50257, (batch, length), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def limited(share: float, work: Any, peak: int) -> dict[str, Any]:
    """`work` under a memory fraction of `share` of the peak it reserves when nothing limits it."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    fraction = share * peak / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    out = {"fraction": fraction, "limit": int(fraction * total), "ran_out": False}
    try:
        work()
    except torch.OutOfMemoryError:
        out["ran_out"] = True
    return out


def streams(rounds: int = 1500) -> dict[str, Any]:
    """Blocks of two streams, many of them used by the other stream when they are freed."""
    import torch

    pick = random.Random(3)
    queues = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    live: list[Any] = []
    work = torch.randn(2048, 2048, device="cuda")
    for _ in range(rounds):
        home, guest = pick.sample(queues, 2)
        with torch.cuda.stream(home):
            block = torch.empty(int(2 ** pick.uniform(6, 26)), dtype=torch.uint8, device="cuda")
        if pick.random() < 0.4:
            with torch.cuda.stream(guest):
                work @ work
                block.add_(1)
            block.record_stream(guest)
        live.append(block)
        del block
        while len(live) > 40 or (live and pick.random() < 0.4):
            live.pop(pick.randrange(len(live)))
    return {}


def fuzz(
    rounds: int = 6000, seed: int = 1, empty: bool = False, limit: int | None = None, give_up: bool = False
) -> dict[str, Any]:
    """Random sizes, random frees, two streams; with `limit`, under a memory fraction that is reached again and again."""
    import torch

    out: dict[str, Any] = {}
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
        out = {"fraction": limit / total, "limit": int(limit / total * total)}
    pick = random.Random(seed)
    queues = [torch.cuda.current_stream(), torch.cuda.Stream()]
    sizes = [pick.choice([int(2 ** pick.uniform(0, 28)), pick.randrange(1, 64) * MiB // 2]) for _ in range(60)]
    live: list[Any] = []
    failures = 0
    for step in range(rounds):
        if pick.random() < 0.55 and len(live) < 150:
            size = pick.choice(sizes) if pick.random() < 0.5 else int(2 ** pick.uniform(0, 27))
            try:
                with torch.cuda.stream(pick.choice(queues)):
                    live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                failures += 1
        elif live:
            live.pop(pick.randrange(len(live)))
        if (limit is not None or give_up) and failures and step % 50 == 0:
            del live[: len(live) // 2]
        if empty and pick.random() < 0.003:
            torch.cuda.empty_cache()
    out["failures"] = failures
    return out


def full(leave: int, seed: int) -> dict[str, Any]:
    """`fuzz` on a device whose memory somebody else holds but for `leave` bytes: the driver itself refuses."""
    import ctypes

    import torch

    before, _ = torch.cuda.mem_get_info()
    torch.cuda.Stream()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    address = ctypes.c_uint64()
    code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(free - leave))
    capacity, _ = torch.cuda.mem_get_info()
    made = {"capacity": capacity, "code": code, "streams": before - free}
    result = fuzz(seed=seed, give_up=True)
    torch.cuda.empty_cache()
    return {**result, **made, "left": torch.cuda.mem_get_info()[0]}


def vectors() -> dict[str, Any]:
    """Each request alone on an empty cache."""
    import torch

    rows = []
    for size in VECTORS:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        after = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        rows.append([size, *(after[name] - before.get(name, 0) for name in names)])
        del block
    return {"vectors": rows}


def pinned() -> dict[str, Any]:
    """Pinned host memory: blocks of many sizes, freed and asked for again."""
    import torch

    torch.empty(1, device="cuda")
    pick = random.Random(5)
    live: dict[int, Any] = {}
    rows = []
    for step in range(300):
        if pick.random() < 0.6:
            size = int(2 ** pick.uniform(0, 25))
            live[step] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            row: list[Any] = ["a", step, size]
        elif live:
            id = pick.choice(list(live))
            del live[id]
            row = ["f", id, 0]
        else:
            continue
        stats = torch.cuda.host_memory_stats()
        rows.append([*row, *(stats.get(f"{name}.current", -1) for name in HOST_STATS)])
    return {"rows": rows, "host_stats": dict(torch.cuda.host_memory_stats())}


# -- cases -----------------------------------------------------------------------------------------------------------

GROWING = (8, 24, 16, 40, 32)


def resnet_growing() -> dict[str, Any]:
    return image_steps("resnet50", GROWING)


def gpt2_growing() -> dict[str, Any]:
    return text_steps((2, 6, 4, 8))


CASES: dict[str, tuple[str, Any]] = {
    "resnet50": ("", lambda: image_steps("resnet50", (32, 32, 32))),
    "resnet50-expandable": (EXPANDABLE, lambda: image_steps("resnet50", (32, 32, 32))),
    "gpt2": ("", lambda: text_steps((8, 8, 8))),
    "gpt2-expandable": (EXPANDABLE, lambda: text_steps((8, 8, 8))),
    "gpt2-amp": ("", lambda: text_steps((8, 8, 8), amp=True)),
    "resnet50-amp": ("", lambda: image_steps("resnet50", (64, 64, 64), amp=True)),
    "convnext": ("", lambda: image_steps("convnext_tiny", (32, 32, 32))),
    "convnext-expandable": (EXPANDABLE, lambda: image_steps("convnext_tiny", (32, 32, 32))),
    "resnet50-growing": ("", resnet_growing),
    "gpt2-growing": ("", gpt2_growing),
    "gpt2-growing-expandable": (EXPANDABLE, gpt2_growing),
    "resnet50-split": ("max_split_size_mb:64", resnet_growing),
    "gpt2-divisions": ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", gpt2_growing),
    "gpt2-divisions-4": ("roundup_power2_divisions:4", gpt2_growing),
    "gpt2-segment": ("large_segment_size_mb:32", gpt2_growing),
    "streams": ("", streams),
    "streams-expandable": (EXPANDABLE, streams),
    "fuzz": ("", fuzz),
    "fuzz-empty": ("", lambda: fuzz(empty=True, seed=2)),
    "fuzz-expandable": (EXPANDABLE, lambda: fuzz(empty=True, seed=3)),
    "fuzz-limit": ("", lambda: fuzz(limit=1400 * MiB, seed=4)),
    "fuzz-limit-expandable": (EXPANDABLE, lambda: fuzz(limit=1400 * MiB, seed=5)),
    "fuzz-split": ("max_split_size_mb:40", lambda: fuzz(seed=6)),
    "fuzz-split-limit": ("max_split_size_mb:40", lambda: fuzz(limit=1600 * MiB, seed=7)),
    "fuzz-collect": ("garbage_collection_threshold:0.6", lambda: fuzz(limit=2400 * MiB, seed=8)),
    "fuzz-divisions": ("roundup_power2_divisions:[1:2,8:4,>:8]", lambda: fuzz(seed=9)),
    "unseen-vgg16": ("", lambda: image_steps("vgg16", (16, 24, 16))),
    "unseen-mobilenet": ("", lambda: image_steps("mobilenet_v2", (48, 64, 32), amp=True)),
    "unseen-vit": ("", lambda: image_steps("vit_b_16", (24, 32, 24))),
    "unseen-gpt2": ("", lambda: text_steps((3, 5, 4), length=768)),
    "unseen-gpt2-amp": ("", lambda: text_steps((6, 10, 8), amp=True, length=384)),
    "unseen-fuzz-1": ("", lambda: fuzz(seed=101)),
    "unseen-fuzz-2": ("", lambda: fuzz(seed=102, empty=True)),
    "unseen-fuzz-divisions": ("roundup_power2_divisions:[2:4,16:2,64:8,>:4]", lambda: fuzz(seed=103)),
    "full": ("", lambda: full(1400 * MiB, 10)),
    "full-expandable": (EXPANDABLE, lambda: full(1400 * MiB, 11)),
    "vectors": ("", vectors),
    "vectors-expandable": (EXPANDABLE, vectors),
    "pinned": ("", pinned),
}
"""Name -> allocator settings, work."""

ALONE = ("full", "full-expandable")
"""Cases that fill the device, so that no other may run beside them."""

LIMITED = {
    f"{name}-limit-{percent}{'-expandable' if settings else ''}": (name, settings, work, percent / 100)
    for name, work, percents in (
        ("resnet50-growing", resnet_growing, (60, 72, 80, 88)),
        ("gpt2-growing", gpt2_growing, (88, 92, 96)),
    )
    for settings in ("", EXPANDABLE)
    for percent in percents
}
"""Name -> case whose peak the limit is taken from, settings, work, share of that peak."""


def steps(entries: list[dict[str, Any]]) -> list[int]:
    """Addresses from the lowest, in steps of 512 bytes; 0 for entries without one."""
    lowest = min((entry["addr"] for entry in entries if "addr" in entry), default=0)
    return [(entry["addr"] - lowest) // 512 if "addr" in entry else 0 for entry in entries]


def record(name: str, file: Path, peak: int) -> None:
    """Run one case in this process and write its recording."""
    import torch

    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=5_000_000)
    if name in CASES:
        settings, work = CASES[name]
        result = work()
    else:
        _, settings, work, share = LIMITED[name]
        result = limited(share, work, peak)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    entries = snapshot["device_traces"][0]
    kept = [entry for entry in entries if entry["action"] in ACTIONS]
    queues = sorted({entry["stream"] for entry in kept})
    names = ("requested", "allocated", "active", "reserved")
    recording = {
        "case": name,
        "settings": settings,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "total": torch.cuda.get_device_properties(0).total_memory,
        "date": time.strftime("%Y-%m-%d"),
        "peak": {key: stats[f"{key}_bytes.all.peak"] for key in names},
        "current": {key: stats[f"{key}_bytes.all.current"] for key in names},
        "retries": stats["num_alloc_retries"],
        "out_of_memories": stats["num_ooms"],
        "other_actions": sorted({entry["action"] for entry in entries} - set(ACTIONS)),
        "result": result,
        "action": "".join(ACTIONS[entry["action"]] for entry in kept),
        "address": steps(kept),
        "bytes": [entry["size"] for entry in kept],
        "stream": [queues.index(entry["stream"]) for entry in kept],
        "device_free": [entry.get("device_free") for entry in kept if entry["action"] == "oom"],
        "divisions": list(snapshot.get("allocator_settings", {}).get("roundup_power2_divisions", {}).values()),
        "segments": len(snapshot["segments"]),
    }
    file.write_bytes(gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0))


def run_case(name: str, folder: Path, peak: int = 0) -> str:
    settings = CASES[name][0] if name in CASES else LIMITED[name][1]
    environ = dict(os.environ, PYTORCH_ALLOC_CONF=settings) if settings else dict(os.environ)
    file = folder / f"{name}.json.gz"
    command = [sys.executable, __file__, "--case", name, "--peak", str(peak), str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        return f"{name}: failed: {done.stderr.strip().splitlines()[-1:]}"
    got = json.loads(gzip.decompress(file.read_bytes()))
    size = file.stat().st_size
    return f"{name}: {len(got['action'])} entries, peak {got['peak']}, retries {got['retries']}, {size} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case")
    parser.add_argument("--peak", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", help="comma-separated cases")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.case:
        record(args.case, args.out, args.peak)
        return
    only = set(args.only.split(",")) if args.only else {*CASES, *LIMITED}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        home = Path(folder)
        for name in ALONE:
            if name in only:
                print(run_case(name, home), flush=True)
        together = [name for name in CASES if name in only and name not in ALONE]
        for line in pool.map(lambda name: run_case(name, home), together):
            print(line, flush=True)

        def after(name: str) -> str:
            source = json.loads(gzip.decompress((home / f"{LIMITED[name][0]}.json.gz").read_bytes()))
            return run_case(name, home, source["peak"]["reserved"])

        for line in pool.map(after, [name for name in LIMITED if name in only]):
            print(line, flush=True)
        with tarfile.open(args.out, "w") as tar:
            tar.add(home, arcname="recordings")


if __name__ == "__main__":
    main()
