"""Ctrl-C in the middle of an update waits until the update is whole.

In: an update that changes one parameter after the other. Out: the same, with an interrupt held back until `let_go`: stopped
anywhere else a step leaves everything as it was, but half an update is neither the old weights nor the new ones.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """Those that came while they were held back."""

    def __init__(self) -> None:
        self._came: tuple[Any, ...] = ()
        self._handler: Any = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Note an interrupt instead of raising it; only the main thread gets any."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def _note(self, *came: Any) -> None:
        self._came = came

    def let_go(self) -> None:
        """Now it may do what it was meant to."""
        came, self._came = self._came, ()
        if came:
            self._handler(*came)
