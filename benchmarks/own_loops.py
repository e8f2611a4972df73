"""Loops in which the user steps the optimizer: what they really held against what their plans said.

    python benchmarks/own_loops.py                     # 100 random loops on the CPU
    python benchmarks/own_loops.py --device cuda       # ten on a card
    python benchmarks/own_loops.py --count 20 --seed 7

Each loop is a model, an optimizer (plain, foreach or fused), 1 to 3 `backward` calls a step, autocast (none, before the plan or
after it), clipping, evaluation and averaged weights, all by chance, and a budget (the plain step, or 60 to 85 percent of what it
holds beside weights, state and gradients). Its last steps are measured from outside (`real`): on the CPU by the events of the
allocator, on a card by its statistics. A loop that no plan fits is refused; it fails where `real` or the fitted step's measure
is above the plan, or the plan above the budget.
"""

import argparse
import os
import pathlib
import random
import sys
import warnings

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler tells of itself otherwise
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "model"))
import loops

from outsize.core.errors import BudgetError, OutOfMemory

COLUMNS = ("loop", "budget KiB", "first plan", "planned", "measured", "real", "remedies")


def main() -> int:
    """Run the loops, print a row for each, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    count = given.count or (100 if given.device == "cpu" else 10)
    print(" | ".join(COLUMNS))
    refused = failed = 0
    for _ in range(count):
        loop = loops.Loop.draw(chance)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = loops.run(loop, given.device)
        except (BudgetError, OutOfMemory) as error:
            refused += 1
            late = isinstance(error, OutOfMemory)
            said = str(error).split(":")[0] if late else f"{(error.smallest or 0) / 1024:.1f} KiB would do"
            print(f"{describe(loop)} | refused: {said}", flush=True)
            continue
        failed += not found.holds
        sizes = (found.budget, found.first, found.planned, found.measured, found.real)
        numbers = " | ".join(f"{size / 1024:.1f}" for size in sizes)
        said = ", ".join(found.remedies) or "none"
        print(f"{describe(loop)} | {numbers} | {said}{'' if found.holds else ' | ABOVE ITS PLAN'}", flush=True)
    print(
        f"{count} loops on {given.device}: {count - refused - failed} held, {refused} refused, {failed} above their plan"
    )
    return 1 if failed else 0


def describe(loop: loops.Loop) -> str:
    """A loop in a few words."""
    extras = [name for name in ("clip", "evaluate", "average") if getattr(loop, name)]
    words = [
        loop.model,
        f"{loop.optimizer} {loop.way}",
        f"x{loop.accumulation}",
        f"autocast {loop.autocast}",
        *extras,
        f"{loop.percent} %",
    ]
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
