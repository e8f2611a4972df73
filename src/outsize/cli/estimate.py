"""`outsize estimate train.py --epochs 3`, `outsize estimate train:make_step` or `outsize estimate --hf config.json`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any

from rich.text import Text

from outsize import report
from outsize.cli.size import positive
from outsize.cli.user_function import load
from outsize.core.answers import read_answer
from outsize.core.errors import InputError
from outsize.core.footprint import Footprint
from outsize.core.footprint_change import compare_footprints
from outsize.core.noun import write_text
from outsize.model.estimation.configurations import OPTIMIZERS, PRECISIONS, SHARDINGS, step_from
from outsize.model.estimation.estimate import estimate
from outsize.model.estimation.ways_out import Setting, measure_for_step, measure_precisions, measure_ways_out
from outsize.model.frameworks import FIRST
from outsize.model.scripts.start import SECONDS, estimate_script

DEFAULT_SEQ = 512
"""Tokens if `--seq` is not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="SCRIPT.py | MODULE:FUNCTION",
        help="a training script, followed as it is; or a function that builds everything and returns the step to run, or "
        "(step, arg, ...)",
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    parser.add_argument(
        "--hf",
        metavar="CONFIG",
        help="a transformers config.json, or the name of a model that was downloaded before; no weights are needed",
    )
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size; also shows the largest that fits")
    parser.add_argument(
        "--seq",
        type=positive,
        metavar="N",
        help="tokens in a sequence (512); if given, also shows how memory grows with it",
    )
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help=f"none, {', '.join(OPTIMIZERS)}")
    parser.add_argument(
        "--precision", default="fp32", metavar="NAME", help=f"{', '.join(PRECISIONS)}; all: a table of them"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--card", metavar="NAME", help="say whether it fits on this card, such as rtx4090")
    parser.add_argument("--budget", metavar="SIZE", help="say whether it fits in this much, such as 8GiB")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        metavar="N",
        help="processes that train together; 'fewest' also shows how many cards train it",
    )
    parser.add_argument("--sharding", metavar="NAME", help=f"how the model is spread over them: {', '.join(SHARDINGS)}")
    parser.add_argument(
        "--trust", action="store_true", help="exit with 0 also if it fits only when the guesses are right"
    )
    parser.add_argument("--save", metavar="FILE.json", help="keep the answer as a baseline for --against")
    parser.add_argument("--against", metavar="FILE.json", help="compare with a baseline: exit with 1 if a peak grew")
    parser.add_argument(
        "--tolerance", type=_share, metavar="PERCENT", help="how much a peak may grow since the baseline (1%%)"
    )
    parser.add_argument(
        "--no-ways", action="store_true", help="if it does not fit, do not trace the ways out (quicker)"
    )
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="how many steps to trace (3)")
    parser.add_argument(
        "--seconds", type=positive, default=SECONDS, metavar="N", help=f"how long a script may take ({SECONDS})"
    )
    parser.set_defaults(parse_again=parser.parse_args)


def run(args: argparse.Namespace) -> int:
    """Print the estimate; 1 if it does not fit, or may not fit."""
    if args.words and not _is_script(args.target):  # only a script has arguments of its own
        args = _options_after(args)
    if (args.target is None) == (args.hf is None):
        raise InputError("give a script, or either MODULE:FUNCTION or --hf config.json")
    if args.tolerance is not None and args.against is None:
        raise InputError("--tolerance is for --against BASELINE")
    baseline = None if args.against is None else _read_baseline(args.against)  # before the work: it may be missing
    common = {"device": args.device, "card": args.card, "budget": args.budget, "steps": args.steps}
    if not _is_script(args.target):
        common |= {"ranks": args.ranks, "sharding": args.sharding}
        args.no_ways |= args.ranks == "fewest"  # its table is the way out
    elif args.ranks is not None or args.sharding is not None:
        raise InputError(
            "--ranks and --sharding are for MODULE:FUNCTION and --hf: a script is followed as one process of one"
        )
    if args.hf is not None:
        optimizer = None if args.optimizer == "none" else args.optimizer
        length = args.seq or DEFAULT_SEQ
        every, args.precision = args.precision == "all", "fp32" if args.precision == "all" else args.precision
        step, build = step_from(args.hf, length, optimizer, args.precision, args.checkpointing, args.device)
        sizes = {} if args.batch is None else {"batch": args.batch, "seq": args.seq}
        footprint = estimate(step, build=build if sizes else lambda: build(1), **sizes, **common)
        setting = Setting(
            path=args.hf, batch=args.batch or 1, seq=length, optimizer=optimizer, precision=args.precision,
            checkpointing=args.checkpointing,
        )  # fmt: skip
        if every:
            footprint = dataclasses.replace(footprint, ways=measure_precisions(setting, _alone(common)))
        elif footprint.fits is False and not args.no_ways:
            footprint = dataclasses.replace(footprint, ways=measure_ways_out(setting, common))
    elif _is_script(args.target):
        footprint = _from_script(args, common)
    else:
        footprint = _from_function(args, common)
    if args.against is not None:
        return _compare(footprint, baseline, args)
    report.show(footprint, args.json)
    _save(footprint, args.save)
    guessed = footprint.capacity is not None and bool(footprint.guesses) and not args.trust
    return 1 if footprint.fits is False or guessed else 0


