"""`outsize watch`: this machine, a process, a command or a recording, as a live screen, as lines, or as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TextIO

from rich.text import Text

from outsize import report
from outsize.core.errors import InputError
from outsize.core.outcomes.recording import Mark, Recording, Sample
from outsize.core.outcomes.watch_stream import encode, encode_head
from outsize.core.units import parse_seconds
from outsize.monitor.launch import build_command, passing_signals, start
from outsize.monitor.outside import Outside
from outsize.monitor.processes.access import NO_PROC
from outsize.monitor.processes.tree import read_process
from outsize.monitor.recorder import Item, Recorder, check_writable, is_recording, load
from outsize.report.live import Screen, wait_for_key, whole_terminal
from outsize.report.text.recording import draw_line, draw_news

_FRAME = 1.0
"""Seconds between two drawings of the screen."""
_REPLAY = 15.0
"""Seconds that a replay takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", default="100ms", metavar="TIME", help="time between samples (default 100ms)")
    parser.add_argument("--every", default="1s", metavar="TIME", help="time between printed lines (default 1s)")
    parser.add_argument("--for", dest="duration", metavar="TIME", help="stop after this time, such as 5s or 2min")
    parser.add_argument("--once", action="store_true", help="read once, print, and stop")
    parser.add_argument("--record", metavar="FILE", help="also write everything to this file, which watch replays")
    parser.add_argument(
        "--metrics",
        metavar="[HOST]:PORT",
        help="answer Prometheus with the newest numbers, such as :9400 (this machine only)",
    )
    parser.add_argument("--plain", action="store_true", help="print lines even on a terminal")
    parser.add_argument(
        "target", nargs=argparse.REMAINDER, metavar="PID | FILE | -- COMMAND ...",
        help="a process, a recording, or a program to start; without it, this machine",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Watch until the end: of the process, of the time that was asked for, or until q is pressed."""
    words = list(args.target)
    if words[:1] == ["--"]:
        return _run_command(args, words[1:])
    if len(words) == 1 and words[0].isdigit():
        return _look_at(args, int(words[0]))
    if len(words) == 1 and (words[0].endswith(".watch") or is_recording(words[0])):
        return _replay(args, load(words[0]))
    if len(words) == 1 and pathlib.Path(words[0]).is_dir():
        raise InputError(f"{words[0]} is a folder: give a process id, a recording, or a program to start")
    return _run_command(args, words) if words else _look_at(args, None)


def _run_command(args: argparse.Namespace, words: list[str]) -> int:
    """Start a program that watches itself too, and follow it. On a screen its output waits in a file until the end."""
    if not words:
        raise InputError("nothing to run: write  outsize watch -- train.py [arguments]")
    command = build_command(words)
    if args.record is not None:
        check_writable(args.record)  # before the program starts, not after
    if read_process(os.getpid()) is None:
        report.show(Text(f"outsize: {NO_PROC}: the program runs unwatched"), stderr=True)
        return _status(start(command, None), "")
    with contextlib.ExitStack() as stack:
        folder = _make_folder(args, stack)
        output = stack.enter_context(open(folder / "output", "wb")) if folder and _has_screen(args) else None
        listeners = _listeners(args, stack)
        child = start(command, folder, cooperate=True, output=output)
        with passing_signals(child):
            name = str(folder) if folder else None
            outside = Outside(child.pid, command=words, folder=name, interval=parse_seconds(args.interval))
            status = _follow(args, outside, child, listeners)
        if output is not None and folder is not None:
            sys.stdout.buffer.write((folder / "output").read_bytes())
            sys.stdout.flush()
    return status


def _make_folder(args: argparse.Namespace, stack: contextlib.ExitStack) -> pathlib.Path | None:
    """A folder for what the program says from inside, and for its output while there is a screen; None where none can be made."""
    try:
        return pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outsize-watch-")))
    except OSError:
        args.plain = True
        text = (
            "outsize: no folder for temporary files can be written (TMPDIR): the program is watched from outside only"
        )
        report.show(Text(text), stderr=True)
        return None


def _has_screen(args: argparse.Namespace) -> bool:
    return sys.stdout.isatty() and not (args.plain or args.json or args.once)


def _look_at(args: argparse.Namespace, pid: int | None) -> int:
    """Follow this machine, or a process that was there before us."""
    outside = Outside(pid, interval=parse_seconds(args.interval))
    with contextlib.ExitStack() as stack:
        return _follow(args, outside, None, _listeners(args, stack))


def _follow(
    args: argparse.Namespace,
    outside: Outside,
    child: subprocess.Popen[bytes] | None,
    listeners: list[Callable[[Item], None]],
) -> int:
    recorder = None if args.record is None else Recorder(args.record, outside.head)
    if recorder is not None:
        listeners.append(recorder)
    ends_at = None if args.duration is None else time.monotonic() + parse_seconds(args.duration)
    name = "stopped"
    try:
        with _show(args, outside, child is not None) as show:
            while True:
                items = outside.read()
                if items is None or (child is not None and child.poll() is not None):
                    name = "the process has ended"
                    break
                for item in items:
                    for listener in listeners:
                        listener(item)
                if recorder is not None and recorder.trouble is not None:
                    items = [*items, *outside.note(recorder.trouble)]
                late = ends_at is not None and time.monotonic() >= ends_at
                if show(items, 0.0 if args.once else outside.pause) == "quit" or args.once or late:
                    break
    except KeyboardInterrupt:
        name = "interrupted"
    last = outside.close(name)
    for item in last:
        for listener in listeners:
            listener(item)
    if recorder is not None:
        recorder.close(time.time() - outside.head.started, name)
    _say_the_end(args, outside, last, child is not None)
    return _status(child, name)


def _listeners(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[Callable[[Item], None]]:
    """Who else gets every sample, mark, finding and note."""
    if args.metrics is None:
        return []
    from outsize.report.outputs.openmetrics import MetricsServer

    return [stack.enter_context(MetricsServer(args.metrics))]


def _status(child: subprocess.Popen[bytes] | None, name: str) -> int:
    """The program's own exit status; a program that is no longer watched is left to run to its end."""
    if child is None:
        return 0
    code = child.wait()
    return code if code >= 0 else 128 - code


Show = Callable[[list[Item], float], str | None]
"""Shows what is new and waits; `quit` where the user has seen enough."""


@contextlib.contextmanager
def _show(args: argparse.Namespace, outside: Outside, started: bool) -> Iterator[Show]:
    if _has_screen(args):
        with whole_terminal():
            yield _screen(outside)
    elif args.json:
        sys.stdout.write(encode_head(outside.head))
        yield _json_lines
    else:
        yield _lines(parse_seconds(args.every), outside, sys.stderr if started else sys.stdout)


def _screen(outside: Outside) -> Show:
    screen = Screen()
    due = [0.0]

    def show(_: list[Item], pause: float) -> str | None:
        now = time.monotonic()
        if now >= due[0] and not screen.frozen:
            screen.show(outside.recording())
            due[0] = now + _FRAME
        key = wait_for_key(pause)
        asked = screen.press(key) if key is not None else None
        if key is not None:
            due[0] = 0.0
            screen.show(outside.recording())
        if asked == "snapshot":
            outside.history.add(Mark(time=now, kind="snapshot", name=f"written to {_write_snapshot(outside)}"))
            outside.note(outside.history.marks[-1].name)
        return asked

    return show


def _write_snapshot(outside: Outside) -> str:
    """The recording so far as JSON, in the current folder."""
    name = f"watch-{time.strftime('%Y%m%d-%H%M%S')}.json"
    try:
        pathlib.Path(name).write_text(report.to_json(outside.recording()) + "\n")
    except OSError as error:
        return f"nowhere: {error.strerror}"
    return name


def _json_lines(items: list[Item], pause: float) -> str | None:
    for item in items:
        sys.stdout.write(encode(item))
    sys.stdout.flush()
    time.sleep(pause)
    return None


def _lines(every: float, outside: Outside, stream: TextIO) -> Show:
    """Lines for people. A program that we started has standard output for itself: ours go to standard error."""
    due, columns = [0.0], report.columns_of(stream, piped=80)

    def show(items: list[Item], pause: float) -> str | None:
        for item in items:
            news = draw_news(item, columns)
            if news is not None:
                stream.write(f"{news}\n")
        if time.monotonic() >= due[0] and any(isinstance(item, Sample) for item in items):
            stream.write(draw_line(outside.recording(), columns) + "\n")
            due[0] = time.monotonic() + every
        stream.flush()
        time.sleep(pause)
        return None

    return show


def _say_the_end(args: argparse.Namespace, outside: Outside, last: list[Item], started: bool) -> None:
    if args.json:
        for item in last:
            sys.stdout.write(encode(item))
    elif not args.once:
        beside = started and not _has_screen(args)
        for mark in last:
            if isinstance(mark, Mark) and mark.kind == "end" and not started:
                report.show(Text(f"outsize: {mark.name}"))
        report.show(outside.recording(), stderr=beside)


def _replay(args: argparse.Namespace, recording: Recording) -> int:
    """Play a recording on a terminal, faster than it was; elsewhere print what it says."""
    if args.json or args.once or not _has_screen(args):
        report.show(recording, args.json)
        return 0
    screen, number = Screen(), 0
    frames = min(len(recording.samples), round(_REPLAY / _FRAME))
    with whole_terminal():
        while number < frames:
            count = (number + 1) * len(recording.samples) // frames
            end = recording.samples[count - 1].time
            screen.show(_until(recording, count, end))
            key = wait_for_key(_FRAME)
            if key is not None and screen.press(key) == "quit":
                break
            number += not screen.frozen
    report.show(recording)
    return 0


def _until(recording: Recording, count: int, end: float) -> Recording:
    """The recording as it was at a time."""
    lists: dict[str, Any] = {name: getattr(recording, name) for name in ("marks", "findings", "notes")}
    said: dict[str, Any] = {name: tuple(one for one in items if one.time <= end) for name, items in lists.items()}
    return replace(recording, samples=recording.samples[:count], complete=False, **said)
