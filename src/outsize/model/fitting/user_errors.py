"""Errors and warnings of the user's own function, told from ours.

In: a block that runs the user's loss or model. Out: its result, or an `InputError` of one sentence that names the user's error,
which comes with it; what it warns of, once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outsize.core.errors import InputError, OutsizeError
from outsize.model.fitting.move.out_of_memory import is_out_of_memory

HERE = Path(__file__).parents[2]
"""The package."""


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


@contextlib.contextmanager
def warning_once(function: Callable[..., Any] | None) -> Iterator[None]:
    """Planning runs the user's `function` several times: what it warns of comes once, and under its name and not under ours."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        code = getattr(function, "__code__", None)
        for warning in {(one.category, str(one.message)): one for one in reversed(caught)}.values():
            place = warning.filename, warning.lineno
            if code is not None and Path(warning.filename).is_relative_to(HERE):
                place = code.co_filename, code.co_firstlineno
            warnings.showwarning(warning.message, warning.category, *place)
