"""Gives the slices of a batch the random numbers that the whole batch would draw.

In: `Draw`s, what a step draws in what order and along which axis samples lie in each, as a few samples show; then slices. Out:
operators that draw as many numbers as the whole batch would, from generators that begin anew with every slice, and give the rows
of this slice. So dropout masks, noise and time steps are those of the plain step, and what follows is equal up to rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.model.fitting.run.random_sources import draws, name_arguments
from outsize.model.torch_port.dispatch import arguments_of, seeing

FILLING = {
    "bernoulli_.float", "normal_.default", "uniform_.default", "exponential_.default", "geometric_.default", "cauchy_.default",
    "log_normal_.default", "random_.default", "random_.to", "random_.from",
}  # fmt: skip
"""Operators that fill a tensor, whatever it held."""

MAKING = ("rand.", "randn.", "randint.", "normal.float_float")
"""Beginnings of the names of operators that make a tensor of a size."""

LIKE = ("rand_like.", "randn_like.", "randint_like.", "bernoulli.p")
"""Beginnings of those that make a tensor like another."""


@dataclass(frozen=True, slots=True)
class SeenDraw:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of a step, whatever the number of samples."""

    name: str
    axis: int | None
    """The axis along which samples lie; None: they share the draw."""


def see_draw(func: Any, out: Any) -> SeenDraw:
    first = out[0] if isinstance(out, tuple | list) else out
    return SeenDraw(str(func).partition(".")[2], tuple(first.shape))


def compare_draws(many: Sequence[SeenDraw], one: Sequence[SeenDraw], rows: int) -> tuple[Draw, ...] | None:
    """What `rows` samples and one sample drew, told apart; None where slices cannot be given what the whole draws."""
    if len(many) != len(one):
        return None
    found: list[Draw] = []
    for whole, single in zip(many, one, strict=True):
        pairs = list(zip(whole.shape, single.shape, strict=False))
        others = [axis for axis, (more, less) in enumerate(pairs) if more != less]
        known = whole.name in FILLING or whole.name.startswith((*MAKING, *LIKE, "native_dropout."))
        if whole.name != single.name or len(whole.shape) != len(single.shape) or len(others) > 1:
            return None
        # what all share may be anything
        if others and (not known or pairs[others[0]][0] != rows * pairs[others[0]][1]):
            return None
        found.append(Draw(whole.name, others[0] if others else None))
    return tuple(found)


class Replay:
    """Draws of slices, taken from those of the whole. Its place in their order is a state that a second run goes back to."""

    def __init__(self, draws: tuple[Draw, ...]) -> None:
        self.draws = draws
        self._next = 0
        self._run = (0, 0, 0)

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state

    @contextlib.contextmanager
    def running(self, start: int, stop: int, rows: int) -> Iterator[None]:
        """Samples `start` to `stop` of `rows` run."""
        self._next, self._run = 0, (start, stop, rows)

        with seeing(self._draw):
            yield

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        name = str(func).partition(".")[2]
        draw = self.draws[self._next] if self._next < len(self.draws) else None
        self._next += 1
        if draw is None or draw.name != name:
            raise self._lost(name)
        if draw.axis is None:
            return func(*args, **kwargs)
        return self._slice(draw, func, args, kwargs)

    def _slice(self, draw: Draw, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw for the whole batch, and give this slice's rows."""
        axis, (start, stop, rows) = draw.axis, self._run
        assert axis is not None
        given = name_arguments(func, args, kwargs)
        shaping = next(name for name in ("size", "input", "self") if name in given)
        like = given[shaping]
        shape = list(like if shaping == "size" else like.shape)
        each, rest = divmod(shape[axis], stop - start)
        if rest:
            raise self._lost(draw.name)

        def part(whole: Any) -> Any:
            return whole.narrow(axis, start * each, (stop - start) * each)

        shape[axis] = each * rows
        whole = shape if shaping == "size" else grow(like, shape)
        position = [argument.name for argument in arguments_of(func)].index(shaping)
        drawn = func(*args[:position], whole, *args[position + 1 :], **kwargs)
        if draw.name.startswith("native_dropout"):
            mask = part(drawn[1]).clone(memory_format=torch.contiguous_format)
            kept = 1.0 - given["p"]
            return like * mask * (1.0 / kept if kept else 0.0), mask
        return like.copy_(part(drawn)) if draw.name in FILLING else part(drawn).clone()

    def _lost(self, name: str) -> InputError:
        return InputError(
            f"the step draws random numbers ({name}) otherwise than when it was planned, so that slices cannot be given those of "
            "the whole batch: fit with without=('slices',), or with allow='distribution' to let slices draw their own"
        )


def grow(tensor: Any, shape: list[int]) -> Any:
    """An empty tensor of another size, whose axes lie in memory in the same order."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    made = torch.empty([shape[axis] for axis in order], dtype=tensor.dtype, device=tensor.device)
    back = [order.index(axis) for axis in range(tensor.dim())]
    return made.permute(back) if math.prod(shape) else made
