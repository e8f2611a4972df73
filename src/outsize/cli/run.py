"""`outsize run train.py --epochs 3`: runs the program unchanged, and reports if it runs out of memory."""

from __future__ import annotations

import argparse
import pathlib
import sys

from rich.text import Text

from outsize import report
from outsize.core.errors import InputError
from outsize.core.units import format_bytes
from outsize.failure.run import run as run_watched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("--report", metavar="FILE", help="also write the diagnosis to this file as JSON")
    parser.add_argument("--peak", action="store_true", help="print the peak also if all went well")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module, as python -m does"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a script or command, with its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Run the program and return its exit status. The report goes to standard error: standard output is the
    program's."""
    if args.report and not pathlib.Path(args.report).parent.is_dir():
        raise InputError(
            f"--report {args.report}: there is no folder {pathlib.Path(args.report).parent}: make it first"
        )
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    words = words if args.module is None else ["-m", *args.module]
    status, diagnosis, watched = run_watched(words)
    if args.peak:
        held = (
            f"peak of at least {format_bytes(watched.peak)} of RAM"
            if watched.peak
            else "it ended before its memory could be read"
        )
        sys.stderr.write(f"outsize: {held}\n")
    if diagnosis.failure is not None:
        if args.report:
            pathlib.Path(args.report).write_text(report.to_json(diagnosis) + "\n")
        if args.json:
            report.show(diagnosis, as_json=True)
        else:
            report.show(Text("\noutsize: why memory ran out", style="bold"), stderr=True)
            report.show(diagnosis, stderr=True)
    return status
