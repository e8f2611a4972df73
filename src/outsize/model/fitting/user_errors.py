"""Errors of the user's own function, told from ours.

In: a block that runs the user's loss or model. Out: its result, or an `InputError` of one sentence that names the user's error,
which comes with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from outsize.core.errors import InputError, OutsizeError
from outsize.model.fitting.move.out_of_memory import is_out_of_memory


@contextlib.contextmanager
def in_users_code(what: str) -> Iterator[None]:
    """An error of the user's own function, in one sentence; the error itself comes with it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutsizeError) or is_out_of_memory(error):
            raise
        raise InputError(f"{what} failed with {say(error)}") from error


def say(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
