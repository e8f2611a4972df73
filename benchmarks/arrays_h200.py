"""Arrays through a card that is smaller than they are: products, reductions and chains against the measured ceilings.

    python benchmarks/arrays_h200.py --out results                 everything, about five minutes on an H200
    python benchmarks/arrays_h200.py --out results --scale 8       an eighth of every edge or size, to try it
    python benchmarks/arrays_h200.py --out results --parts peaks   single parts

Ceilings (link each way and both ways, staging copies, products inside the card, the disk read directly) are measured in
the same run. Peers of the product: a careful torch loop (a block of rows of C and A stays, panels of B stream, pinned
copies on streams) and square tiles as cuBLASXt cuts them. Every run is watched by a thread that asks the driver for the
card's free memory. Results are written as they come: arrays_h200.json and arrays_h200.md.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from card_ceilings import CLOCK, LAST, Watch, clocked, compiled, copies, direct_rate, products, staging, write_file
from product_peers import square_tiles, torch_loop

import outsize
import outsize.array as xp
from outsize.array import work as array_work
from outsize.array.device import contract as device_contract
from outsize.array.device import cuda as device_cuda
from outsize.array.device import passes as device_passes
from outsize.array.device import pipeline as device_pipeline
from outsize.array.device import torch_kernels
from outsize.engine.pinned import lock_memory

GIB = 1 << 30
RESULT: dict = {"rows": []}


def say(part, what, **figures):
    """One row, on the screen and in the files."""
    row = {"part": part, "what": what, **figures}
    RESULT["rows"].append(row)
    print(json.dumps(row), flush=True)
    folder = pathlib.Path(RESULT["out"])
    (folder / "arrays_h200.json").write_text(json.dumps(RESULT, indent=1))
    lines = ["| part | what | figures |", "|---|---|---|"]
    for found in RESULT["rows"]:
        rest = "; ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()
                         if k not in ("part", "what"))  # fmt: skip
        lines.append(f"| {found['part']} | {found['what']} | {rest} |")
    (folder / "arrays_h200.md").write_text("\n".join(lines) + "\n")


# Ceilings


def ceilings(arena, scale):
    size = min(arena.nbytes // 2, (4 * GIB) // scale)
    found = {**copies(arena, size), **staging(arena, size), **products(16384 if scale == 1 else 4096)}
    torch.cuda.empty_cache()
    RESULT["ceilings"] = found
    say("ceilings", "GB/s and TFLOP/s", **found)


# 1: the product


def matrices(arena, edge):
    size = edge * edge * 4
    return [arena[i * size : (i + 1) * size].view(np.float32).reshape(edge, edge) for i in range(3)]


def fill(array, seed, reference=None):
    """Normal numbers, made on the card; sums of them and of their squares in float64 as a reference."""
    torch.manual_seed(seed)
    flat = torch.from_numpy(array.reshape(-1))
    sums = torch.zeros(3, dtype=torch.float64, device="cuda")
    step = 1 << 28
    for low in range(0, flat.numel(), step):
        block = torch.randn(min(step, flat.numel() - low), device="cuda")
        flat[low : low + step].copy_(block, non_blocking=True)
        if reference is not None:
            for piece in block.split(1 << 24):
                wide = piece.double()
                sums += torch.stack([wide.sum(), wide.square().sum(), chain_torch(piece).double().sum()])
    torch.cuda.synchronize()
    if reference is not None:
        reference += sums.cpu().numpy()


def check_product(a, b, c, tf32):
    """Relative error of a few rows against float64."""
    edge = a.shape[0]
    rows = np.linspace(0, edge - 1, 8).astype(int)
    left = torch.from_numpy(a[rows]).cuda().double()
    want = torch.zeros(len(rows), edge, dtype=torch.float64, device="cuda")
    for low in range(0, edge, 2048):
        panel = torch.from_numpy(b[low : low + 2048]).cuda()
        want += left[:, low : low + 2048] @ panel.double()
    got = torch.from_numpy(c[rows]).cuda().double()
    error = float((got - want).norm() / want.norm())
    torch.cuda.empty_cache()
    return error


def product(arena, scale):
    edge = 65536 // scale
    budget = (8 * GIB) // scale**2 + (0 if scale == 1 else 128 << 20)
    a, b, c = matrices(arena, edge)
    fill(a, 1), fill(b, 2)
    x, y = outsize.open(a), outsize.open(b)
    with outsize.budget(host="16GiB", device=budget):
        (x[:4096, :4096] @ y[:4096, :4096]).compute(device="cuda")  # kernels are loaded, rates measured
        (x[:4096, :4096] @ y[:4096, :4096]).compute(device="cuda", tf32=True)
    flops = 2.0 * edge**3
    for tf32 in STATE.get("kinds", (True, False)):
        name, ceiling = ("tf32", "tf32_tflops") if tf32 else ("fp32", "fp32_tflops")
        rate = RESULT["ceilings"][ceiling]
        with outsize.budget(host="16GiB", device=budget):
            arithmetic = flops / rate / 1e12
            for attempt in range(2 if tf32 else 1):
                c[:: max(1, edge // 64)] = np.nan
                with Watch() as watch:
                    (x @ y).compute(device="cuda", tf32=tf32, out=c)
                plan = LAST["make_plan"][1]
                link = next(level.amount for level in plan.steps[-1].levels if level.name == "link in")
                roof = max(arithmetic, link / RESULT["ceilings"]["link_in"] / 1e9)
                say("1 product", f"ours {name} {edge}", seconds=watch.seconds, **CLOCK, tflops=flops / watch.seconds / 1e12,
                    share_of_rate=arithmetic / watch.seconds, share_of_roofline=roof / watch.seconds,
                    error=check_product(a, b, c, tf32), taken_MiB=watch.taken >> 20, budget_MiB=budget >> 20,
                    cut=plan.steps[-1].notes[-1], attempt=attempt)  # fmt: skip
        peers = {"torch loop": lambda: torch_loop(a, b, c, budget),
                 "square tiles 8192": lambda: square_tiles(a, b, c, min(8192, edge // 4))}  # fmt: skip
        for peer, work in peers.items():
            with torch_kernels.precision(tf32), Watch() as watch:
                work()
            say("1 product", f"{peer} {name} {edge}", seconds=watch.seconds, tflops=flops / watch.seconds / 1e12,
                taken_MiB=watch.taken >> 20)  # fmt: skip
            torch.cuda.empty_cache()


# 2, 3, 4: reductions and chains


def chain_torch(x):
    return torch.sqrt(x * x + 1) - torch.abs(x) * 0.5


def chain(x):
    return xp.sqrt(x * x + 1) - abs(x) * 0.5


WORK = {"mean": lambda x: x.mean(), "variance": lambda x: x.var(), "chain": lambda x: chain(x).sum()}


def reductions(part, x, size, ceiling, budget, reference, count, times=2, wanted=("mean", "variance", "chain")):
    """Each reduction, against a ceiling in GB/s."""
    want = {"mean": reference[0] / count, "variance": reference[1] / count - (reference[0] / count) ** 2,
            "chain": reference[2]}  # fmt: skip
    for name in wanted:
        node = WORK[name](x)
        for attempt in range(times):
            with outsize.budget(host="8GiB", device=budget), Watch() as watch:
                got = float(node.compute(device="cuda"))
            error = abs(got - want[name]) / max(abs(want[name]), 1e-4)
            say(part, name, seconds=watch.seconds, GBps=size / watch.seconds / 1e9,
                share=size / watch.seconds / 1e9 / ceiling, error=error, taken_MiB=watch.taken >> 20,
                budget_MiB=budget >> 20, attempt=attempt)  # fmt: skip


STATE: dict = {}


def prepare(arena, scale):
    """The large array, its reference, and everything loaded that is loaded once."""
    if "reference" not in STATE:
        array = arena.view(np.float32).reshape(-1, 16384)
        STATE.update(array=array, x=outsize.open(array), budget=(2 * GIB), reference=np.zeros(3))
        fill(array, 3, STATE["reference"])
        with outsize.budget(host="8GiB", device=STATE["budget"]):
            for work in WORK.values():
                work(STATE["x"][:16384]).compute(device="cuda")
    return STATE["array"], STATE["x"], STATE["budget"], STATE["reference"]


def pinned(arena, scale):
    """Part 2, page-locked."""
    array, x, budget, reference = prepare(arena, scale)
    ceiling = RESULT["ceilings"]
    reductions("2 pinned", x, array.nbytes, ceiling["link_in"], budget, reference, array.size, times=1)
    quarter = array[: array.shape[0] // 4]
    target = array[array.shape[0] // 2 : array.shape[0] // 2 + quarter.shape[0]]
    node = chain(outsize.open(quarter))
    for attempt in range(2):
        with outsize.budget(host="8GiB", device=budget), Watch() as watch:
            node.compute(device="cuda", out=target)
        say("2 pinned", "chain written back", seconds=watch.seconds, GBps_each_way=quarter.nbytes / watch.seconds / 1e9,
            share_of_both_ways=2 * quarter.nbytes / watch.seconds / 1e9 / ceiling["link_both"],
            error=float(np.abs(target[:64] - chain_torch(torch.from_numpy(quarter[:64])).numpy()).max()),
            taken_MiB=watch.taken >> 20, budget_MiB=budget >> 20, attempt=attempt)  # fmt: skip
    STATE.pop("reference")


def plain_alone(arena, scale):
    """Part 2 from plain memory by itself: one block of normal numbers, copied until the array is full."""
    block = arena[:GIB].view(np.float32).reshape(-1, 16384)
    once = np.zeros(3)
    fill(block, 3, once)
    array = np.empty((64 // scale * block.shape[0], 16384), np.float32)
    with ThreadPoolExecutor(16) as crew:
        list(
            crew.map(
                lambda i: np.copyto(array[i * block.shape[0] : (i + 1) * block.shape[0]], block), range(64 // scale)
            )
        )
    STATE.update(array=array, x=outsize.open(array), budget=(2 * GIB), reference=once * (64 // scale))
    with outsize.budget(host="8GiB", device=STATE["budget"]):
        for work in WORK.values():
            work(STATE["x"][:16384]).compute(device="cuda")
    plain(None, arena, scale)


def disk(arena, scale, folder):
    """Part 3."""
    array, _, budget, _ = prepare(arena, scale)
    rows = min(array.shape[0], int(40e9) // scale // (4 * 16384))
    path = pathlib.Path(folder) / "forty.npy"
    began = time.perf_counter()
    write_file(path, array[:rows])
    STATE.update(path=path, rows=rows)
    say("3 disk", "file written", GB=rows * 65536 / 1e9, seconds=time.perf_counter() - began)
    from_disk(path, array, rows, scale, budget)


def plain(memory, arena, scale):
    """Part 2, the same memory unlocked."""
    array, x, budget, reference = prepare(arena, scale)
    if memory is not None:
        memory.close()
    ceiling = RESULT["ceilings"]
    bound = min(ceiling["link_in"], ceiling["staging"])
    usual = device_passes._COPIERS, device_pipeline.PIECE
    rates = {}
    for workers, piece in ((8, 4), (12, 4), (8, 8), (10, 4), (8, 2)):
        device_passes._COPIERS, device_pipeline.PIECE = workers, piece << 20
        with outsize.budget(host="8GiB", device=budget), Watch() as watch:
            x.mean().compute(device="cuda")
        rates[workers, piece] = array.nbytes / watch.seconds / 1e9
        say("2 plain", f"mean, {workers} threads, pieces of {piece} MiB", GBps=rates[workers, piece],
            share=rates[workers, piece] / bound, usual=usual == (workers, piece << 20))  # fmt: skip
    workers, piece = max(rates, key=rates.get)
    device_passes._COPIERS, device_pipeline.PIECE = workers, piece << 20
    reductions(f"2 plain, {workers} x {piece} MiB", x, array.nbytes, bound, budget, reference, array.size)
    device_passes._COPIERS, device_pipeline.PIECE = usual


def from_disk(path, array, rows, scale, budget):
    part = disk_reference(array, rows)
    STATE["disk_sum"] = part[0]
    size = rows * 65536
    rate = direct_rate(path, size)
    say("3 disk", "read directly", GBps=rate)
    RESULT["ceilings"]["disk"] = rate
    reductions("3 disk", outsize.open(path), size, rate, budget, part, rows * 16384, times=1)
    half = size // 2
    say("3 disk", "half of it read directly, once more", GBps=direct_rate(path, half))


def disk_reference(array, rows):
    """Sums over the rows that went to disk, on the card."""
    part = np.zeros(3)
    for low in range(0, rows, 16384):
        for piece in torch.from_numpy(array[low : min(rows, low + 16384)]).cuda().split(1024):
            wide = piece.double()
            part += torch.stack([wide.sum(), wide.square().sum(), chain_torch(piece).double().sum()]).cpu().numpy()
    return part


def beyond(arena, scale):
    """Part 4: an array larger than the card: RAM, disk and numbers that are made as they are needed."""
    array, x, budget, reference = prepare(arena, scale)
    path, rows = STATE["path"], STATE["rows"]
    total = torch.cuda.get_device_properties(0).total_memory // scale
    lacking = max(GIB // 4, total + GIB // scale - array.nbytes - rows * 65536)
    made = -(-lacking // 65536)
    line = xp.broadcast_to((xp.arange(16384, dtype=np.float64) / 16384).astype(np.float32), (made, 16384))
    whole = xp.concat([x, outsize.open(path), line], axis=0)
    with outsize.budget(host="8GiB", device=budget), Watch() as watch:
        got = float(whole.sum().compute(device="cuda"))
    want = reference[0] + STATE["disk_sum"]
    want += made * float(np.sum((np.arange(16384) / 16384).astype(np.float32), dtype=np.float64))
    say("4 beyond", f"sum of {whole.nbytes / GIB:.1f} GiB on a card of {total / GIB:.1f}", seconds=watch.seconds,
        GBps=whole.nbytes / watch.seconds / 1e9, error=abs(got - want) / abs(want), taken_MiB=watch.taken >> 20,
        budget_MiB=budget >> 20)  # fmt: skip
    path.unlink()


# 5, 6, 7: peaks, equality, bad input


def peaks(arena, scale):
    """At 512 MiB, and in a process whose share of the card is the budget."""
    array = arena[: (8 * GIB) // scale].view(np.float32).reshape(-1, 4096)
    fill(array, 5)
    x = outsize.open(array)
    budget = 512 << 20
    edge = 16384 // (1 if scale == 1 else 4)
    a = arena[: edge * edge * 4].view(np.float32).reshape(edge, edge)
    for name, node in (("mean", x.mean()), ("variance", x.var(axis=0)), ("chain", chain(x).sum()),
                       ("product", outsize.open(a) @ outsize.open(a))):  # fmt: skip
        with outsize.budget(host="16GiB", device=budget), Watch() as watch:
            node.compute(device="cuda")
        say("5 peaks", f"{name} at 512 MiB", taken_MiB=watch.taken / (1 << 20), inside=watch.taken <= budget,
            seconds=watch.seconds)  # fmt: skip
    for size in ("512MiB", "2GiB"):
        code = (
            "import sys, numpy as np, torch, outsize, outsize.array as xp\n"
            "from outsize.core.units import parse_bytes\n"
            "b = parse_bytes(sys.argv[1])\n"
            "total = torch.cuda.get_device_properties(0).total_memory\n"
            "torch.cuda.set_per_process_memory_fraction(b / total)\n"
            "a = np.random.default_rng(0).normal(size=(8192, 8192)).astype('f4')\n"
            "x = outsize.open(a)\n"
            "with outsize.budget(host='8GiB', device=b):\n"
            "    c = (x @ x).compute(device='cuda')\n"
            "    v = x.var(axis=0).compute(device='cuda')\n"
            "    z = ((x - x.mean(axis=0)) / x.std(axis=0)).compute(device='cuda')\n"
            "    h = (xp.tanh(x) * 2 + x).sum().compute(device='cuda')\n"
            "    o = x.astype('f8').sum(axis=1).compute(device='cuda')\n"
            "assert np.allclose(v, a.var(axis=0), rtol=1e-4)\n"
            "assert np.allclose(c[:8], a[:8].astype('f8') @ a, rtol=1e-3, atol=1e-2)\n"
            "assert np.allclose(z, (a - a.mean(axis=0)) / a.std(axis=0), rtol=1e-3, atol=1e-4)\n"
            "print('reserved at most', torch.cuda.max_memory_reserved(), 'of', b)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, size], capture_output=True, text=True, timeout=120)
        say("5 peaks", f"memory fraction set to {size}", ok=done.returncode == 0,
            said=(done.stdout + done.stderr[-1500:]).strip())  # fmt: skip


def equality(arena, scale):
    """The card's results against the processor's."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-1000, 1000, size=(3000, 2000)).astype(np.int32)
    real = rng.normal(size=(3000, 2000)).astype(np.float32)
    x, y = outsize.open(whole), outsize.open(real)
    rows = {
        "int chain": (x * 3 + x) & 255, "int sum": x.sum(axis=0), "int min": x.min(axis=1), "count": (x * 2 > 1).sum(),
        "uint8": x.astype("u1").sum(axis=0), "any": (x > 998).any(axis=1), "product": y @ y.T,
        "float chain": xp.tanh(y) * 2 + xp.exp(-y * y), "float mean": y.mean(axis=0), "float std": y.std(axis=1),
        "standardised": (y - y.mean(axis=0)) / y.std(axis=0), "remainder of integers": x % 7,
    }  # fmt: skip
    with outsize.budget(host="4GiB", device="256MiB"):
        for name, node in rows.items():
            try:
                here, there = node.compute(), node.compute(device="cuda")
            except outsize.InputError as error:
                say("6 equality", name, refused=str(error))
                continue
            if here.dtype.kind in "biu":
                say("6 equality", name, bitwise=bool(np.array_equal(here, there)), dtype=str(here.dtype))
            else:
                worst = float(np.max(np.abs(here - there)) / np.max(np.abs(here)))
                say("6 equality", name, largest_difference=worst, dtype=str(here.dtype))
        try:
            big = outsize.open(rng.normal(size=(2000, 1500)))
            a = big.sum(axis=0).compute(device="cupy")
            say("6 equality", "cupy", largest_difference=float(np.max(np.abs(a - big.sum(axis=0).compute()))),
                product=float(np.max(np.abs((big @ big.T).compute(device="cupy") - (big @ big.T).compute()))))  # fmt: skip
        except Exception as error:
            say("6 equality", "cupy", failed=f"{type(error).__name__}: {error}")


