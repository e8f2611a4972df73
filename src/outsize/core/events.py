"""Events that a run sends while it works. A listener draws a progress bar or writes a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Noun):
    """A step begins."""

    step: str
    index: int
    """Its number, from 0."""
    steps: int
    bytes: int
    """Bytes it will move, or how many of `unit` it will do; 0 if unknown."""
    unit: str = "bytes"
    done: int = 0
    """Bytes that an earlier, interrupted run has already moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced(Noun):
    """A step moved bytes."""

    step: str
    bytes: int
    """Bytes moved, or units done, since the last such event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Noun):
    """A step ended."""

    step: str
    seconds: float


Event = Started | Advanced | Finished
Listener = Callable[[Event], None]

_default: Callable[[], Listener | None] | None = None


def set_default_listener(loader: Callable[[], Listener | None]) -> None:
    """Set the listener of runs that name none. `loader` is called at the start of each run."""
    global _default
    _default = loader


def default_listener() -> Listener | None:
    """The listener of a run that names none: the progress bar on a terminal, or none."""
    return _default() if _default else None


@contextlib.contextmanager
def told(step: str, unit: str) -> Iterator[Callable[[], None]]:
    """Announce a step of unknown length; call the function this returns for each unit that is done."""
    listener = default_listener()
    if listener is None:
        yield lambda: None
        return
    start = time.perf_counter()
    listener(Started(step=step, index=0, steps=1, bytes=0, unit=unit))
    try:
        yield lambda: listener(Advanced(step=step, bytes=1))
    finally:
        listener(Finished(step=step, seconds=time.perf_counter() - start))
