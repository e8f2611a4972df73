"""Generators of random numbers that a step may draw from beside torch's own: Python's, NumPy's, and those it is given.

In: nothing, or a block that draws. Out: sources with the same two methods as a `torch.Generator`, so that a second run of a
module and a second comparison draw what the first did, and planning leaves all of them as it found them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from outsize.model.torch_port.dispatch import arguments_of


class Python:
    """The generator behind `random.random()`."""

    name = "Python's random"

    def get_state(self) -> Any:
        return random.getstate()

    def set_state(self, state: Any) -> None:
        random.setstate(state)


class NumPy:
    """The generator behind `numpy.random.rand()`."""

    name = "numpy.random"

    def get_state(self) -> Any:
        import numpy as np

        state: Any = np.random.get_state(legacy=True)
        kind, numbers, *rest = state
        return (kind, numbers.tobytes(), *rest)

    def set_state(self, state: Any) -> None:
        import numpy as np

        kind, numbers, *rest = state
        np.random.set_state((kind, np.frombuffer(numbers, dtype=np.uint32), *rest))


GLOBAL: tuple[Any, ...] = (Python(), NumPy())
"""Those that any code may draw from; modules that torch is silent about (masks, layers left out by chance) do."""


@contextlib.contextmanager
def same_draws(sources: Iterable[Any] = ()) -> Iterator[None]:
    """Torch's generators, the global ones and `sources` are afterwards as they were before."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    states = [(source, source.get_state()) for source in dict.fromkeys((*GLOBAL, *sources))]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for source, state in states:
            source.set_state(state)


class Drawn:
    """Sources that were drawn from while it was watched."""

    def __init__(self) -> None:
        self._global = [(source, source.get_state()) for source in GLOBAL]
        self._given: dict[Any, Any] = {}

    def meet(self, generator: Any) -> None:
        """An operator is about to draw from a generator that it was given."""
        if generator is not None and generator is not torch.default_generator and generator not in self._given:
            self._given[generator] = generator.get_state()

    def sources(self) -> tuple[Any, ...]:
        """Those that moved since."""
        return (*(source for source, before in self._global if source.get_state() != before), *self._given)

    def put_back(self) -> None:
        """The generators that operators were given are as they were."""
        for generator, state in self._given.items():
            generator.set_state(state)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """True where the result of an operator depends on random numbers.

    Attention, recurrent layers and dropout are marked as random, and draw only in training and where they drop; a draw that
    comes out one way with certainty is none.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = name_arguments(func, args, kwargs)
    if not given.get("train", True) or not given.get("training", True):
        return False
    if func.overloadpacket.__name__.startswith("bernoulli"):
        return not _is_certain(given.get("p", given["self"]))
    return bool(given.get("dropout_p", given.get("dropout", given.get("p", 1.0))))


def name_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Name -> value of what an operator was given, or takes where it was not."""
    schema = arguments_of(func)
    usual = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**usual, **dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}


def _is_certain(chance: Any) -> bool:
    """True for a chance, or chances, of zero and one."""
    if not isinstance(chance, torch.Tensor):
        return chance in (0, 1)
    plain = type(chance) in (torch.Tensor, torch.nn.Parameter) and not chance.is_meta
    return plain and bool(((chance == 0) | (chance == 1)).all())
