"""`outsize run train.py --epochs 3`: runs the program unchanged, and reports if it runs out of memory."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable

from rich.text import Text

from outsize import report
from outsize.core.errors import InputError
from outsize.core.memory import Part
from outsize.core.noun import Known
from outsize.core.outcomes.program_run import ProgramRun
from outsize.failure.run import run as run_watched
from outsize.monitor.outside import Outside
from outsize.monitor.processes.tree import TreeReading
from outsize.monitor.recorder import Item, Recorder
from outsize.monitor.watched import NOTABLE, Watched, growth_by_line, thin
from outsize.report.text.program_run import draw_course, say
from outsize.report.text.recording import draw_news

_LINES = 3
"""Lines of code that are named after a run that went well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE", help="also write the diagnosis to this file as JSON")
    parser.add_argument(
        "--watch", action="store_true", help="also watch it from inside, and say what grows and who keeps it"
    )
    parser.add_argument(
        "--record", metavar="FILE", help="with --watch: write everything to this file, for outsize watch FILE"
    )
    parser.add_argument("--peak", action="store_true", help="say only the peak, in one line, if all went well")
    parser.add_argument("--quiet", action="store_true", help="say nothing if all went well")
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
    output = sys.stderr.buffer if args.json else None  # standard output is for the JSON then
    status, diagnosis, watched = run_watched(words, listen=listen, output=output)
    for end in ends:
        end()
    if diagnosis.failure is None and not args.quiet:
        _say_how_it_went(words, status, watched, args)
    if diagnosis.failure is not None:
        if args.report:
            pathlib.Path(args.report).write_text(report.to_json(diagnosis) + "\n")
        if args.json:
            report.show(diagnosis, as_json=True)
        else:
            report.show(Text("\noutsize: why memory ran out", style="bold"), stderr=True)
            report.show(diagnosis, stderr=True)
    return status


def _say_how_it_went(words: list[str], status: int, watched: Watched, args: argparse.Namespace) -> None:
    """The peak, memory over time and the lines that took most, apart from what the program wrote."""
    went = ProgramRun(
        command=tuple(words), status=status, seconds=watched.seconds, peak=watched.peak or None, largest=watched.largest,
        processes=max(1, len(watched.seen)), timeline=thin(watched),
        lines=tuple(
            Part(name=line, bytes=size, known=Known.ESTIMATE)
            for line, size in growth_by_line(watched).most_common(_LINES)
            if line and size >= NOTABLE
        ),
    )  # fmt: skip
    if args.json:
        report.show(went, as_json=True)
        return
    report.show(Text.assemble("outsize: ", say(went)), stderr=True)
    if not args.peak:
        report.show(draw_course(went), stderr=True)


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
                news = draw_news(item, report.columns_of(sys.stderr, piped=80))
                if news is not None:
                    sys.stderr.write(f"{news}\n")

        def hear(tree: TreeReading) -> None:
            if not seen and tree.processes:
                seen.append(Outside(tree.processes[0].pid, command=words, folder=str(folder)))
                recorders.extend([Recorder(record, seen[0].head)] if record is not None else [])
                ends.append(lambda: take(seen[0].close("the process has ended")))
            if seen:
                take(seen[0].read(tree) or [])

        return hear

    return listen
