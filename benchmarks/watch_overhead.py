"""What watching costs: the watcher beside a process, and a watch inside one, at ten samples a second.

    python benchmarks/watch_overhead.py [rounds]

All of it is processor time: others on the machine make a clock say little. Outside: `outsize watch PID --record` over ten
seconds, with lines and with a live screen on a terminal. Inside: a loop of NumPy and pure Python with `w.step()`, and a
torch loop. What the watch does is summed up (its thread, and its readings at steps) over what the whole process took. Beside
that stands the process with a watch over the process without, in turns: it scatters by more than a hundredth where the
machine is busy, and is there to show that nothing was left out."""

from __future__ import annotations

import os
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import outsize
from outsize.monitor import growth, watching

SECONDS = 10


def watcher(*, screen: bool) -> float:
    """Share of one processor that `outsize watch PID` takes, its start left out."""
    target = subprocess.Popen([sys.executable, "-c", "import time; x = bytearray(200 << 20); time.sleep(60)"])
    with tempfile.TemporaryDirectory() as folder:
        master, slave = pty.openpty()
        used = []
        for seconds in (1, 1 + SECONDS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            line = [
                sys.executable,
                "-m",
                "outsize",
                "watch",
                "--for",
                f"{seconds}s",
                "--record",
                f"{folder}/{seconds}.watch",
            ]
            out = slave if screen else subprocess.DEVNULL
            drain = threading.Thread(target=_drain, args=(master,), daemon=True)
            drain.start()
            subprocess.run(
                [*line, str(target.pid)], stdin=slave if screen else None, stdout=out, stderr=out, check=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        with open(f"{folder}/{1 + SECONDS}.watch") as file:
            samples = sum(text.startswith('{"sample"') for text in file)
    target.kill()
    target.wait()
    kind = "screen" if screen else "lines"
    share = (used[1] - used[0]) / SECONDS
    print(f"outside, {kind}: {share:.2%} of one processor, {samples / (1 + SECONDS):.1f} samples a second", flush=True)
    return share


def _drain(master: int) -> None:
    try:
        while os.read(master, 65536):
            pass
    except OSError:
        return


def numpy_loop(step) -> None:
    total, data = 0.0, np.random.default_rng(0).random(200_000)
    for _ in range(700):
        total += float((data * data).sum())
        for number in range(40_000):
            total += number % 7
        step()


def torch_loop(step) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    batch = torch.randn(8, 64, 256)
    for _ in range(120):
        loss = layer(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Meter:
    """Adds up the processor time of the watch's own functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function):
        def timed(*words):
            began = time.thread_time()
            try:
                return function(*words)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def inside(loop, rounds: int) -> float:
    """Share of the loop's processor time that the watch takes inside it."""
    meter = Meter()
    plain, watched, own, rates, got = [], [], [], [], []
    run, mark = watching.Watch._run, growth.Growth.mark
    loop(lambda: None)  # what is made once
    for _ in range(rounds):
        began = time.process_time()
        loop(lambda: None)
        plain.append(time.process_time() - began)
        meter.seconds = 0.0
        watching.Watch._run, growth.Growth.mark = meter.around(run), meter.around(mark)
        with outsize.watch() as w:
            wall, began = time.perf_counter(), time.process_time()
            loop(w.step if loop is numpy_loop else lambda: None)
            watched.append(time.process_time() - began)
            wall = time.perf_counter() - wall
        watching.Watch._run, growth.Growth.mark = run, mark
        own.append(meter.seconds / watched[-1])
        rates.append(len(w.readings) / wall)
        got.append(watched[-1] / wall)
        assert w.leaks() == (), w.leaks()
    share, ratio = statistics.median(own), min(watched) / min(plain)
    print(
        f"inside, {loop.__name__}: {share:.2%} of its processor time ({min(own):.2%} to {max(own):.2%}), "
        f"{statistics.median(rates):.1f} samples a second while it got {statistics.median(got):.0%} of a processor; "
        f"best of {rounds}, with / without: {ratio:.4f}",
        flush=True,
    )
    return share


def main(rounds: int) -> int:
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {rounds} rounds")
    shares = [watcher(screen=False), watcher(screen=True), inside(numpy_loop, rounds), inside(torch_loop, rounds)]
    return 0 if max(shares) <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
