"""`outsize run train.py --epochs 3`: runs the program unchanged, and reports if it runs out of memory."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

from rich.text import Text

from outsize import report
from outsize.core.errors import InputError
from outsize.core.recording import Finding, Note
from outsize.core.units import format_bytes
from outsize.failure.run import run as run_watched
from outsize.monitor.outside import Outside
from outsize.monitor.recorder import Item, Recorder
from outsize.monitor.tree import TreeReading
from outsize.report.recording import draw_finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE", help="also write the diagnosis to this file as JSON")
    parser.add_argument(
        "--watch", action="store_true", help="also watch it from inside, and say what grows and who keeps it"
    )
    parser.add_argument(
        "--record", metavar="FILE", help="with --watch: write everything to this file, for outsize watch FILE"
    )
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
    if args.record and not args.watch:
        raise InputError("--record needs --watch: write  outsize run --watch --record run.watch train.py")
    ends: list[Callable[[], None]] = []
    listen = _watcher(words, args.record, ends) if args.watch else None
    status, diagnosis, watched = run_watched(words, listen=listen)
    for end in ends:
        end()
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


def _watcher(
    words: list[str], record: str | None, ends: list[Callable[[], None]]
) -> Callable[[pathlib.Path], Callable[[TreeReading], None]]:
    """Makes the listener of a run: each reading of its tree becomes a sample, and what grows is said on standard error."""

    def listen(folder: pathlib.Path) -> Callable[[TreeReading], None]:
        seen: list[Outside] = []
        recorders: list[Recorder] = []

        def take(items: list[Item]) -> None:
            for item in items:
                for recorder in recorders:
                    recorder(item)
                if isinstance(item, Finding):
                    sys.stderr.write(f"outsize: {draw_finding(item)}\n")
                elif isinstance(item, Note):
                    sys.stderr.write(f"outsize: {item.text}\n")

        def hear(tree: TreeReading) -> None:
            if not seen and tree.processes:
                seen.append(Outside(tree.processes[0].pid, command=words, folder=str(folder)))
                recorders.extend([Recorder(record, seen[0].head)] if record is not None else [])
                ends.append(lambda: take(seen[0].close("the process has ended")))
            if seen:
                take(seen[0].read(tree) or [])

        return hear

    return listen
