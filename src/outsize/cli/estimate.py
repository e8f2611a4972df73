"""`outsize estimate train:make_step --card rtx4090` or `outsize estimate --hf config.json --batch 8 --seq 2048`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from outsize import report
from outsize.core.errors import InputError
from outsize.model.estimation.configurations import OPTIMIZERS, PRECISIONS, step_from
from outsize.model.estimation.estimate import estimate

DEFAULT_SEQ = 512
"""Tokens if `--seq` is not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument(
        "target", nargs="?", metavar="MODULE:FUNCTION",
        help="a function that builds everything and returns the step to run, or (step, arg, ...)",
    )  # fmt: skip
    parser.add_argument("--hf", metavar="CONFIG", help="a transformers config.json instead; no weights are needed")
    parser.add_argument("--batch", type=_positive, metavar="N", help="batch size; also shows the largest that fits")
    parser.add_argument(
        "--seq",
        type=_positive,
        metavar="N",
        help="tokens in a sequence (512); if given, also shows how memory grows with it",
    )
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help=f"none, {', '.join(OPTIMIZERS)}")
    parser.add_argument("--precision", default="fp32", metavar="NAME", help=", ".join(PRECISIONS))
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--card", metavar="NAME", help="say whether it fits on this card, such as rtx4090")
    parser.add_argument("--budget", metavar="SIZE", help="say whether it fits in this much, such as 8GiB")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument(
        "--trust", action="store_true", help="exit with 0 also if it fits only when the guesses are right"
    )
    parser.add_argument("--steps", type=_positive, default=3, metavar="N", help="how many steps to trace (3)")


def run(args: argparse.Namespace) -> int:
    """Print the estimate; 1 if it does not fit, or may not fit."""
    if (args.target is None) == (args.hf is None):
        raise InputError("give either MODULE:FUNCTION or --hf config.json")
    common = {"device": args.device, "card": args.card, "budget": args.budget, "steps": args.steps}
    if args.hf is not None:
        optimizer = None if args.optimizer == "none" else args.optimizer
        length = args.seq or DEFAULT_SEQ
        step, build = step_from(args.hf, length, optimizer, args.precision, args.checkpointing, args.device)
        if args.batch is None:
            footprint = estimate(step, build=lambda: build(1), **common)
        else:
            footprint = estimate(step, build=build, batch=args.batch, seq=args.seq, **common)
    else:
        footprint = _from_function(args, common)
    report.show(footprint, args.json)
    guessed = footprint.capacity is not None and bool(footprint.guesses) and not args.trust
    return 1 if footprint.fits is False or guessed else 0


def _from_function(args: argparse.Namespace, common: dict[str, Any]) -> Any:
    maker = load(args.target)
    takes = len(inspect.signature(maker).parameters)
    if args.batch is not None and not takes:
        raise InputError(f"{args.target} takes no argument, so --batch cannot change it: give it one, the batch size")
    if args.seq is not None and takes < 2:
        raise InputError(
            f"{args.target} takes no second argument, so --seq cannot change it: give it one, the sequence"
        )

    def build(*size: int) -> tuple[Any, ...]:
        made = maker(*size)
        found = made if isinstance(made, tuple) else (made,)
        if not found or not callable(found[0]):
            what = type(found[0]).__name__ if found else "nothing"
            raise InputError(
                f"{args.target} returned {what}, not the step to run: return a function, or (function, argument, ...)"
            )
        return found

    def step(function: Callable[..., Any], *rest: Any) -> None:
        function(*rest)

    step.__name__ = args.target
    if takes:
        return estimate(step, build=build, batch=args.batch or 1, seq=args.seq, **common)
    return estimate(step, build=build, **common)


def load(target: str) -> Callable[..., Any]:
    """`package.module:function` -> the function; the current folder is searched first."""
    name, colon, attribute = target.partition(":")
    name = name.removesuffix(".py")
    if not colon or not name or not attribute:
        raise InputError(f"{target!r} is not MODULE:FUNCTION, such as train:make_step")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {error.name!r} here, asked for by {target!r}") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" at {os.path.basename(place.filename)}:{place.lineno}"
        raise InputError(f"importing {name} raised {type(error).__name__}{where}: {error}") from error
    if not hasattr(module, attribute):
        raise InputError(
            f"the module {name} has no {attribute!r}: it has {', '.join(_functions(module)) or 'no functions'}"
        )
    found = getattr(module, attribute)
    if not callable(found):
        raise InputError(f"{target} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _functions(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
