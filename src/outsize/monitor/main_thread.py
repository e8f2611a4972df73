"""Runs a function in the main thread, between two of the program's instructions, from any thread.

Python has a list of such calls for signal handlers and the like (`Py_AddPendingCall`). A main thread that is inside a
long call of C code takes none: after a moment the function is withdrawn.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable

_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_PATIENCE = 2.0
"""Seconds to wait for the main thread."""
_waiting: list[object] = []
"""Calls that Python may still make: their memory must stay."""


def run_in_main_thread(function: Callable[[], None]) -> None:
    """Run a function in the main thread and wait for it; where that takes too long, it is not run."""
    if threading.current_thread() is threading.main_thread():
        function()
        return
    lock, begun, ended = threading.Lock(), [False], threading.Event()

    def call(_: object) -> int:
        with lock:
            if begun[0]:
                return 0
            begun[0] = True
        try:
            function()
        except Exception as error:  # Python would end the program's own instruction with it
            warnings.warn(f"outsize: {error!r} in the program's thread", RuntimeWarning, stacklevel=1)
        finally:
            ended.set()
        return 0

    pending = _CALL(call)
    _waiting.append(pending)
    if ctypes.pythonapi.Py_AddPendingCall(pending, None) == 0 and not ended.wait(_PATIENCE):
        with lock:
            withdrawn = not begun[0]
            begun[0] = True
        if not withdrawn:
            ended.wait(_PATIENCE)
    if ended.is_set():
        _waiting.remove(pending)
