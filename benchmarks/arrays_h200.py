"""Arrays through a card that is smaller than they are: products, reductions and chains against the measured ceilings.

    python benchmarks/arrays_h200.py --out results                 everything, about five minutes on an H200
    python benchmarks/arrays_h200.py --out results --scale 8       an eighth of every edge or size, to try it
    python benchmarks/arrays_h200.py --out results --parts peaks   single parts

Ceilings (link each way and both ways, staging copies, products inside the card, the disk read directly) are measured in
the same run. Peers of the product: a careful torch loop (a block of rows of C and A stays, panels of B stream, pinned
copies on streams) and square tiles as cuBLASXt cuts them, in turn with ours. Every run is watched by a thread that asks
the driver for the card's free memory. Results are written as they come: arrays_h200.json and arrays_h200.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from card_ceilings import (
    CLOCK,
    LAST,
    Watch,
    clocked,
    compiled,
    copies,
    direct_rate,
    products,
    staging,
    staging_now,
    sustained,
    write_file,
)
from card_checks import bad_input, equality
from card_tiles import tiles
from product_peers import square_tiles, torch_loop

import outsize
import outsize.array as xp
from outsize.array.device import cuda as device_cuda
from outsize.array.device import product_pass as device_contract
from outsize.array.device import torch_kernels
from outsize.array.run import results as array_work
from outsize.array.tuning import current, use
from outsize.engine.pinned import lock_array, lock_memory

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


def operands(arena, scale):
    """(matrices, the same opened, device budget)."""
    budget = (8 * GIB) // scale**2 + (0 if scale == 1 else 128 << 20)
    a, b, c = matrices(arena, 65536 // scale)
    fill(a, 1), fill(b, 2)
    return (a, b, c), (outsize.open(a), outsize.open(b)), budget


def product(arena, scale):
    """Ours and both peers in turn: a card that has grown warm is slower, for everybody."""
    (a, b, c), (x, y), budget = operands(arena, scale)
    edge = a.shape[0]
    with outsize.budget(host="16GiB", device=budget):
        (x[:4096, :4096] @ y[:4096, :4096]).compute(device="cuda")  # kernels are loaded, rates measured
        (x[:4096, :4096] @ y[:4096, :4096]).compute(device="cuda", tf32=True)
    peers = {"torch loop": lambda: torch_loop(a, b, c, budget),
             "square tiles 8192": lambda: square_tiles(a, b, c, min(8192, edge // 4))}  # fmt: skip
    for tf32 in STATE["kinds"]:
        for number, who in enumerate(("ours", "square tiles 8192", "torch loop", "ours", "square tiles 8192", "ours")):
            if who == "ours":
                our_product(x, y, (a, b, c), tf32, budget, attempt=number)
            else:
                peer_product(who, peers[who], edge, tf32, attempt=number)


def plain_product(arena, scale):
    """The same by us alone, all three matrices in memory that is not page-locked."""
    lying, (x, y), budget = operands(arena, scale)
    for tf32 in STATE["kinds"]:
        for attempt in range(2):
            our_product(x, y, lying, tf32, budget, memory="plain", attempt=attempt)


def our_product(x, y, matrices, tf32, budget, **said):
    """One product by us, against its roofline."""
    a, b, c = matrices
    edge = a.shape[0]
    flops, name = 2.0 * edge**3, "tf32" if tf32 else "fp32"
    found = RESULT["ceilings"]
    c[:: max(1, edge // 64)] = np.nan
    with outsize.budget(host="16GiB", device=budget), Watch() as watch:
        (x @ y).compute(device="cuda", tf32=tf32, out=c)
    plan = LAST["prepare"].plan
    link = next(level.amount for level in plan.steps[-1].levels if level.name == "link in") / found["link_in"] / 1e9
    shares = {}
    for kind in ("", "_in_a_burst"):
        arithmetic = flops / found[f"{name}_tflops{kind}"] / 1e12
        shares |= {f"share_of_rate{kind}": arithmetic / watch.seconds,
                   f"share_of_roofline{kind}": max(arithmetic, link) / watch.seconds}  # fmt: skip
    say("1 product", f"ours {name} {edge}", seconds=watch.seconds, **CLOCK, tflops=flops / watch.seconds / 1e12, **shares,
        error=check_product(a, b, c, tf32), taken_MiB=watch.taken >> 20, budget_MiB=budget >> 20,
        cut=plan.steps[-1].notes[-1], **said)  # fmt: skip
    return watch.seconds


def peer_product(who, work, edge, tf32, **said):
    """The same by somebody else."""
    name = "tf32" if tf32 else "fp32"
    with torch_kernels.precision(tf32), Watch() as watch:
        work()
    say("1 product", f"{who} {name} {edge}", seconds=watch.seconds, tflops=2.0 * edge**3 / watch.seconds / 1e12,
        taken_MiB=watch.taken >> 20, **said)  # fmt: skip
    torch.cuda.empty_cache()


# 2, 3, 4: reductions and chains


def chain_torch(x):
    return torch.sqrt(x * x + 1) - torch.abs(x) * 0.5


def chain(x):
    return xp.sqrt(x * x + 1) - abs(x) * 0.5


WORK = {"mean": lambda x: x.mean(), "variance": lambda x: x.var(), "chain": lambda x: chain(x).sum()}


def reductions(
    part, x, size, ceiling, budget, reference, count, times=2, wanted=("mean", "variance", "chain"), now=None
):
    """Each reduction, against a ceiling in GB/s; `now` measures a second one, right before and right after each."""
    want = {"mean": reference[0] / count, "variance": reference[1] / count - (reference[0] / count) ** 2,
            "chain": reference[2]}  # fmt: skip
    for name in wanted:
        node = WORK[name](x)
        for attempt in range(times):
            beside = {} if now is None else {"staging_before": now()}
            with outsize.budget(host="8GiB", device=budget), Watch() as watch:
                got = float(node.compute(device="cuda"))
            if now is not None:
                beside["staging_after"] = now()
                there = min(RESULT["ceilings"]["link_in"], max(beside.values()))
                beside["share_of_what_was_there"] = size / watch.seconds / 1e9 / there
            error = abs(got - want[name]) / max(abs(want[name]), 1e-4)
            say(part, name, seconds=watch.seconds, GBps=size / watch.seconds / 1e9,
                share=size / watch.seconds / 1e9 / ceiling, error=error, taken_MiB=watch.taken >> 20,
                budget_MiB=budget >> 20, attempt=attempt, **beside)  # fmt: skip


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


def disk(arena, scale, folder):
    """Part 3."""
    array, _, budget, _ = prepare(arena, scale)
    rows = min(array.shape[0], int(STATE["file"] * 1e9) // scale // (4 * 16384))
    path = pathlib.Path(folder) / "forty.npy"
    began = time.perf_counter()
    write_file(path, array[:rows])
    STATE.update(path=path, rows=rows)
    say("3 disk", "file written", GB=rows * 65536 / 1e9, seconds=time.perf_counter() - began)
    from_disk(path, array, rows, scale, budget)


def fill_plain(array, block):
    """One block of normal numbers, made on the card, again and again; the reference sums."""
    once = np.zeros(3)
    fill(block, 3, once)
    times = array.nbytes // block.nbytes
    pieces = array.reshape(times, -1)
    with ThreadPoolExecutor(16) as workers:
        list(workers.map(lambda i: np.copyto(pieces[i], block.reshape(-1)), range(times)))
    return once * times


def plain(arena, scale):
    """Part 2, memory that is not page-locked."""
    budget, ceiling = 2 * GIB, RESULT["ceilings"]
    array = arena.view(np.float32).reshape(-1, 16384)
    began = time.perf_counter()
    reference = fill_plain(array, STATE["small"][: min(GIB, array.nbytes)].view(np.float32).reshape(-1, 16384))
    say("2 plain", "filled", GiB=array.nbytes / GIB, seconds=time.perf_counter() - began)
    x, bound = outsize.open(array), min(ceiling["link_in"], ceiling["staging"])
    with outsize.budget(host="8GiB", device=budget):
        for work in WORK.values():
            work(x[:16384]).compute(device="cuda")
    say("2 plain", "copies of this array alone, before", **sustained(array, STATE["small"]))
    for way in STATE["ways"]:
        tuning = current()
        if way:
            threads, piece = (int(number) for number in way.split("x"))
            tuning = dataclasses.replace(tuning, stage_threads=threads, stage_piece=piece << 20)
        with use(tuning):
            reductions(f"2 plain {way}".strip(), x, array.nbytes, bound, budget, reference, array.size,
                       now=lambda: staging_now(array, STATE["small"]))  # fmt: skip
    with busy(STATE["beside"]):
        if STATE["beside"]:
            reductions(f"2 plain beside {STATE['beside']} busy processes", x, array.nbytes, bound, budget, reference, array.size,
                       now=lambda: staging_now(array, STATE["small"]))  # fmt: skip
    say("2 plain", "copies of this array alone, after", **sustained(array, STATE["small"]))


@contextlib.contextmanager
def busy(count):
    """So many processes that do nothing but keep a processor each."""
    code = "import numpy as np\na = np.ones(1 << 22)\nwhile True:\n    a *= 1.0\n"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        time.sleep(1 if count else 0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


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


# 5: peaks; 6 and 7 are in card_checks


def peaks(arena, scale):
    """At 512 MiB, and in a process whose share of the card is the budget."""
    array = arena[: (8 * GIB) // scale].view(np.float32).reshape(-1, 4096)
    fill(array, 5)
    x = outsize.open(array)
    budget = 512 << 20
    edge = 16384 // (1 if scale == 1 else 4)
    a = arena[: edge * edge * 4].view(np.float32).reshape(edge, edge)
    for name, node in (("mean", x.mean()), ("variance of columns", x.var(axis=0)), ("variance of rows", x.var(axis=1)),
                       ("least of columns", x.min(axis=0)), ("chain", chain(x).sum()),
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


def lock(arena):
    """Page-lock the large array where it lies."""
    began = time.perf_counter()
    STATE["locked"] = lock_array(arena)
    say("setup", "array locked where it lies", GiB=arena.nbytes / GIB, seconds=time.perf_counter() - began,
        done=STATE["locked"].locked)  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument(
        "--parts",
        default="ceilings,plain,plain_product,lock,product,pinned,disk,beyond,tiles,peaks,equality,bad,disk_product,compile",
        help="`plain` and `plain_product` come before `lock`, all others after it",
    )
    parser.add_argument("--kinds", default="tf32,fp32", help="products to make")
    parser.add_argument("--size", type=int, default=64, help="GiB of the large array")
    parser.add_argument("--file", type=float, default=40, help="GB of the file")
    parser.add_argument(
        "--ways", default="", help="of `plain`: staging threads and MiB of a piece, as 8x8,10x4; nothing: as it is"
    )
    parser.add_argument("--beside", type=int, default=0, help="`plain` once more, beside so many busy processes")
    parser.add_argument("--limit", type=float, default=420, help="seconds after which no further part is begun")
    args = parser.parse_args()
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    STATE["file"], STATE["ways"], STATE["beside"] = args.file, args.ways.split(","), args.beside
    STATE["kinds"] = tuple(kind == "tf32" for kind in args.kinds.split(","))
    began = time.perf_counter()
    RESULT.update(out=args.out, date=time.strftime("%Y-%m-%d"), card=torch.cuda.get_device_name(), torch=torch.__version__,
                  scale=args.scale, cores=len(os.sched_getaffinity(0)))  # fmt: skip
    torch.zeros(1, device="cuda")
    for owner, name in ((array_work, "prepare"), (device_cuda.TorchDevice, "open"), (device_cuda.TorchDevice, "close"),
                        (device_contract, "stream_product")):  # fmt: skip
        clocked(owner, name)
    small = lock_memory(8 * GIB // args.scale)
    STATE["small"] = small.array
    say("setup", "memory locked", GiB=small.nbytes / GIB, context_MiB=Watch._used() >> 20)
    arena = np.empty(args.size * GIB // args.scale, np.uint8)  # huge pages, as NumPy asks for them
    rates = device_cuda.TorchDevice(0).rates()
    say("setup", "rates that plans use", **{k: getattr(rates, k) / 1e9 for k in ("link_in", "link_out", "memory")},
        fp32=rates.flops["f"] / 1e12, tf32=rates.flops["tf32"] / 1e12)  # fmt: skip
    parts = {
        "ceilings": lambda: ceilings(small.array, args.scale), "lock": lambda: lock(arena),
        "product": lambda: product(arena, args.scale), "plain_product": lambda: plain_product(arena, args.scale),
        "peaks": lambda: peaks(arena, args.scale), "equality": lambda: equality(say),
        "bad": lambda: bad_input(say),
        "compile": lambda: say("compile", "chain of 5 operations on 256 MiB", said=compiled()),
        "disk_product": lambda: from_disk_product(arena, args.scale, args.folder),
        "pinned": lambda: pinned(arena, args.scale), "disk": lambda: disk(arena, args.scale, args.folder),
        "beyond": lambda: beyond(arena, args.scale), "plain": lambda: plain(arena, args.scale),
        "tiles": lambda: tiles(arena, args.scale, args.folder, say),
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
