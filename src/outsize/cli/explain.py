"""`outsize explain log.txt`, `outsize explain "CUDA out of memory..."`, `... | outsize explain -`, `outsize explain a.pickle`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from outsize import report
from outsize.core.errors import InputError
from outsize.core.failure import Diagnosis
from outsize.failure import explain

_PASTE = """Paste what the program printed, then press Ctrl-D on an empty line. Good to have:
  the last lines of the traceback, from the line that says "out of memory" or "Unable to allocate";
  after a bare "Killed" or exit code 137: the output of  dmesg -T | tail -50
  for PyTorch, a snapshot says most:  torch.cuda.memory._dump_snapshot("oom.pickle")  then  outsize explain oom.pickle
"""
_LARGEST_LOG = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a log, a CUDA memory snapshot, or the message itself; - reads standard input",
    )
    parser.add_argument(
        "--after", metavar="SNAPSHOT", help="a later snapshot of the same program: what grew between the two"
    )
    parser.add_argument("--here", action="store_true", help="the failure happened on this machine: read its memory too")


def run(args: argparse.Namespace) -> int:
    """Explain the text or file; 1 if it is not an out-of-memory failure."""
    diagnosis = _explain(args)
    report.show(diagnosis, args.json)
    return 0 if diagnosis.failure is not None else 1


def _explain(args: argparse.Namespace) -> Diagnosis:
    if args.file in (None, "-"):
        if args.file is None and sys.stdin.isatty():
            sys.stderr.write(_PASTE)
        return explain(sys.stdin.buffer.read(_LARGEST_LOG), here=args.here)
    path = pathlib.Path(args.file)
    if os.path.isdir(path):
        raise InputError(f"{path} is a folder: give the log, message or snapshot in it")
    if not os.path.exists(path):  # a message is too long for a name, which pathlib raises on
        diagnosis = explain(args.file, here=args.here)
        if diagnosis.cause is None:
            raise InputError(
                f"no such file, and no out-of-memory message: {args.file}; to explain a long text, pipe it in: "
                "... | outsize explain -"
            )
        return diagnosis
    return explain(path, here=args.here, after=None if args.after is None else pathlib.Path(args.after))
