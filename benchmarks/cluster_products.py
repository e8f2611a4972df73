"""Does a product on a cluster pay for copies of C (2.5-D)? Planned traffic beside what copies would make of it.

    python benchmarks/cluster_products.py [--side 65536]

Ours gives each worker tiles of C of its own and reads panels of A and B for them (2-D); a small C is summed in stretches. With k
copies of C (2.5-D: Solomonik, Demmel 2011) tiles are larger and fewer panels are read, but copies are written, read and added. On
a cluster that shares storage, the reading has one worker a tile, so k - 1 of k workers wait for it. `traffic`: bytes
in units of C. `time`: bytes of the busiest worker, in units of C over all workers. Only bytes are counted; those of our plans are
the planner's, those of copies are arithmetic: tiles as large as copies allow, no larger than memory.
"""

from __future__ import annotations

import argparse
import math

import outsize
from outsize.core.units import parse_bytes


def copied(side: int, words: float, workers: int, copies: int) -> tuple[float, float]:
    """(traffic, time) with so many copies of C, in units of C."""
    panels = 2 * max(math.sqrt(workers / copies), side / math.sqrt(words))
    if copies == 1:
        return panels + 1, panels + 1
    return panels + 2 * copies + 1, panels + copies + copies * (copies + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=65536)
    side = parser.parse_args().side
    a, b = (outsize.cluster.on_paper((side, side)) for _ in "ab")
    print(
        "| memory | workers | ours | 2-D | fewest bytes with copies | shortest with copies |\n|---|---|---|---|---|---|"
    )
    for memory in ("4GiB", "16GiB"):
        words = parse_bytes(memory) / 4
        for workers in (4, 16, 64, 250, 1000):
            made = outsize.cluster.simulate(a @ b, "c.zarr", workers=workers, memory=memory, link="1GB").to_dict()
            ours = (made.get("traffic") or made["moved"]) / (side * side * 4)
            rows = {copies: copied(side, words, workers, copies) for copies in range(1, 33)}
            few = min(rows, key=lambda copies: rows[copies][0])
            short = min(rows, key=lambda copies: rows[copies][1])
            print(f"| {memory} | {workers:,} | {ours:.1f} | {rows[1][0]:.1f} | {rows[few][0]:.1f} ({few}) | "
                  f"{rows[short][1]:.1f} ({short}) |")  # fmt: skip


if __name__ == "__main__":
    main()
