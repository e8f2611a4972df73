"""Tiles of a large array as torch tensors on the card, for a user's own kernels: right, inside the budget, and how fast.

Used by `arrays_h200.py`. Read from page-locked memory, plain memory and a file; written back into memory and a file; and
handed to other libraries by DLPack.
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from card_ceilings import Watch

import outsize

GIB = 1 << 30
BUDGET = 2 * GIB


def tiles(arena, scale, folder, say):
    """All of it."""
    size = 8 * GIB // scale
    locked = arena[:size].view(np.float32).reshape(-1, 8192)
    rng = np.random.default_rng(0)
    line = rng.normal(size=8192).astype(np.float32)
    locked[:] = line
    want = float(np.square(line.astype(np.float64)).sum()) * locked.shape[0]
    plain = np.empty((locked.shape[0] // 4, 8192), np.float32)
    plain[:] = line
    path = pathlib.Path(folder) / "tiles.npy"
    np.save(path, plain)
    sources = {"page-locked": (outsize.open(locked), want), "plain": (outsize.open(plain), want / 4),
               "a chain over plain": (outsize.open(plain) * 2, want), "file": (outsize.open(path), want / 4)}  # fmt: skip
    for name, (x, wanted) in sources.items():
        read(name, x, wanted, say)
    written(say, path)
    share(say, locked)
    path.unlink()


def read(name, x, wanted, say):
    """The sum of squares by a user's own kernel."""
    with outsize.budget(host="8GiB", device=BUDGET), Watch() as watch:
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        walk = x.tiles(device="cuda", prefetch=2)
        for tile in walk:
            total += tile.square().sum(dtype=torch.float64)
        got, kind = float(total), str(tile.device)
        del tile
    say("tiles", f"read from {name}", GBps=x.nbytes / watch.seconds / 1e9, error=abs(got - wanted) / wanted, tiles=len(walk),
        tile=str(walk.grid.box), where=kind, taken_MiB=watch.taken >> 20, inside=watch.taken <= BUDGET)  # fmt: skip


def written(say, path):
    """Tiles filled, then changed in place, in memory and in a file."""
    for name, place in (("memory", None), ("file", path)):
        rows = 65536 if torch.cuda.get_device_properties(0).total_memory > 64 * GIB else 512
        with outsize.budget(host="12GiB", device=BUDGET), Watch() as watch:
            y = outsize.empty((rows, 8192), "float32", place)
            walk = y.tiles(device="cuda", prefetch=2, write=True)
            for tile in walk:
                low, high = walk.region[0]
                tile.copy_(torch.arange(low, high, device="cuda", dtype=torch.float32)[:, None].expand(-1, 8192))
            for tile in y.tiles(device="cuda", prefetch=2, write=True):
                tile.mul_(2).add_(1)
            del tile
        there = y[:: rows // 64, ::1024].compute()
        here = (2 * np.arange(rows, dtype=np.float32) + 1)[:: rows // 64, None]
        say("tiles", f"written to {name}, then changed there", GBps=4 * y.nbytes / watch.seconds / 1e9, tiles=len(walk),
            equal=bool(np.array_equal(there, np.broadcast_to(here, there.shape))), taken_MiB=watch.taken >> 20,
            inside=watch.taken <= BUDGET)  # fmt: skip
        if place is None:
            del y


def share(say, locked):
    """DLPack: the same memory both ways, and a tile in another library."""
    back = torch.from_dlpack(outsize.open(locked[:16]))
    tensor = torch.arange(32, dtype=torch.float32)
    same = back.data_ptr() == locked.ctypes.data and np.asarray(outsize.open(tensor)).ctypes.data == tensor.data_ptr()
    try:
        import cupy

        with outsize.budget(device=BUDGET):
            for tile in outsize.open(locked[:1024]).tiles(device="cuda", prefetch=2):
                other = cupy.from_dlpack(tile)
                there = int(other.data.ptr) == tile.data_ptr()
                got = float(cupy.square(other).sum())
        wanted = float(np.square(locked[0].astype(np.float64)).sum()) * 1024
        said = (
            f"a tile in CuPy is the same memory: {there}, its sum of squares is off by {abs(got - wanted) / wanted:.1e}"
        )
    except ImportError:
        said = "no CuPy"
    say("tiles", "DLPack", without_copies=bool(same), cupy=said)
