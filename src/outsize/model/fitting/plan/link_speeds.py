"""How fast the machine is between its parts: measured, not guessed.

In: a mover, an optimizer. Out: `Rates`: bytes a second in each direction of the link (alone and both at once), and how many
bytes of parameters a second the user's optimizer updates on the host and on the device. A fraction of a second in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.core.noun import Noun
from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import CardMover, Mover
from outsize.model.fitting.move.out_of_memory import clear_up
from outsize.model.fitting.plan.dry_run import copy_optimizer

SAMPLE = 128 * 2**20
"""Bytes of one measured copy at most."""
ELEMENTS = 8 * 2**20
"""Elements of the parameter on which optimizers are timed."""

TYPICAL = {"cpu": (8e9, 8e9, 1e9), "cuda": (5e10, 5e10, 3e9)}
"""In, out, update on the host in bytes a second: what is assumed where nothing is measured (a dry run without the device)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(Noun):
    """Bytes a second."""

    bring: float
    """Host to device."""
    send: float
    """Device to host."""
    both: float
    """Each direction while the other runs too."""
    host: float
    """Bytes of parameters that the optimizer updates on the host."""
    measured: bool
    """False where they are typical ones."""
    read: float = 0.0
    """From the scratch file; 0 where there is none."""
    write: float = 0.0
    """To it."""


def typical(kind: str) -> Rates:
    """Assumed rates, where nothing can be measured."""
    bring, send, host = TYPICAL[kind]
    return Rates(bring=bring, send=send, both=0.9 * min(bring, send), host=host, measured=False)


def measure(mover: Mover, optimizer: Any, room: int = 8 * SAMPLE) -> Rates:
    """Time a few copies and a few updates; `room` is the device's budget, of which a quarter is used meanwhile."""
    if not isinstance(mover, CardMover):
        return typical("cpu")
    size = max(1, min(SAMPLE, room // 8))
    block = Block(2 * size)
    there = [mover.empty(size), mover.empty(size)]
    here = [block.bytes[:size], block.bytes[size:]]

    def bring() -> None:
        mover.bring(there[0], here[0])

    def send() -> None:
        mover.send(here[1], there[1])

    def both() -> None:
        bring()
        send()

    found = [size / _time(work, mover) for work in (bring, send, both)]
    block.unlock()
    there.clear()
    clear_up()  # what comes next must not begin in a piece of these blocks, which could then not be given back
    host = typical("cuda").host if optimizer is None else time_optimizer(optimizer, "cpu")
    return Rates(bring=found[0], send=found[1], both=found[2], host=host, measured=True)


def _time(work: Callable[[], None], mover: Mover) -> float:
    work()
    mover.drain()
    start = time.perf_counter()
    for _ in range(3):
        work()
    mover.drain()
    return (time.perf_counter() - start) / 3


def time_optimizer(optimizer: Any, device: str, elements: int = ELEMENTS) -> float:
    """Bytes of parameters a second that a copy of the user's optimizer updates."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    copied = copy_optimizer(optimizer, [{**optimizer.param_groups[0], "params": [parameter]}])
    copied.step()
    start = time.perf_counter()
    copied.step()
    copied.step()
    return 2 * 4 * elements / (time.perf_counter() - start)
