"""What a followed script may not do outside its process: write, send, download, start other programs.

In: Python's audit events, which also come from libraries. Out: an `OSError` for each such try, as if the network were down or the
program not installed, and a list of the tries. Python has no way to take an audit hook off again, so it has a switch.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from outsize.model.scripts.overlay import WRITING, Overlay

NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind")
PROGRAMS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
)  # fmt: skip
CHANGES = {
    "os.remove": (0,), "os.rename": (0, 1), "os.mkdir": (0,), "os.rmdir": (0,), "os.truncate": (0,), "os.link": (1,),
    "os.symlink": (1,), "sqlite3.connect": (0,),
}  # fmt: skip
"""Event -> which of its arguments are paths that change."""


class Outside:
    """Keeps a script inside its process and its overlay."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.refused: dict[str, None] = {}
        """Sentences about what the script tried, in order."""
        self.network = ""
        """The last address that was asked for."""

    def install(self) -> None:
        """Refuse from now on, until the overlay is off."""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.overlay.off or ("." not in event and event != "open"):
            return
        # a look at what is there
        if event in NETWORK and not (event == "socket.bind" and _address(event, args).endswith(":0")):
            self.network = _address(event, args)
            self._say(f"the script asked for the network ({self.network}): nothing is sent or downloaded")
            raise OSError(
                errno.ENETUNREACH, "Network is unreachable: nothing is sent or downloaded while a script is followed"
            )
        if event in PROGRAMS:
            name = os.path.basename(os.fsdecode(_first_word(args)))
            self._say(f"the script wanted to start {name or 'another process'}: it was not started")
            raise FileNotFoundError(errno.ENOENT, "no other program is started while a script is followed", name)
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
            self._check(args[0])
        for place in CHANGES.get(event, ()):
            self._check(args[place])

    def _check(self, path: Any) -> None:
        """A change that went past the overlay is refused."""
        if isinstance(path, str | bytes | os.PathLike) and path != ":memory:" and self.overlay.covers(path):
            raise PermissionError(errno.EPERM, "nothing is written while a script is followed", os.fsdecode(path))

    def _say(self, sentence: str) -> None:
        self.refused.setdefault(sentence)


def _address(event: str, args: tuple[Any, ...]) -> str:
    where = args[0] if event.startswith("socket.get") else args[1]
    return ":".join(str(part) for part in where[:2]) if isinstance(where, tuple) else os.fsdecode(where or "?")


def _first_word(args: tuple[Any, ...]) -> Any:
    first = args[0] if args else ""
    if first is None and len(args) > 1:  # the program is the first word of its arguments
        first = args[1]
    if isinstance(first, list | tuple):
        first = first[0] if first else ""
    return str(first).split()[0] if isinstance(first, str) and first.split() else first or ""