def _read_baseline(path: str) -> Footprint:
    if not os.path.exists(path):
        raise InputError(f"there is no baseline {path}: make one with --save {path}")
    baseline = read_answer(path)
    if not isinstance(baseline, Footprint):
        raise InputError(f"{path} is a {type(baseline).__name__}, not a baseline: make one with --save {path}")
    return baseline


def _compare(footprint: Footprint, baseline: Footprint | None, args: argparse.Namespace) -> int:
    """Print what changed; 1 if a peak grew."""
    assert baseline is not None
    change = compare_footprints(baseline, footprint, 0.01 if args.tolerance is None else args.tolerance)
    report.show(change, args.json)
    _save(footprint, args.save)
    return 1 if change.grew else 0


def _save(footprint: Footprint, path: str | None) -> None:
    if path is not None:
        write_text(path, report.to_json(footprint) + "\n")


def _is_script(target: str | None) -> bool:
    return target is not None and target.endswith(".py")


def _options_after(args: argparse.Namespace) -> argparse.Namespace:
    """The options that stand behind MODULE:FUNCTION, which a script's own arguments would look like."""
    target, words = args.target, args.words
    found: argparse.Namespace = args.parse_again(words, args)
    if found.target is not None:
        raise InputError(f"{found.target!r} is one argument too many: only a script has arguments of its own")
    found.target = target
    return found


def _from_script(args: argparse.Namespace, common: dict[str, Any]) -> Any:
    for name in ("batch", "seq"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name} is not for scripts: give {args.target} its own argument, behind its name")

    def heard(line: str) -> None:
        if not args.json:
            report.show(Text(f"│ {line}", style="dim"), stderr=True)

    return estimate_script(args.target, args.words, seconds=args.seconds, heard=heard, **common)


def _from_function(args: argparse.Namespace, common: dict[str, Any]) -> Any:
    maker = load(args.target)
    takes = len(inspect.signature(maker).parameters)
    batch = args.batch or _usual_batch(maker)
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

    def step(function: Callable[..., Any], *rest: Any) -> Any:
        return function(*rest)

    step.__name__ = args.target
    step.__dict__[FIRST] = True
    footprint = estimate(step, build=build, batch=batch, seq=None if batch is None else args.seq, **common)
    if footprint.fits is not False or args.no_ways:
        return footprint
    return dataclasses.replace(footprint, ways=measure_for_step(step, build, _sizes(batch, args.seq), common))


def _usual_batch(maker: Callable[..., Any]) -> int | None:
    """The batch where nobody says one: the first parameter's default, 1 where it has none; None where there is no batch."""
    first = next(iter(inspect.signature(maker).parameters.values()), None)
    if first is None or first.kind is first.VAR_KEYWORD:
        return None
    if first.default is first.empty:
        return 1
    return first.default if type(first.default) is int and first.default > 0 else None


def _sizes(batch: int | None, seq: int | None) -> list[tuple[str, tuple[int, ...]]]:
    """(name, arguments) of the sizes as given, and of smaller ones."""
    if batch is None:
        return []
    rest = () if seq is None else (seq,)
    found = [("as given", (batch, *rest))]
    found += [
        (f"batch of {smaller}", (smaller, *rest)) for smaller in sorted({batch // 2, 1} - {0, batch}, reverse=True)
    ]
    if seq is not None and seq >= 2:
        found.append((f"sequence of {seq // 2}", (batch, seq // 2)))
    return found


def _share(text: str) -> float:
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 1% or 0.01")
    return share


def _alone(common: dict[str, Any]) -> dict[str, Any]:
    """The same question without that for the fewest cards."""
    return common | {"ranks": None, "sharding": None} if common["ranks"] == "fewest" else common


def _ranks(text: str) -> int | str:
    if not text.isdigit() and text != "fewest":
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ranks nor fewest")
    return text if text == "fewest" else positive(text)
