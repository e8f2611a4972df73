"""The interface of a running trace for the rules in this room.

Out: `Trace`, the part of the tracer that rules for single operators use. The tracer imports its rules, so they cannot
import the tracer; they know only this protocol.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from outsize.model.tracing.autocast import Autocast
from outsize.model.tracing.records.attribution import Owners
from outsize.model.tracing.records.ledger import Held, Ledger


class Trace(Protocol):
    """A trace that is running."""

    ledger: Ledger
    """Every storage that it has seen."""
    owners: Owners
    """Which module and which line is at work."""
    device: str
    """Label of the device on which the step runs."""
    capability: tuple[int, int]
    """Compute capability of the card."""
    autocasts: dict[str, Autocast]
    """What autocast does on a card (`cuda`) and on the host (`cpu`)."""
    guessing: bool
    """The lengths of the sequences that were packed last are not known."""
    alone: bool
    """The script of this process decides on its device: on the host there is no card to be found."""
    keep: int
    """The most elements of a tensor whose contents are kept."""
    counted: bool
    """True once a count of something was read that is not known."""
    chance: bool
    """True once a number that was drawn in a step was read on the host: it may be a length."""
    drew: bool
    """True once whole numbers were drawn on the host."""
    in_linear: bool
    """True while a linear layer runs its forward pass."""

    @property
    def card(self) -> str: ...
    def on_card(self, tensor: Any) -> bool: ...
    def on_host(self, tensor: Any) -> bool: ...
    def guess(self, sentence: str) -> None: ...
    def note_value(self, what: str, held: Held | None, guess: bool = False) -> None: ...
    def placing(self, label: str) -> AbstractContextManager[None]: ...
    def adopt(self, tensor: Any) -> Any: ...
    def take_over(self, tensor: Any) -> Any: ...
    def real_value(self, tensor: Any, what: str) -> Any: ...
    def known_like(self, real: Any, label: str) -> Any: ...
    def compile(self, model: Any = None, *args: Any, **kwargs: Any) -> Any: ...
