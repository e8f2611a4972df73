"""`outsize compute EXPRESSION --in x=FILE --out FILE`: array expressions on files larger than memory; several, each with a name,
in one walk over the files."""

from __future__ import annotations

import argparse
import sys

from outsize import report
from outsize.array import Array, open
from outsize.array.api.expression import evaluate
from outsize.array.api.together import plan_save, save
from outsize.array.run.results import plan_compute
from outsize.cli.clusters import add_cluster, joined
from outsize.cli.measured_run import MeasuredRun
from outsize.core.errors import InputError, OutsizeError
from outsize.machine import budget

_PRINTED = 10_000
"""The most elements of a result that is printed; a larger one needs --out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "expression",
        nargs="+",
        help="such as '(x - x.mean(axis=0)) / x.std(axis=0)'; several are named: 'm = x.mean(axis=0)' 'z = x - m'",
    )
    parser.add_argument(
        "--in",
        dest="inputs",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="an array and its name in the expression",
    )
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="where the result goes, or the named one of several; without it, a small result is printed",
    )
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
    parser.add_argument(
        "--explain", action="store_true", help="also say what each step took, beside what was planned (with --out)"
    )
    add_cluster(parser)
    parser.add_argument("--plan", action="store_true", help="show what it would read, write and hold, and stop")


def run(args: argparse.Namespace) -> int:
    """Evaluate the text lazily, then plan, save or print it."""
    named = [_named(text) for text in args.inputs]
    arrays = dict(named)
    if len(arrays) < len(named):
        raise InputError(f"--in names {', '.join(name for name, _ in named)}: every array needs a name of its own")
    *named_before, last = [_assignment(text) for text in args.expression]
    for name, text in named_before:
        if name is None:
            raise InputError(f"{text!r} comes before another expression and has no name: write it as 'm = {text}'")
        arrays[name] = _evaluate(text, arrays)
    result = _evaluate(last[1], arrays)
    if last[0] is not None:
        arrays[last[0]] = result
    if args.explain and (args.plan or not args.out):
        raise InputError("--explain says how a run to a file went: give --out FILE, and leave --plan out")
    if args.device_budget and not args.device:
        raise InputError(f"--device-budget {args.device_budget} is for work on a device: give --device with it")
    try:
        with budget(device=args.device_budget), joined(args):
            targets = _targets(args.out, arrays)
            return _save_all(targets, args) if targets else _show(result, args)
    except OutsizeError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:  # what NumPy only finds in the values
        raise InputError(f"{' '.join(args.expression)!r}: {error}") from error


def _assignment(text: str) -> tuple[str | None, str]:
    """(name, expression) of 'name = expression', or (None, expression)."""
    name, equals, rest = text.partition("=")
    named = bool(equals) and name.strip().isidentifier() and not rest.startswith("=")
    return (name.strip(), rest.strip()) if named else (None, text)


def _evaluate(text: str, arrays: dict[str, Array]) -> Array:
    result = evaluate(text, arrays)
    if isinstance(result, tuple | list) and all(isinstance(one, Array) for one in result):
        raise InputError(f"{text!r} is {len(result)} arrays: pick one, such as ({text})[0]")
    if not isinstance(result, Array):
        what = "a function: call it" if callable(result) else f"{result!r}, not an array: nothing to compute"
        raise InputError(f"{text!r} is {what}")
    return result


def _targets(outs: list[str], arrays: dict[str, Array]) -> dict[str, Array]:
    """File -> array, where --out names them; {} where it is one file for the last expression."""
    if len(outs) <= 1 and not (outs and _assignment(outs[0])[0] in arrays):
        return {}
    targets: dict[str, Array] = {}
    for text in outs:
        name, path = _assignment(text)
        if name not in arrays:
            raise InputError(
                f"--out {text}: with several outputs each is NAME=FILE, and the names are {', '.join(arrays)}"
            )
        if path in targets:
            raise InputError(f"--out {text}: {path} is already the file of another array")
        targets[path] = arrays[name]
    return targets


def _save_all(targets: dict[str, Array], args: argparse.Namespace) -> int:
    where = {"device": args.device, "tf32": args.tf32}
    plan = plan_save(targets, args.budget, **where)
    if args.plan:
        report.show(plan, args.json)
        return 0 if plan.fits else 1
    with MeasuredRun(plan, args.explain) as run:
        saved = save(targets, args.budget, run.listener, **where)
    report.show(
        run.outcome([(path, array.shape, array.dtype.name, array.nbytes) for path, array in saved.items()]), args.json
    )
    return 0


def _show(result: Array, args: argparse.Namespace) -> int:
    where, out = {"device": args.device, "tf32": args.tf32}, args.out[0] if args.out else None
    if args.plan or out:
        saves = out or result.size > _PRINTED
        plan = result.plan(args.budget, out, **where) if saves else plan_compute(result.node, args.budget, **where)
    if args.plan:
        report.show(plan, args.json)
        return 0 if plan.fits else 1
    if out:
        with MeasuredRun(plan, args.explain) as run:
            saved = result.save(out, budget=args.budget, progress=run.listener, **where)
        report.show(run.outcome([(out, saved.shape, saved.dtype.name, saved.nbytes)]), args.json)
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
