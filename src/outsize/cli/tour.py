"""`outsize tour`: the main job for a newcomer, on embedded examples, in under a minute, without a GPU or a network."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from outsize import report
from outsize.machine import memory
from outsize.sizing import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tour takes none of its own."""


def run(args: argparse.Namespace) -> int:
    """Walk through every stop."""
    shown: dict[str, Any] = {}
    for number, (command, why, visit) in enumerate(STOPS, start=1):
        noun = visit()
        shown[command] = noun
        if not args.json:
            report.show_stop(number, len(STOPS), command, why, noun)
    if args.json:
        report.show(shown, as_json=True)
    else:
        report.show("Next: outsize --help, or docs/ for a page on each verb.")
    return 0


def _size_the_tensor() -> Any:
    return size((3075200, 512), "float32", card="RTX 4060")


def _read_the_machine() -> Any:
    return memory()


STOPS: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    (
        "outsize size 3075200,512 --dtype float32 --card rtx4060",
        "A tensor is planned. How large is it, exactly, and where would it fit?",
        _size_the_tensor,
    ),
    ("outsize memory", "What is really here, inside every limit?", _read_the_machine),
)
"""(what one would type, why, what it shows), in the order of the walk."""
