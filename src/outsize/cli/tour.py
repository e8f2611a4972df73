"""`outsize tour`: shows the main verbs on built-in examples, in under a minute, without a GPU or a network."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

import outsize
from outsize import report
from outsize.cli.measured_run import MeasuredRun

BUDGET = "64MiB"
"""What the tour's array work may hold."""
SHAPE = (131072, 512)
"""A float32 array of this shape is 256 MiB: four times the budget."""

MESSAGE = (
    "numpy._core._exceptions._ArrayMemoryError: "
    "Unable to allocate 5.87 GiB for an array with shape (3075200, 512) and data type float32"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tour takes none of its own."""


def run(args: argparse.Namespace) -> int:
    shown: dict[str, Any] = {}
    for number, (command, why, visit) in enumerate(STOPS, start=1):
        answers = visit()
        shown[command] = answers
        if not args.json:
            report.show_stop(number, len(STOPS), command, why, answers)
    if args.json:
        report.show(shown, as_json=True)
    else:
        report.show("Next: outsize --help, or docs/ for a page on each verb.")
    return 0


def _run_it_inside_the_budget() -> list[Any]:
    """Make an array larger than the budget and standardise it: show the plan, then what was measured."""
    scratch = outsize.memory().disk.name
    os.makedirs(scratch, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="tour-") as folder:
        x = _make_array(os.path.join(folder, "x.npy"))
        z = (x - x.mean(axis=0)) / x.std(axis=0)
        plan = z.plan(budget=BUDGET)
        with MeasuredRun(plan, steps=False) as run:
            z.save(os.path.join(folder, "z.npy"), budget=BUDGET, progress=run.listener)
    return [plan, run.outcome([("z.npy", z.shape, z.dtype.name, z.nbytes)])]


def _make_array(path: str) -> Any:
    ramp = outsize.array.arange(SHAPE[0] * SHAPE[1], dtype="float32")
    return outsize.array.reshape(outsize.array.sin(ramp), SHAPE).save(path, budget=BUDGET)


STOPS: tuple[tuple[str, str, Callable[[], list[Any]]], ...] = (
    (
        "outsize size 3075200,512 --dtype float32 --budget 4GiB",
        "A tensor is planned. How large is it, exactly, and where would it fit?",
        lambda: [outsize.size((3075200, 512), "float32", budget="4GiB")],
    ),
    ("outsize memory", "What is really here, inside every limit?", lambda: [outsize.memory()]),
    (
        "outsize explain error.txt",
        "It was tried anyway, and failed. Why, and what now?",
        lambda: [outsize.explain(MESSAGE)],
    ),
    (
        f'outsize compute "(x - x.mean(axis=0)) / x.std(axis=0)" --in x=x.npy --out z.npy --budget {BUDGET}',
        f"An array of 256 MiB, standardised inside {BUDGET}: the plan first, then the run.",
        _run_it_inside_the_budget,
    ),
)
"""(command to type, why, function that shows the answer), in order."""