def bad_input(arena, scale):
    x = outsize.open(np.ones((4096, 4096), np.float32))
    attempts = {
        "device out of range": lambda: (x * 2).compute(device="cuda:7"),
        "no such device": lambda: (x * 2).compute(device="tpu"),
        "budget too small": lambda: _with("16MiB", lambda: (x @ x).compute(device="cuda")),
        "no rule": lambda: xp.sort(x).compute(device="cuda"),
    }
    for name, attempt in attempts.items():
        say("7 bad input", name, said=_said(attempt))
    code = (
        "import torch, sys, time\nfree, total = torch.cuda.mem_get_info()\n"
        "t = torch.empty(free - (90 << 20), dtype=torch.uint8, device='cuda')\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    hog = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    hog.stdout.readline()
    try:
        for name in ("cuda", "auto"):
            say("7 bad input", f"card taken, budget 8 GiB, {name}",
                said=_said(lambda name=name: _with("8GiB", lambda: (x @ x).compute(device=name))))  # fmt: skip
        with outsize.budget(device="8GiB"):
            say("7 bad input", "card taken, sum", said=_said(lambda: x.sum().compute(device="cuda")))
    finally:
        hog.kill()
        hog.wait()


def _with(budget, work):
    with outsize.budget(host="4GiB", device=budget):
        return work()


def _said(work):
    import warnings

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            work()
        except outsize.OutsizeError as error:
            return f"{type(error).__name__}: {error}"
        return "done" + "".join(f"; warned: {w.message}" for w in heard)


def from_disk_product(arena, scale, folder):
    """Two levels: A and B on disk, C to disk, RAM for panels, the card for blocks."""
    edge = 32768 // scale
    a = arena[: edge * edge * 4].view(np.float32).reshape(edge, edge)
    fill(a, 7)
    paths = [pathlib.Path(folder) / name for name in ("a.npy", "b.npy", "c.npy")]
    write_file(paths[0], a), write_file(paths[1], a)
    x, y = outsize.open(paths[0]), outsize.open(paths[1])
    host, device = (12 * GIB) // scale**2 + (1 << 29), (4 * GIB) // scale**2 + (1 << 28)
    with outsize.budget(host=host, device=device):
        plan = (x @ y).plan(device="cuda")
        with Watch() as watch:
            saved = (x @ y).save(paths[2], device="cuda", progress=False)
    levels = {f"{level.name} s": level.seconds for level in plan.steps[-1].levels}
    c = saved[:8].compute()
    want = (torch.from_numpy(a[:8]).cuda().double() @ torch.from_numpy(a).cuda().double()).cpu().numpy()
    torch.cuda.empty_cache()
    say("1 from disk", f"fp32 {edge}", seconds=watch.seconds, tflops=2.0 * edge**3 / watch.seconds / 1e12,
        read_GB=plan.read / 1e9, binds=plan.steps[-1].binds, error=float(np.abs(c - want).max() / np.abs(want).max()),
        taken_MiB=watch.taken >> 20, **levels)  # fmt: skip
    for path in paths:
        path.unlink()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument(
        "--parts", default="ceilings,product,pinned,disk,beyond,plain,peaks,equality,bad,disk_product,compile"
    )
    parser.add_argument("--kinds", default="tf32,fp32", help="products to make")
    parser.add_argument("--lock", type=int, default=64, help="GiB of page-locked memory; plain_alone needs 8")
    parser.add_argument("--limit", type=float, default=420, help="seconds after which no further part is begun")
    args = parser.parse_args()
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    STATE["kinds"] = tuple(kind == "tf32" for kind in args.kinds.split(","))
    began = time.perf_counter()
    RESULT.update(out=args.out, date=time.strftime("%Y-%m-%d"), card=torch.cuda.get_device_name(), torch=torch.__version__,
                  scale=args.scale, cores=len(os.sched_getaffinity(0)))  # fmt: skip
    torch.zeros(1, device="cuda")
    for owner, name in ((array_work, "make_plan"), (device_cuda.TorchDevice, "open"), (device_cuda.TorchDevice, "close"),
                        (device_contract, "stream_product")):  # fmt: skip
        clocked(owner, name)
    started = time.perf_counter()
    memory = lock_memory(args.lock * GIB // args.scale)
    say("setup", "memory locked", GiB=memory.nbytes / GIB, seconds=time.perf_counter() - started,
        context_MiB=Watch._used() >> 20)  # fmt: skip
    rates = device_cuda.TorchDevice(0).rates()
    say("setup", "rates that plans use", **{k: getattr(rates, k) / 1e9 for k in ("link_in", "link_out", "memory")},
        fp32=rates.flops["f"] / 1e12, tf32=rates.flops["tf32"] / 1e12)  # fmt: skip
    arena = memory.array
    parts = {
        "ceilings": lambda: ceilings(arena, args.scale), "product": lambda: product(arena, args.scale),
        "peaks": lambda: peaks(arena, args.scale), "equality": lambda: equality(arena, args.scale),
        "bad": lambda: bad_input(arena, args.scale),
        "compile": lambda: say("compile", "chain of 5 operations on 256 MiB", said=compiled()),
        "disk_product": lambda: from_disk_product(arena, args.scale, args.folder),
        "pinned": lambda: pinned(arena, args.scale), "disk": lambda: disk(arena, args.scale, args.folder),
        "plain_alone": lambda: plain_alone(arena, args.scale), "beyond": lambda: beyond(arena, args.scale),
        "plain": lambda: plain(memory, arena, args.scale),
    }  # fmt: skip
    for name in args.parts.split(","):
        if time.perf_counter() - began > args.limit:
            say(name, "left out", seconds=time.perf_counter() - began)
            continue
        begun = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:
            import traceback

            say(name, "failed", error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-1500:])
        say(name, "part took", seconds=time.perf_counter() - begun, since_start=time.perf_counter() - began)


if __name__ == "__main__":
    main()
