"""Starts the ranks of a test as fresh processes on this machine and hands back what each of them printed."""

import json
import os
import pathlib
import time

import forks

PROGRAM = pathlib.Path(__file__).with_name("ranked_steps.py")


def run_ranks(folder, count, *scenarios, seconds=300, program=PROGRAM, **environment):
    """The lines of JSON of every rank, by rank; a rank that has not ended in so many seconds is a hang."""
    store = folder / f"store-{time.monotonic_ns()}"
    given = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    words = [(str(store), str(rank), str(count), *scenarios) for rank in range(count)]
    ranks = [forks.start(program, *line, imported=forks.TORCH, environment=given) for line in words]
    until = time.monotonic() + seconds * max(1, len(scenarios))
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    hung = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for rank in ranks:
        rank.kill()
    said = [rank.communicate() for rank in ranks]
    assert not hung, f"ranks {hung} did not end: {said[hung[0]][1][-2000:]}"
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(error[-3000:] for _, error in said)
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in said]
