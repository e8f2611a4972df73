"""`outsize compute EXPRESSION --in x=FILE --out FILE`: array expressions on files larger than memory."""

from __future__ import annotations

import argparse
import sys

from outsize import report
from outsize.array import Array, open
from outsize.array.api.expression import evaluate
from outsize.array.run.results import plan_compute
from outsize.core.errors import InputError, OutsizeError
from outsize.machine import budget
from outsize.report.progress import terminal_listener

_PRINTED = 10_000
"""The most elements of a result that is printed; a larger one needs --out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    parser.add_argument("expression", help="such as '(x - x.mean(axis=0)) / x.std(axis=0)'")
    parser.add_argument(
        "--in",
        dest="inputs",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="an array and its name in the expression",
    )
    parser.add_argument("--out", metavar="FILE", help="where the result goes; without it, a small result is printed")
    parser.add_argument(
        "--budget", metavar="BYTES", help="memory that may be held, such as 1GiB (default: 80%% of available)"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cuda, cuda:1 or cupy; auto uses a GPU only where it is faster (default: none)"
    )
    parser.add_argument(
        "--device-budget", metavar="BYTES", help="device memory that may be held (default: 80%% of free)"
    )
    parser.add_argument("--tf32", action="store_true", help="let products of float32 be rounded to TF32 on the device")
    parser.add_argument("--plan", action="store_true", help="show what it would read, write and hold, and stop")


def run(args: argparse.Namespace) -> int:
    """Evaluate the text lazily, then plan, save or print it."""
    named = [_named(text) for text in args.inputs]
    arrays = dict(named)
    if len(arrays) < len(named):
        raise InputError(f"--in names {', '.join(name for name, _ in named)}: every array needs a name of its own")
    result = evaluate(args.expression, arrays)
    if isinstance(result, tuple | list) and all(isinstance(one, Array) for one in result):
        raise InputError(f"{args.expression!r} is {len(result)} arrays: pick one, such as ({args.expression})[0]")
    if not isinstance(result, Array):
        what = "a function: call it" if callable(result) else f"{result!r}, not an array: nothing to compute"
        raise InputError(f"{args.expression!r} is {what}")
    if args.device_budget and not args.device:
        raise InputError(f"--device-budget {args.device_budget} is for work on a device: give --device with it")
    try:
        with budget(device=args.device_budget):
            return _show(result, args)
    except OutsizeError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:  # what NumPy only finds in the values
        raise InputError(f"{args.expression!r}: {error}") from error


def _show(result: Array, args: argparse.Namespace) -> int:
    where = {"device": args.device, "tf32": args.tf32}
    if args.plan or (args.out and args.json):
        saves = args.out or result.size > _PRINTED
        plan = result.plan(args.budget, args.out, **where) if saves else plan_compute(result.node, args.budget, **where)
    if args.plan:
        report.show(plan, args.json)
        return 0 if plan.fits else 1
    if args.out:
        saved = result.save(args.out, budget=args.budget, progress=terminal_listener() or False, **where)
        report.show(plan, args.json) if args.json else sys.stdout.write(f"{saved!r}\n")
        return 0
    if result.size > _PRINTED:
        raise InputError(f"the result has {result.size} elements: give --out FILE")
    value = result.compute(args.budget, **where)
    sys.stdout.write(f"{report.to_json(value.tolist())}\n" if args.json else f"{value}\n")
    return 0


def _named(text: str) -> tuple[str, Array]:
    name, equals, path = text.partition("=")
    if not equals or not name.isidentifier() or name.startswith("_"):
        raise InputError(f"--in takes NAME=FILE, such as x=x.npy, not {text!r}")
    return name, open(path)
