"""What the machine can do: plain direct reads and writes, BLAS and the filter in RAM. `python floor.py WORK DATA OUT`
prints seconds."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from data import COSINE_ROWS, SHAPES, SORTED_ROWS
from filters import gauss5

_BLOCK = 8 << 20
_THREADS = 3


def _in_threads(size: int, move: Callable[[mmap.mmap, int], object]) -> float:
    offsets, lock = iter(range(0, size, _BLOCK)), threading.Lock()

    def worker() -> None:
        buffer = mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer[:] = b"\1" * _BLOCK
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            move(buffer, offset)

    threads = [threading.Thread(target=worker) for _ in range(_THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def read(path: str) -> float:
    """Seconds to read a file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    seconds = _in_threads(os.path.getsize(path), lambda buffer, offset: os.preadv(fd, [buffer], offset))
    os.close(fd)
    return seconds


def write(path: str, size: int) -> float:
    """Seconds to write a new file of this size and sync it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    os.posix_fallocate(fd, 0, -(-size // _BLOCK) * _BLOCK)
    seconds = _in_threads(size, lambda buffer, offset: os.pwritev(fd, [buffer], offset))
    begin = time.perf_counter()
    os.fsync(fd)
    os.close(fd)
    seconds += time.perf_counter() - begin
    os.unlink(path)
    return seconds


def blas(n: int, tile: int = 6144) -> float:
    """Seconds that a product of n x n would take at the rate of one of tile x tile in RAM."""
    a = np.random.default_rng(0).random((tile, tile), dtype="float32")
    np.matmul(a[:512], a)
    begin = time.perf_counter()
    np.matmul(a, a)
    return (time.perf_counter() - begin) * (n / tile) ** 3


def in_ram_filter(path: str) -> float:
    """Seconds of the filter on the whole image in RAM, padded as the work pads it."""
    image = np.pad(np.load(path), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="symmetric")
    begin = time.perf_counter()
    gauss5(image)
    return time.perf_counter() - begin


def cosine() -> float:
    """Seconds of the product of COSINE_ROWS x 512 with 512 x 4096 in RAM."""
    a = np.random.default_rng(0).random((COSINE_ROWS, 512), dtype="float32")
    np.matmul(a[:512], a[:4096].T)
    begin = time.perf_counter()
    np.matmul(a, a[:4096].T)
    return time.perf_counter() - begin


def lapack(rows: int, columns: int = 512, block: int = 16384) -> float:
    """Seconds of QR of so many rows, block by block in RAM, and of the products that make Q of the blocks' own."""
    a = np.random.default_rng(0).random((block, columns), dtype="float32")
    turn = np.random.default_rng(1).random((columns, columns), dtype="float32")
    np.linalg.qr(a[:1024])
    begin = time.perf_counter()
    q, _ = np.linalg.qr(a)
    np.matmul(q, turn)
    return (time.perf_counter() - begin) * rows / block


def projections(rows: int, columns: int = 512, wide: int = 30, block: int = 16384) -> float:
    """Seconds of three products of a tall matrix with few columns, and of three of its transpose, in RAM."""
    a = np.random.default_rng(0).random((block, columns), dtype="float32")
    draw = np.random.default_rng(1).random((columns, wide), dtype="float32")
    np.matmul(a[:512], draw)
    begin = time.perf_counter()
    for _ in range(3):
        np.matmul(a.T, np.matmul(a, draw))
    return (time.perf_counter() - begin) * rows / block


PASSES = {
    "sort": ("tall", 2, 2), "median": ("tall", 2, 0), "unique": ("whole", 2, 2), "rfft": ("tall", 2, 2), "rsvd": ("tall", 6, 0),
    "qr": ("tall", 2, 1),
}  # fmt: skip
"""Work -> file, how many times it is read, how many times as much is written: past memory, by the two passes of a sort."""


def main(work: str, data: str, out: str, limit: int = 0) -> float:
    """Seconds below which a work cannot go (for the filter: in RAM, plus read and write); a limit in MiB says what of a file
    that is read twice may stay in memory."""
    tall = f"{data}/tall.npy"
    size = os.path.getsize(tall)
    if work.startswith("zscore"):
        again = max(0.0, 1 - (limit << 20) / size)
        return (1 + again) * read(tall) + write(f"{out}/floor", size)
    if work in ("softmax", "layernorm", "three"):
        return read(tall) + write(f"{out}/floor", size)
    if work == "cosine":
        return max(cosine(), write(f"{out}/floor", COSINE_ROWS * 4096 * 4))
    if work in ("sum", "expression", "argmax"):
        return read(tall)
    if work == "normalise":
        return 2 * read(tall) + write(f"{out}/floor", size)
    if work == "transpose":
        return read(tall) + write(f"{out}/floor", size)
    if work in PASSES:
        stem, rounds, written = PASSES[work]
        size = os.path.getsize(f"{data}/{stem}.npy")
        if stem == "tall" and work in ("sort", "median", "rfft"):  # of a part of the rows
            size = size * SORTED_ROWS // SHAPES["tall"][0]
        share = size / os.path.getsize(f"{data}/{stem}.npy")
        moved = rounds * share * read(f"{data}/{stem}.npy") + written * write(f"{out}/floor", size)
        counted = {"qr": lapack, "rsvd": projections}.get(work)
        return moved if counted is None else max(moved, counted(len(np.load(tall, mmap_mode="r"))))
    if work == "matmul":
        return blas(len(np.load(f"{data}/a.npy", mmap_mode="r")))
    image = f"{data}/image.npy"
    return in_ram_filter(image) + read(image) + write(f"{out}/floor", os.path.getsize(image))


if __name__ == "__main__":
    print(main(*sys.argv[1:4], *map(int, sys.argv[4:5])))
