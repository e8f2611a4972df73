"""The live screen of `outsize watch`, its plain lines, and its keys.

rich draws it, not textual: rich is here already, and a screen that is renewed each second and knows four keys needs no
framework of widgets, events and style sheets, which would double the time of the command's start and bring ten packages.
Without a terminal, lines are printed instead.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import sys
from collections.abc import Iterator

from rich.console import Console

from outsize.core.outcomes.recording import Recording
from outsize.report.text.recording import SORTS, draw_live


class Screen:
    """A terminal that shows one recording after another."""

    def __init__(self) -> None:
        self.sort, self.frozen = SORTS[0], False
        self._plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", None)

    def show(self, recording: Recording) -> None:
        """Draw it, unless the screen is frozen."""
        if not recording.samples:
            return
        columns, rows = shutil.get_terminal_size((80, 24))
        text = render(recording, columns, self.sort, self.frozen, color=not self._plain)
        lines = text.splitlines()
        if len(lines) >= rows:  # what does not fit is left out, but not the keys
            lines = lines[: rows - 2] + lines[-1:]
        _write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")

    def press(self, key: str) -> str | None:
        """Obey a key: `quit` or `snapshot` where the caller has something to do."""
        if key in ("q", "\x03", "\x04"):
            return "quit"
        if key == "p":
            return "snapshot"
        if key == "f":
            self.frozen = not self.frozen
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        return None


def render(recording: Recording, columns: int, sort: str, frozen: bool, color: bool) -> str:
    console = Console(
        file=io.StringIO(), width=columns, force_jupyter=False, markup=False, highlight=False, legacy_windows=False,
        force_terminal=color, color_system="standard" if color else None, emoji=False,
    )  # fmt: skip
    console.print(draw_live(recording, columns, sort, frozen))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def whole_terminal() -> Iterator[None]:
    """The terminal's second screen, without a cursor; keys come at once and are not shown."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(Exception):  # no terminal to read keys from
            import termios
            import tty

            restore = termios.tcgetattr(sys.stdin.fileno())
            stack.callback(termios.tcsetattr, sys.stdin.fileno(), termios.TCSADRAIN, restore)
            tty.setcbreak(sys.stdin.fileno())
        stack.callback(_write, "\x1b[?25h\x1b[?1049l")
        _write("\x1b[?1049h\x1b[?25l\x1b[2J")
        yield


def wait_for_key(seconds: float) -> str | None:
    """A key that is pressed within some time; None where none is, or where there is no keyboard."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
        return os.read(sys.stdin.fileno(), 1).decode("latin-1") if ready else None
    except (OSError, ValueError):
        import time

        time.sleep(max(0.0, seconds))
        return None
