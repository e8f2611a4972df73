"""`outsize shrink train:make --to 50%`: makes a model smaller and says what that costs, measured on the user's data."""

from __future__ import annotations

import argparse
from typing import Any

from outsize import report
from outsize.cli.user_function import load
from outsize.compression.files import check_target
from outsize.core.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="MODULE:FUNCTION",
        help="a function that returns (model, data, loss), or (model, data, loss, training) for --heal",
    )  # fmt: skip
    parser.add_argument("out", nargs="?", metavar="FILE", help="write the smaller model: .safetensors, .pt or .pt2")
    parser.add_argument("--to", default="50%", metavar="SIZE", help="50%%, 20MiB or 'fits rtx3060' (default: 50%%)")
    parser.add_argument(
        "--within", type=float, default=0.01, metavar="SHARE", help="share by which the loss may rise (default: 0.01)"
    )
    parser.add_argument("--methods", metavar="NAMES", help="only these methods, such as int8,low-rank (default: all)")
    parser.add_argument("--heal", type=int, default=0, metavar="STEPS", help="train the smaller model for some steps")
    parser.add_argument("--budget", metavar="BYTES", help="memory that a step of --heal may hold")
    parser.add_argument(
        "--of", default="weights", choices=("weights", "training"),
        help="what becomes smaller: weights, or weights, gradients and optimizer state of AdamW (default: weights)",
    )  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="show what would be taken and what it costs, and stop")


def run(args: argparse.Namespace) -> int:
    """Plan, or make the smaller model and save it; 1 if the size cannot be reached."""
    if args.out is None and not args.plan:
        raise InputError("say where to write: outsize shrink MODULE:FUNCTION small.safetensors, or --plan to only plan")
    if args.out is not None:
        check_target(args.out)
    from outsize.compression.shrink import shrink

    model, data, loss, training = _make(args.target)
    options: dict[str, Any] = {
        "loss": loss, "to": args.to, "within": args.within, "heal": args.heal, "budget": args.budget, "of": args.of,
        "training": training if args.heal else None,
        "methods": None if args.methods is None else [name.strip() for name in args.methods.split(",")],
    }  # fmt: skip
    if args.plan:
        plan = shrink(model, data, dry_run=True, **options)
        report.show(plan, args.json)
        return 0 if plan.fits else 1
    small = shrink(model, data, **options)
    small.save(args.out)
    report.show(small.plan, args.json)
    return 0


def _make(target: str) -> tuple[Any, Any, Any, Any]:
    """What the user's function gives: model, data, loss, and the training data or None."""
    made = load(target)()
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        what = f"{len(made)} things" if isinstance(made, tuple) else type(made).__name__
        raise InputError(
            f"{target} returned {what}: return (model, data, loss), or (model, data, loss, training) for --heal"
        )
    model, data, loss, training = (*made, None)[:4]
    return model, data, loss, training
