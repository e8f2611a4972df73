"""Work on rows and columns of host memory through a card: Gram, softmax entropy, rows made unit and multiplied, argmax, std.

    python benchmarks/arrays_rows_h200.py [--out FILE.json] [--sizes 16,88] [--device-gib 8] [--scale 1]

Each work runs on rows of 512 float32 numbers that lie in plain and, at the first size, in page-locked memory. What binds is the
longest of the link (page-locked copies in large pieces), the processor's copies into page-locked memory where the array is
plain, with those out of it where the result is too, and the operations at the card's float32 rate, all measured in this run.
`reached` is that floor over the seconds of the faster of two calls. The driver is asked for the card's free memory meanwhile.
Results are compared with float64, on the card.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from card_ceilings import Watch, copies, products, staging, staging_now

import outsize
import outsize.array as xp
from outsize.engine.pinned import lock_array, lock_memory

GIB = 1 << 30
LENGTH = 512
NAMES = (
    "gram",
    "unit rows' gram",
    "unit rows by 64 directions",
    "softmax entropy of rows",
    "argmax of rows",
    "std of columns",
)


def fill(array: np.ndarray, block: np.ndarray) -> None:
    """Normal numbers made on the card: one block, again and again, by all processors."""
    flat = torch.from_numpy(block)
    for low in range(0, len(block), 1 << 18):
        part = flat[low : low + (1 << 18)]
        part.copy_(torch.randn(part.shape, device="cuda"))
    pieces = [slice(low, low + len(block)) for low in range(0, len(array), len(block))]
    with ThreadPoolExecutor(16) as crew:
        list(crew.map(lambda piece: np.copyto(array[piece], block[: len(array[piece])]), pieces))


def works(x, directions):
    """Name -> (node, operations, bytes that come back)."""
    rows, length = x.shape
    unit = x / xp.sqrt(xp.sum(x * x, axis=1, keepdims=True))
    shifted = xp.exp(x - xp.max(x, axis=1, keepdims=True))
    share = shifted / xp.sum(shifted, axis=1, keepdims=True)
    nodes = (
        x.T @ x, unit.T @ unit, unit @ directions,
        -xp.sum(share * xp.log(share), axis=1), xp.argmax(x, axis=1), xp.std(x, axis=0),
    )  # fmt: skip
    products = 2 * rows * length
    operations = (products * length, products * length, products * 64, 0, 0, 0)
    back = (0, 0, rows * 64 * 4, rows * 4, rows * 8, 0)
    return {name: made for name, *made in zip(NAMES, nodes, operations, back, strict=True)}


def reference(name, block, directions, times):
    """The answer on `times` copies of the block: of the whole for sums over rows, of the first rows for the others."""
    wide = torch.from_numpy(block if name in ("gram", "unit rows' gram", "std of columns") else block[:4096]).cuda()
    if name == "std of columns":
        return wide.double().std(dim=0, correction=0)
    if name in ("gram", "unit rows' gram"):
        total = torch.zeros(LENGTH, LENGTH, dtype=torch.float64, device="cuda")
        for part in wide.split(1 << 19):
            part = part.double()
            total += (part if name == "gram" else (part := part / part.norm(dim=1, keepdim=True))).T @ part
        return total * times
    wide = wide.double()
    if name == "argmax of rows":
        return wide.argmax(dim=1)
    if name == "softmax entropy of rows":
        share = wide.softmax(dim=1)
        return -(share * share.log()).sum(dim=1)
    return (wide / wide.norm(dim=1, keepdim=True)) @ torch.from_numpy(directions).cuda().double()


def differ(found, wanted):
    """Relative error in the Frobenius norm; of whole numbers, the part that differs."""
    found = torch.from_numpy(np.asarray(found[: len(wanted)])).cuda()
    if not found.is_floating_point():
        return float((found != wanted).double().mean())
    return float((found.double() - wanted).norm() / wanted.norm())


def run(label, x, block, directions, budget, levels, rows, array=None, small=None):
    """All works on one array, twice each; a row each."""
    for name, (node, operations, back) in works(x, directions).items():
        try:
            wanted = reference(name, block, directions, x.shape[0] / len(block))
            out = np.empty(node.shape, node.dtype) if back > GIB else None
            best, taken = float("inf"), 0
            for _ in range(2):
                there = staging_now(array, small, back=out) if array is not None else None
                with outsize.budget(host="8GiB", device=budget), Watch() as watch:
                    found = node.compute(device="cuda", **({"out": out} if out is not None else {}))
                floor = max(x.nbytes / levels["link_in"] / 1e9, operations / levels["fp32_tflops"] / 1e12)
                binds = "link" if floor > operations / levels["fp32_tflops"] / 1e12 else "arithmetic"
                copied = x.nbytes + (out.nbytes if out is not None else 0)
                if there is not None and copied / there / 1e9 > floor:
                    floor, binds = copied / there / 1e9, "copies of plain memory"
                if watch.seconds - floor < best:
                    best, kept = watch.seconds - floor, (watch.seconds, floor, binds)
                taken = max(taken, watch.taken)
            seconds, floor, binds = kept
            row = {
                "array": label, "work": name, "GiB": x.nbytes / GIB, "seconds": round(seconds, 3),
                "floor": round(floor, 3), "binds": binds, "reached": round(floor / seconds, 3),
                "differs": differ(found, wanted), "MiB taken": taken >> 20, "inside": taken <= budget,
            }  # fmt: skip
        except Exception as error:
            row = {"array": label, "work": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--sizes", default="16,88", help="GiB")
    parser.add_argument("--device-gib", type=float, default=8)
    parser.add_argument("--scale", type=int, default=1, help="sizes and budget are divided by it, to try the script")
    given = parser.parse_args()
    began = time.perf_counter()
    budget = int(given.device_gib * GIB) // given.scale
    sizes = [int(float(size) * GIB) // given.scale for size in given.sizes.split(",")]
    small = lock_memory(4 * GIB // given.scale)
    levels = {**copies(small.array, small.nbytes // 2), **staging(small.array, small.nbytes // 2),
              **products(16384 if given.scale == 1 else 2048)}  # fmt: skip
    print(json.dumps({"levels": levels, "card": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    lines = sizes[0] // 4 // LENGTH, sizes[-1] // 4 // LENGTH
    array = np.empty((max(lines), LENGTH), np.float32)
    block = np.empty(((GIB // given.scale) // 4 // LENGTH, LENGTH), np.float32)
    fill(array, block)
    directions = np.random.default_rng(1).standard_normal((LENGTH, 64)).astype(np.float32)
    print(json.dumps({"filled": round(time.perf_counter() - began, 1)}), flush=True)
    rows: list[dict] = []
    measure = functools.partial(run, block=block, directions=directions, budget=budget, levels=levels, rows=rows)
    x = outsize.open(array[: lines[0]])
    with outsize.budget(host="8GiB", device=budget):  # kernels are loaded, rates are measured
        for node, *_ in works(x[: 1 << 16], directions).values():
            node.compute(device="cuda")
    measure("plain", x, array=array[: lines[0]], small=small.array)
    if len(sizes) > 1:
        measure("plain", outsize.open(array), array=array, small=small.array)
    locked = lock_array(array[: lines[0]])
    measure("page-locked" if locked.locked else "not page-locked after all", outsize.open(array[: lines[0]]))
    if given.out:
        pathlib.Path(given.out).write_text(json.dumps({"levels": levels, "rows": rows}, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
