"""What a card, its link, the processor's copies and the disk can do at best, and a watch on the card's memory.

Used by `arrays_h200.py`; every figure is taken in the run that it is compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from outsize.array.device import torch_kernels
from outsize.engine.pinned import lock_memory

CLOCK: dict = {}
LAST: dict = {}


def clocked(owner, name):
    """Note how long a call takes, under its name."""
    inner = getattr(owner, name)

    def outer(*args, **options):
        began = time.perf_counter()
        try:
            LAST[name] = inner(*args, **options)
            return LAST[name]
        finally:
            CLOCK[f"s_in_{name}"] = time.perf_counter() - began

    setattr(owner, name, outer)


class Watch:
    """The most bytes the driver saw taken on the card, beyond what was taken before."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.before = self._used()
        self.peak = self.before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self.began = time.perf_counter()
        return self

    @staticmethod
    def _used():
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _watch(self):
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._used())

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.began
        self._stop.set()
        self._thread.join()
        self.taken = self.peak - self.before


def best(work, times=3):
    """Seconds of the fastest run."""
    work()
    torch.cuda.synchronize()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def copies(arena, size):
    """The link, each way and both ways, and rows at a pitch."""
    first, second = torch.from_numpy(arena[:size]), torch.from_numpy(arena[size : 2 * size])
    card, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    found = {
        "link_in": size / best(lambda: card.copy_(first, non_blocking=True)) / 1e9,
        "link_out": size / best(lambda: second.copy_(card, non_blocking=True)) / 1e9,
    }
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def both():
        with torch.cuda.stream(one):
            card.copy_(first, non_blocking=True)
        with torch.cuda.stream(two):
            second.copy_(other, non_blocking=True)

    found["link_both"] = 2 * size / best(both) / 1e9
    for width in (4096, 16384, 32768, 131072):
        rows = arena[: size // 2].reshape(-1, 262144)[:, :width]
        target = card[: rows.size].view(rows.shape)
        seconds = best(lambda target=target, rows=rows: torch_kernels.copy_rows(target, rows, inwards=True))
        found[f"link_in_rows_of_{width}"] = rows.size / seconds / 1e9
    return found


def staging(arena, size):
    """Copies from plain into page-locked memory, by several threads and by torch's: the best of them is the ceiling."""
    plain = np.ones(size, np.uint8)
    found = {}
    for hands in (4, 8, 12, 16):
        step = size // hands
        with ThreadPoolExecutor(hands) as crew:

            def stage(crew=crew, step=step, hands=hands):
                jobs = [crew.submit(np.copyto, arena[i * step : (i + 1) * step], plain[i * step : (i + 1) * step])
                        for i in range(hands)]  # fmt: skip
                for job in jobs:
                    job.result()

            found[f"staging_{hands}_threads"] = size / best(stage) / 1e9
    target, source = torch.from_numpy(arena[:size]), torch.from_numpy(plain)
    with ThreadPoolExecutor(1) as crew:  # a thread of its own: torch's processors go with it
        found["staging_by_torch"] = size / crew.submit(best, lambda: target.copy_(source)).result() / 1e9
    return {**found, "staging": max(found.values())}


def places(source, size):
    """A quarter of `size` bytes from each of four places of a large array."""
    raw, size = source.reshape(-1).view(np.uint8), min(source.nbytes, size)
    starts = np.linspace(0, source.nbytes - size // 4, 4).astype(np.int64) >> 12 << 12
    return [raw[low : low + size // 4] for low in starts]


def copied(parts, arena, hands, piece=8 << 20, back=None):
    """GB/s of copies into page-locked pieces that are used again, nothing else being done. `back`: an array that is filled from
    other page-locked pieces meanwhile, evenly; its bytes count too."""
    piece = min(piece, arena.nbytes // (4 * hands))
    total = sum(part.nbytes for part in parts)
    target = None if back is None else back.reshape(-1).view(np.uint8)
    share = 0 if target is None else target.nbytes / total

    def stage(hand):
        rings = [arena[(2 * hand + turn) * piece :][:piece] for turn in range(2)]
        owed, place, end = 0.0, hand * piece, 0 if target is None else target.nbytes - piece
        for part in parts:
            for turn, low in enumerate(range(hand * piece, part.nbytes, hands * piece)):
                block = part[low : low + piece]
                np.copyto(rings[turn % 2][: block.size], block)
                owed += block.size * share
                while owed >= piece and place <= end:
                    cold = arena.nbytes // 2 + place % (arena.nbytes // 2 - piece)
                    np.copyto(target[place : place + piece], arena[cold : cold + piece])
                    owed, place = owed - piece, place + hands * piece

    began = time.perf_counter()
    with ThreadPoolExecutor(hands) as crew:
        list(crew.map(stage, range(hands)))
    return total * (1 + share) / (time.perf_counter() - began) / 1e9


def staging_now(source, arena, size=8 << 30, back=None):
    """GB/s of copies of a large array at this moment, by 8, 10 or 12 threads: machines are shared, and seconds differ."""
    parts = places(source, size)
    share = (
        None if back is None else back.reshape(-1)[: max(1, back.size * sum(p.nbytes for p in parts) // source.nbytes)]
    )
    return max(copied(parts, arena, hands, 6 << 20, share) for hands in (8, 10, 12))


def sustained(source, arena):
    """GB/s of copies of a large array by several ways; with the part of the processors' time that others took meanwhile.
    `carried`: the same pieces go on to the card, by a bare loop."""
    parts, found = places(source, 16 << 30), {}
    for hands, piece in ((8, 8 << 20), (16, 8 << 20), (16, 64 << 20)):
        stolen, began = read_steal(), time.perf_counter()
        found[f"{hands}_threads_{piece >> 20}_MiB"] = copied(parts, arena, hands, piece)
        seconds = time.perf_counter() - began
        found[f"stolen_{hands}_{piece >> 20}"] = (read_steal() - stolen) / seconds / os.cpu_count()
    found["carried"] = carried(parts, arena)
    with open("/proc/self/smaps_rollup") as lines:
        found["huge_GiB"] = next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("AnonHuge")), 0.0)
    return found


def carried(parts, arena, hands=8, piece=8 << 20):
    """GB/s of plain memory to the card by a bare loop: each thread fills two pieces and sends them on its own stream."""
    piece = min(piece, arena.nbytes // (2 * hands))
    there = torch.empty(hands * piece, dtype=torch.uint8, device="cuda")

    def carry(hand):
        rings = [torch.from_numpy(arena[(2 * hand + turn) * piece :][:piece]) for turn in range(2)]
        target, stream = there[hand * piece :][:piece], torch.cuda.Stream()
        sent = [torch.cuda.Event(), torch.cuda.Event()]
        with torch.cuda.stream(stream):
            for part in parts:
                for turn, low in enumerate(range(hand * piece, part.nbytes, hands * piece)):
                    ring, size = rings[turn % 2], min(piece, part.nbytes - low)
                    sent[turn % 2].synchronize()
                    np.copyto(ring.numpy()[:size], part[low : low + size])
                    target[:size].copy_(ring[:size], non_blocking=True)
                    sent[turn % 2].record(stream)
        stream.synchronize()

    began = time.perf_counter()
    with ThreadPoolExecutor(hands) as crew:
        list(crew.map(carry, range(hands)))
    return sum(part.nbytes for part in parts) / (time.perf_counter() - began) / 1e9


def read_steal():
    """Seconds that other machines took from this one's processors, all together."""
    with open("/proc/stat") as lines:
        return int(next(lines).split()[8]) / os.sysconf("SC_CLK_TCK")


def products(edge):
    """A large product inside the card."""
    a = torch.randn(edge, edge, device="cuda")
    c = torch.empty_like(a)
    found = {}
    for name, tf32 in (("fp32", False), ("tf32", True)):
        with torch_kernels.precision(tf32):
            found[f"{name}_tflops_in_a_burst"] = 2 * edge**3 / best(lambda: torch.mm(a, a, out=c)) / 1e12
            began, count = time.perf_counter(), 12 if name == "fp32" else 60
            for _ in range(count):
                torch.mm(a, a, out=c)
            torch.cuda.synchronize()
            found[f"{name}_tflops"] = count * 2 * edge**3 / (time.perf_counter() - began) / 1e12
    return found


def direct_rate(path, size, hands=8, piece=16 << 20):
    """The disk read directly by several threads."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    places = iter(range(0, size // piece * piece, piece))
    lock = threading.Lock()
    buffers = [lock_memory(piece) for _ in range(hands)]

    def read(buffer):
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            os.preadv(fd, [buffer.array.data], place)

    threads = [threading.Thread(target=read, args=(buffer,)) for buffer in buffers]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return size // piece * piece / (time.perf_counter() - began) / 1e9


def write_file(path, array):
    """A .npy file of the array, written directly by several threads."""
    from outsize.array.store.formats.npy import describe

    sink = describe(str(path), array.shape, array.dtype)
    sink.create()
    step = max(1, (32 << 20) // (array.shape[1] * array.itemsize))

    def write(low):
        region = ((low, min(array.shape[0], low + step)), (0, array.shape[1]))
        room = np.empty(sink.room(region) + sink.extent(region) + 8192, np.uint8)
        room = room[-room.ctypes.data % 4096 :]
        block = sink.lay(region, room[: sink.room(region)])
        np.copyto(block, array[region[0][0] : region[0][1]])
        sink.write(region, block, room[sink.room(region) :])

    with ThreadPoolExecutor(8) as crew:
        list(crew.map(write, range(0, array.shape[0], step)))
    sink.commit()


def compiled():
    """Plain operations against a compiled chain, on a block that lies on the card."""
    code = (
        "import torch, time\nx = torch.randn(1 << 26, device='cuda')\n"
        "def chain(x): return torch.sqrt(x * x + 1) - torch.abs(x) * 0.5\n"
        "def clock(f):\n    f(x); torch.cuda.synchronize(); t = time.perf_counter()\n"
        "    for _ in range(20): f(x)\n    torch.cuda.synchronize(); return (time.perf_counter() - t) / 20\n"
        "print('plain ms', clock(chain) * 1e3, flush=True)\nt = time.perf_counter()\nc = torch.compile(chain)\nc(x)\n"
        "torch.cuda.synchronize()\nprint('compile s', time.perf_counter() - t)\nprint('compiled ms', clock(c) * 1e3)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        said = (done.stdout + done.stderr[-600:]).strip()
    except subprocess.TimeoutExpired as error:
        said = f"not done after 60 s: {error.stdout}"
    return said.replace("\n", ", ")
