"""Text -> the programs that it shows, the most telling first."""

from __future__ import annotations

from outsize.failure.program import Program
from outsize.failure.program_models import MODELS
from outsize.failure.program_tools import BIOLOGY, BUILDS, DATA, MANAGERS, PLACES, SERVICES

PROGRAMS = (*MODELS, *DATA, *BIOLOGY, *BUILDS, *SERVICES)
"""Every program, those that say most of the work first."""


def programs_of(text: str, framework: str) -> tuple[Program, ...]:
    """Programs that the text shows, where that framework failed."""
    return tuple(row for row in PROGRAMS if row.only in ("", framework) and row.signs.search(text) is not None)


def managers_of(text: str) -> tuple[Program, ...]:
    """What started the program and asks for memory on its behalf."""
    return tuple(row for row in MANAGERS if row.signs.search(text) is not None)


def places_of(text: str) -> tuple[Program, ...]:
    """Where the program ran: a cluster, a container, a build server."""
    return tuple(row for row in PLACES if row.signs.search(text) is not None)
