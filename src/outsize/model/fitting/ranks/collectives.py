"""The collective calls of a pass: noted while it runs, and answered for a pass that has failed.

In: a pass that gathers weights and reduces gradients with its peers. Out: the list of what it called. A rank that fails in the
middle of a pass would leave its peers waiting in the next call, so it goes on to answer all that are left with zeros; what the
peers make of them is thrown away by all. The calls of a slice are known from the same slice of a few samples, which runs
before any plan is used. A trace without contents makes the calls and sends nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from outsize.core.errors import OutsizeError
from outsize.model.torch_port.dispatch import map_tensors, tensors_in
from outsize.model.torch_port.objects import holders_of, storage_key
from outsize.model.torch_port.patches import replaced
from outsize.model.torch_port.ranked import COLLECTIVES

LATE = 5.0
"""Seconds that the other end of a call on the host is given to let go of its tensors."""


Pausing = Callable[[], contextlib.AbstractContextManager[None]]
"""Gloo copies what it reduces and lets go of the copy in a thread of its own, which whoever measures would not see."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Enough of a tensor to stand in for it."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call, without its tensors."""

    name: str
    args: Any
    kwargs: Any

    @classmethod
    def of(cls, name: str, args: Any, kwargs: Any) -> Call:
        """What was called with what kind of tensors."""
        outline = lambda t: Shape(tuple(t.shape), t.dtype, t.device)  # noqa: E731
        return cls(name, map_tensors(outline, args), map_tensors(outline, kwargs))

    def answer(self) -> None:
        """Make the same call with zeros."""

        def zeros(value: Any) -> Any:
            if isinstance(value, Shape):
                return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            if isinstance(value, list | tuple):
                return type(value)(zeros(item) for item in value)
            return value

        given = {name: zeros(value) for name, value in self.kwargs.items() if name != "async_op"}
        getattr(dist, self.name)(*zeros(self.args), **given)


class Collectives:
    """What the slices of a pass call, for one way to run them."""

    def __init__(self) -> None:
        self._slices: list[list[Call]] = []
        """Those of the pass that runs, or ran last."""
        self._inner: list[Call] | None = None
        """Those of a slice that others follow; None: not known yet."""
        self._last: list[Call] | None = None
        """Those of the last slice."""
        self._depth = 0
        self._pausing: Pausing = contextlib.nullcontext

    @contextlib.contextmanager
    def noting(self, pausing: Pausing = contextlib.nullcontext) -> Iterator[None]:
        """Note what is called while the block runs; `pausing()`: around each call nobody measures."""
        self._slices, self._pausing = [], pausing
        with replaced(
            [(dist, name, self._noted(name, vars(dist)[name])) for name in COLLECTIVES if name in vars(dist)]
        ):
            yield

    def begin_slice(self) -> None:
        """The calls that follow are those of another slice."""
        self._slices.append([])

    def learn(self) -> None:
        """The pass was whole: its slices tell what others call."""
        *before, last = self._slices
        self._inner, self._last = (before[-1] if before else self._inner), last

    def answer_rest(self, slices: int) -> None:
        """The pass of so many slices has failed here: answer what its peers still call."""
        if self._last is None or (slices > 1 and self._inner is None):
            raise OutsizeError("a pass failed before any was whole on this rank, so its peers cannot be answered")
        begun = max(1, len(self._slices))
        made = len(self._slices[-1]) if self._slices else 0
        for number in range(begun - 1, slices):
            calls = self._last if number == slices - 1 else self._inner
            for call in (calls or [])[made:]:
                call.answer()
            made = 0

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            try:
                tensors = [t for t in tensors_in((args, kwargs)) if t.device.type == "cpu"]
                before = [(storage_key(t), holders_of(storage_key(t))) for t in tensors]
                with self._pausing():
                    out = function(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._slices:
                self._slices[-1].append(Call.of(name, args, kwargs))
            if out is None:
                _let_go(before)
            return out

        return call


def _let_go(before: list[tuple[int, int]]) -> None:
    """Gloo's thread may hold the tensors of a finished call a moment longer: whoever measures would see them freed elsewhere."""
    until = time.monotonic() + LATE
    while any(holders_of(key) > holders for key, holders in before) and time.monotonic() < until:
        time.sleep(0)
