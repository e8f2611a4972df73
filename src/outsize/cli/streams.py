"""Makes the standard streams safe to write to: a closed stream discards, and missing characters are written in ASCII.

A service may start a command without streams. A terminal may lack the characters for bars and frames. The command must
answer there too.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

_PLAIN = {
    "█": "#",
    "░": ".",
    "·": ".",
    "│": "|",
    "└": "+",
    "─": "-",
    "×": "x",
    "…": ".",
    **dict(zip("▁▂▃▄▅▆▇", "_.-:=+*", strict=True)),
}
"""Character that is drawn -> ASCII for it."""


def prepare_streams() -> None:
    """Make the streams of this process safe to write to."""
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
