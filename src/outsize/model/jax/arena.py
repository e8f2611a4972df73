"""The part of a card that XLA takes for itself when a program starts.

In: a card, the environment. Out: the bytes of XLA's arena, and a sentence about it. XLA takes a fraction of the card at the
start (0.75). Without preallocation it grows up to the same fraction. With the platform allocator there is no arena.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from outsize.allocator import most_lost as lost
from outsize.allocator.bfc import QUANTUM
from outsize.core.cards import Card
from outsize.core.errors import InputError
from outsize.core.units import format_bytes

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


def arena_of(card: Card, environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of a card that a program of JAX may use."""
    if environment.get(ALLOCATOR, "").lower() == "platform":
        return card.usable
    return min(card.usable, int(card.total * fraction(environment)))


def fraction(environment: Mapping[str, str] = os.environ) -> float:
    """The part of the card that is the arena."""
    said = environment.get(FRACTION) or "0.75"
    try:
        found = float(said)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise InputError(f"{FRACTION}={said} is no part of the card: give a number above 0 and up to 1, such as 0.9")
    return found


def preallocates(environment: Mapping[str, str] = os.environ) -> bool:
    """True where the arena is taken at the start."""
    platform = environment.get(ALLOCATOR, "").lower() == "platform"
    return not platform and environment.get(PREALLOCATE, "true").lower() not in ("false", "0")


def explain(card: Card, environment: Mapping[str, str] = os.environ) -> str:
    """What was assumed of the card."""
    arena = format_bytes(arena_of(card, environment))
    if environment.get(ALLOCATOR, "").lower() == "platform":
        return f"{ALLOCATOR}=platform: XLA asks the driver for every block, so all of {arena} can be used"
    how = "takes" if preallocates(environment) else "grows to at most"
    return (
        f"XLA {how} {fraction(environment):.0%} of the {card.name}, {arena}: that is what has to hold the step. {FRACTION}=0.95 "
        "before the start makes it larger"
    )


def most_lost(arguments: Sequence[int], results: Sequence[int], donated: int, temporaries: int, code: int = 0) -> int:
    """Most bytes that the arena's chunks have above what is asked of them.

    Each argument, each result and the block of temporaries is a chunk. Results in donated arguments are no new chunks: what the
    others lose is at most as much again as they take.
    """
    new = sum(results) - donated + QUANTUM * len(results)
    return sum(map(lost, arguments)) + min(sum(map(lost, results)), new) + lost(temporaries) + lost(code)
