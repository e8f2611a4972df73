"""The `outsize` command: one file per verb.

A verb's file has `add_arguments(parser)` and `run(args) -> int`; it parses, calls the verb, and hands the noun to
`report`. Exit status: 0 fits or done, 1 does not fit or failed, 2 a mistake in the arguments. Only the file of the
verb in use is imported, so that the command answers within half a second.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from outsize.cli.examples import show_examples
from outsize.cli.streams import prepare_streams
from outsize.core.errors import InputError, OutsizeError

VERBS = {
    "memory": "show the memory of this machine, what limits it, and who holds it",
    "size": "show how many bytes tensors take, and where they fit",
    "show": "show what is in a file: format, arrays, shapes, dtypes, bytes",
    "explain": "explain why memory ran out and what to do: a message, a log, a CUDA snapshot",
    "run": "run a Python program, and explain it if memory runs out",
    "watch": "watch the memory of this machine, a process or a program, and say what grows and who keeps it",
    "estimate": "show how much memory a training or inference step will take, without a card",
    "compute": "compute an array expression on files larger than memory, inside a budget",
    "convert": "rewrite an array in another dtype or format, and report the loss of accuracy",
    "decompose": "keep a tensor larger than memory as a few small factors, with a known error",
    "shrink": "make a model smaller, and say what that costs on your data",
    "report": "make one HTML page of an answer (--json), a recording or a CUDA snapshot",
    "tour": "show what Outsize does, in under a minute",
    "completion": "print the lines that let a shell complete verbs and options: bash, zsh or fish",
}
"""Verb -> its help line, in the order they are listed: those that only look come first."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, like all other errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile("^-[^-]")  # `-x * 2` and `-1,3` are what was asked, not options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but a verb that does not exist is answered with the nearest ones."""
        word = next((word for word in args or () if not word.startswith("-")), None)
        if self.prog == "outsize" and word is not None and word not in VERBS:
            raise InputError(f"there is no verb {word!r}{suggest_verb(word)} (outsize --help lists them)")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        raise InputError(f"{message} (see {self.prog} --help)")


class _Narrow(argparse.HelpFormatter):
    """Help with room for the longest verb beside its line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)
        self._action_max_length = 14  # argparse forgets that verbs are indented twice


_MEANT = {
    "ls": "show", "info": "show", "cat": "show", "head": "show", "inspect": "show", "describe": "show", "open": "show",
    "top": "watch", "monitor": "watch", "profile": "watch", "free": "memory", "gpu": "memory", "ram": "memory",
    "why": "explain", "oom": "explain", "debug": "explain", "bytes": "size", "calc": "size", "calculate": "size", "shape": "size",
    "exec": "run", "train": "run", "python": "run", "predict": "estimate", "fit": "estimate", "plan": "compute",
    "cast": "convert", "save": "convert", "compress": "decompose", "html": "report", "demo": "tour", "help": "tour",
}  # fmt: skip
"""What people type -> the verb that does it."""


def suggest_verb(word: str) -> str:
    """`: did you mean size?`, or nothing where no verb is near."""
    import difflib  # slow to load, and only needed for a mistake

    lower = word.lower()
    begun = [verb for verb in VERBS if verb.startswith(lower) or lower.startswith(verb)]
    near = [_MEANT[lower]] if lower in _MEANT else begun or difflib.get_close_matches(lower, VERBS, n=2, cutoff=0.55)
    return f": did you mean {' or '.join(near)}?" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say  # type: ignore[assignment]
            status = _dispatch(words)
            sys.stdout.flush()  # what cannot be written is told here, not by Python at exit
            return status
    except InputError as error:
        return _complain(error, status=2)
    except OutsizeError as error:
        return _complain(error, status=1)
    except KeyboardInterrupt as error:
        return _complain("; ".join(["interrupted", *getattr(error, "__notes__", ())]), status=130)
    except BrokenPipeError:  # the reader (head, less) has gone: nothing to say, and no traceback at exit either
        _discard_output()
        return 1
    except OSError as error:  # a folder that may not be written, a full disk, a file that went away
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        where = "" if error.filename is None else f"{error.filename}: "
        return _complain(f"{where}{error.strerror or error}", status=1)


def _discard_output() -> None:
    """What is still to be written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words:
        return _welcome()
    verb = words[0] if words[0] in VERBS else None
    parser = build_parser(verb)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        asked = "outsize" if verb is None else f"outsize {verb}"
        raise InputError(f"unrecognized arguments: {' '.join(unknown)} (see {asked} --help)")
    if verb is None:
        parser.print_help()
        return 2
    return int(args.run(args))


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser with every verb's help line, and the arguments of the verb in use."""
    from outsize import __version__

    parser = Parser(
        prog="outsize", description="Tensors and models that do not fit in memory.", allow_abbrev=False,
        epilog="New here: outsize tour. Options and examples of a verb: outsize VERB --help", formatter_class=_Narrow,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"outsize {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")
    for name, line in VERBS.items():
        sub = verbs.add_parser(
            name, help=line, description=line[0].upper() + line[1:] + ".", allow_abbrev=False, epilog=show_examples(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if name == verb:
            module = importlib.import_module(f"outsize.cli.{name}")
            module.add_arguments(sub)
            sub.add_argument("--json", action="store_true", help="print the same answer as JSON")
            sub.set_defaults(run=module.run)
    return parser


def _welcome() -> int:
    """`outsize` alone: the memory here, and the verbs."""
    from outsize import report
    from outsize.machine import memory

    report.show(memory())
    report.show_verbs(VERBS)
    return 0


def _say(warning: object, *_: object) -> None:
    """Show a warning as `outsize: ...`, like all other messages, without the source line that raised it."""
    _complain(warning, status=0)


def _complain(error: object, status: int) -> int:
    print(f"outsize: {error}", file=sys.stderr)  # noqa: T201
    return status
