"""`outsize report estimate.json`, `outsize report run.watch -o run.html`, `outsize report oom.pickle --trace oom.json`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from outsize import report
from outsize.core.answers import LARGEST, parse_answer, read_answer
from outsize.core.errors import InputError
from outsize.core.noun import Noun, write_text
from outsize.core.outcomes.recording import Recording
from outsize.failure import explain
from outsize.monitor.recorder import is_recording, load

_PICKLE = (".pickle", ".pkl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="what a verb printed with --json, a recording (run.watch), or a torch memory snapshot (.pickle); - reads an answer",
    )
    parser.add_argument(
        "-o", "--out", metavar="PAGE.html", help="where the page goes; - is standard output (FILE with .html)"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="also write the timeline for Perfetto and chrome://tracing"
    )
    parser.add_argument("--tensorboard", metavar="FOLDER", help="also write a recording's numbers for TensorBoard")


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    noun = read(args.file)
    if args.trace:
        from outsize.report.outputs.trace import to_trace

        write_text(args.trace, to_trace(noun))
    if args.tensorboard:
        from outsize.report.outputs.tensorboard import write_scalars

        if not isinstance(noun, Recording):
            raise InputError(
                f"{args.file} is a {type(noun).__name__}: --tensorboard is for recordings of outsize watch"
            )
        write_scalars(noun, args.tensorboard)
    if args.json:
        report.show(noun, as_json=True)
    elif args.out == "-":
        sys.stdout.write(report.draw(noun, "page") or "")
    if (args.json and args.out is None) or args.out == "-":
        return 0
    out = args.out or ("report.html" if args.file == "-" else str(pathlib.Path(args.file).with_suffix(".html")))
    noun.save_html(out)
    if not args.json:
        sys.stdout.write(f"{out}: {os.path.getsize(out):,} bytes, opens in any browser without a network\n")
    return 0


def read(file: str) -> Noun:
    """The noun that a file holds, by its first bytes; - is an answer on standard input."""
    if file == "-":
        return parse_answer(sys.stdin.read(LARGEST), "standard input")
    try:
        with open(file, "rb") as opened:
            first = opened.read(1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    if first == b"\x80" or file.endswith(_PICKLE):
        return explain(pathlib.Path(file))
    if is_recording(file):
        return load(file)
    return read_answer(file)
