"""Sees what a step does while it runs, on tensors with contents or without.

In: operators as the dispatcher sees them, calls of modules. Out: which operators drew random numbers and from where, which
modules ran and wrote into their inputs, which parameters of a model that visits were used while they were away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from outsize.model.fitting.move.visits import Visits
from outsize.model.fitting.recipes.operators import kind_of
from outsize.model.fitting.run.random_sources import Drawn, draws
from outsize.model.fitting.run.replayed_draws import SeenDraw, see_draw
from outsize.model.torch_port.dispatch import in_backward, seeing, tensors_in
from outsize.model.torch_port.objects import around_modules, storage_key, version_of


class Recorder:
    def __init__(self, visits: Visits | None = None) -> None:
        """`visits`: of a model that visits a device."""
        self.random: dict[str, None] = {}
        """Operators that drew random numbers, with the module they ran in."""
        self.draws: list[SeenDraw] = []
        """What they drew, in order."""
        self.drawn = Drawn()
        """Generators beside torch's that were drawn from."""
        self.calls: dict[str, int] = {}
        """How often each module ran."""
        self.writing: set[str] = set()
        """Modules that change what they are given in place."""
        self.operators: dict[str, set[str]] = {}
        """Operators that each module called in the forward pass; under the empty name those outside of all."""
        self.lower = False
        """Something was computed in a type of fewer than 32 bits."""
        self.outside: dict[int, None] = {}
        """ids of parameters whose proxies were used while they had no data."""
        self._proxies = {id(proxy): key for key, proxy in visits.proxies.items()} if visits is not None else {}
        self._blanks = visits.blanks if visits is not None else set()
        self._stack: list[str] = []
        self._given: list[list[tuple[Any, int]]] = []
        """Tensors that modules on the stack were given, and how often each had been written."""
        self._names: dict[int, str] = {}

    @contextlib.contextmanager
    def watching(self, model: Any = None) -> Iterator[None]:
        """See the block's operators, and the modules of a model."""
        self._names = {id(child): name for name, child in model.named_modules()} if model is not None else {}

        def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            self._before(func, args, kwargs)
            out = func(*args, **kwargs)
            self._after(func, args, kwargs, out)
            return out

        with around_modules(self._enter, self._leave, always=True), seeing(call):
            yield

    def _before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if "generator" in kwargs:
            self.drawn.meet(kwargs["generator"])
        if self._proxies and func.namespace == "aten":
            for leaf in tensors_in((args, kwargs)):
                if id(leaf) in self._proxies and storage_key(leaf) in self._blanks:
                    self.outside.setdefault(self._proxies[id(leaf)])

    def _after(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if draws(func, args, kwargs):
            place = self._stack[-1] if self._stack else ""
            self.random.setdefault(f"{func.overloadpacket.__name__}{f' in {place}' if place else ''}")
            self.draws.append(see_draw(func, out))
        kind = kind_of(func)
        if not kind.view and not in_backward():
            self.operators.setdefault(self._stack[-1] if self._stack else "", set()).add(kind.base)
        self.lower |= any(leaf.dtype.is_floating_point and leaf.element_size() < 4 for leaf in tensors_in(out))

    def _enter(self, module: Any, args: Any) -> None:
        self._given.append([(value, version_of(value)) for value in args if isinstance(value, torch.Tensor)])
        name = self._names.get(id(module))
        self._stack.append(name if name is not None else (self._stack[-1] if self._stack else ""))
        if name is not None:
            self.calls[name] = self.calls.get(name, 0) + 1

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
            name = self._names.get(id(module))
            if any(version_of(tensor) != before for tensor, before in self._given.pop()) and name is not None:
                self.writing.add(name)


@contextlib.contextmanager
def watching(visits: Visits) -> Iterator[Recorder]:
    """See a model that visits; generators of the user's own that it draws from are put back in the end."""
    seen = Recorder(visits)
    try:
        with seen.watching():
            yield seen
    finally:
        seen.drawn.put_back()
