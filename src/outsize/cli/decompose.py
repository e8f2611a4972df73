"""`outsize decompose x.npy x.tucker --error 0.01`: keeps a tensor as a few small factors, with a known error."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

from outsize import report
from outsize.cli.clusters import add_cluster, joined
from outsize.cli.convert import read_lengths
from outsize.core.errors import InputError, OutsizeError
from outsize.core.events import default_listener
from outsize.monitor.peak import PeakMeter

_METHODS = {
    ".tucker": "tucker",
    ".tt": "tt",
    ".train": "tt",
    ".cp": "cp",
    ".svd": "svd",
    ".zfp": "zfp",
    ".safetensors": "auto",
}
"""Suffix of the target -> what is written to it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="x.npy, x.zarr, x.h5::/group/x, or anything else that can be opened")
    parser.add_argument(
        "target", nargs="?", help=".tucker, .tt, .cp, .svd; .safetensors lets Outsize choose; not needed with --plan"
    )
    parser.add_argument(
        "--error", default="0.01", metavar="SHARE",
        help="largest error, relative to the norm of the data (default: 0.01); '1e-3 max': of any element, to the largest",
    )  # fmt: skip
    parser.add_argument(
        "--rank", metavar="RANKS", help="ranks instead of an error, such as 40 or 40,40,20: the error is then said"
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="tucker, tt, cp, svd, zfp, float16, bfloat16 or auto (default: by the target's suffix)",
    )
    parser.add_argument(
        "--budget", metavar="BYTES", help="memory that may be held, such as 512MiB (default: 80%% of available)"
    )
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1, cupy or auto (default: none)")
    add_cluster(parser)
    parser.add_argument("--plan", action="store_true", help="show what it would read and hold, and stop")


def run(args: argparse.Namespace) -> int:
    method = _choose_method(args.method, args.target, args.plan)
    from outsize.factor.decompose import decompose

    options: dict[str, Any] = {
        "error": _read_error(args.error), "rank": _read_ranks(args.rank), "budget": args.budget, "device": args.device,
    }  # fmt: skip
    if args.plan:
        with joined(args):
            plan = decompose(args.source, method, dry_run=True, **options)
        report.show(plan, args.json)
        return 0 if plan.fits else 1
    _check_target(args.source, args.target)
    _load_code(method)
    with joined(args), PeakMeter("decompose") as meter:
        began = time.perf_counter()
        made = decompose(args.source, method, listener=None if args.json else default_listener(), **options)
        seconds = time.perf_counter() - began
    made.save(args.target, budget=args.budget)
    summary = made.summary(
        source=args.source, target=args.target, seconds=seconds, measured=meter.peaks()[0].bytes,
        read=(made.plan.read or None) if made.plan is not None else None,
    )  # fmt: skip
    report.show(summary, args.json)
    return 0


def _choose_method(method: str | None, target: str | None, plan: bool) -> str:
    """What was named, or what the target's suffix says; both, where they agree."""
    if target is None:
        if not plan:
            raise InputError("say where to write: outsize decompose SOURCE TARGET, or --plan to only plan")
        return method or "auto"
    suffix = os.path.splitext(target)[1].lower()
    if suffix not in _METHODS:
        raise InputError(f"cannot write {target}: the name must end in one of {', '.join(_METHODS)}")
    said = _METHODS[suffix]
    if method is not None and said not in ("auto", method):
        raise InputError(f"{target} names {said} and --method {method}: name one, or write to .safetensors")
    return method or said


def _check_target(source: str, target: str) -> None:
    """What would fail after all the work is found before it."""
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder}: make it first")
    if os.path.isdir(target):
        raise InputError(f"{target} is a folder: it is not overwritten by a file")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} may not be written to: choose another folder")
    path = source if os.path.lexists(source) else source.partition("::")[0]
    if os.path.exists(target) and os.path.exists(path) and os.path.samefile(path, target):
        raise InputError(f"{target} is the input itself: choose another name for the output")


def _read_error(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _read_ranks(text: str | None) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    ranks = read_lengths(text, "--rank", "one whole number, or one for each axis, such as 40,40,20")
    return ranks[0] if len(ranks) == 1 else ranks


def _load_code(method: str) -> None:
    """Decompose a few numbers first: libraries, threads and code take memory that is in no plan."""
    import numpy as np

    from outsize.factor.decompose import decompose

    with contextlib.suppress(OutsizeError):  # whatever is wrong is said of the data themselves
        decompose(np.ones((64, 64) if method == "svd" else (40, 40, 40)), method, rank=1 if method == "cp" else None)
