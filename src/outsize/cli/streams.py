"""The standard streams as they were given: closed ones lead nowhere, and what an encoding lacks is written plainly.

A service starts commands without streams, and a terminal may not know the characters that bars and frames are drawn with;
an answer is no less an answer there.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

_PLAIN = {"█": "#", "░": ".", "·": ".", "│": "|", "└": "+", "─": "-", "×": "x", "…": "."}
"""What is drawn -> what ASCII has for it."""


def prepare_streams() -> None:
    """Make the streams of this process fit to be written to."""
    codecs.register_error("outsize", _write_plainly)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process is
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="outsize")


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    plain = (_PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode() for character in missing)
    return "".join(plain), error.end
