"""Memory of a forward pass, kept or made again: the graph of recipes.

In: calls of operators with their arguments. Out: nodes. A node is what a storage held at one time. A `Source` is there: it is
kept, or waits elsewhere. A `Made` is not: its `Call` runs again where somebody asks for it, after those that its arguments
need. Views need no recipe: they are places in a storage (`Place`). What was computed on the way and will be asked for later
stays until then, so that a chain runs once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from outsize.model.fitting.recipes.operators import LIKE, Kind
from outsize.model.torch_port.dispatch import below_autocast, no_functions, same_memory
from outsize.model.torch_port.objects import version_of

CHANGED = (
    "a tensor that the backward pass needs was changed in place after the forward pass had used it (a write to a tensor of shape "
    "{}): let that write work on a copy"
)
"""What autograd says of a saved tensor, for one that a recipe starts from."""

Place = tuple[Any, int, Any, Any]
"""(type, offset, shape, strides) in a storage."""


def place_of(tensor: Any) -> Place:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


class Source:
    """Memory that recipes start from."""

    __slots__ = ("__weakref__", "_fetch", "_tensor", "_version")

    def __init__(self, tensor: Any, fetch: Callable[[], Any] | None = None) -> None:
        """`tensor`: any on this memory, without a graph; `fetch`: gives such a tensor, where it waits elsewhere."""
        self._tensor: Any = None if fetch is not None else tensor
        self._fetch = fetch
        self._version = version_of(tensor)

    def bring(self) -> Any:
        if self._fetch is not None:
            return self._fetch()
        if version_of(self._tensor) != self._version:
            raise RuntimeError(CHANGED.format(tuple(self._tensor.shape)))
        return self._tensor

    def save_from_write(self) -> None:
        """Somebody is about to write it: what it holds now is kept in a copy."""
        if self._fetch is None:
            self._tensor = clone_storage(self._tensor)
            self._version = version_of(self._tensor)


class Made:
    """Memory that a call makes."""

    __slots__ = ("__weakref__", "call", "found", "index", "waiting")

    def __init__(self, call: Call, index: int) -> None:
        self.call = call
        self.index = index
        """Which of the call's results."""
        self.waiting = 0
        """How many will still ask for it."""
        self.found: Any = None
        """A tensor on it, made again for one who asked before them."""


Node = Source | Made

Placing = Callable[[], AbstractContextManager[Any]]
"""A context in which a call makes its results where its first run did."""


@dataclass(slots=True, eq=False)
class Argument:
    """A tensor among the arguments of a call."""

    node: Node
    place: Place


class Call:
    """One call of an operator, which can be made again."""

    __slots__ = ("args", "gradients", "inputs", "kind", "kwargs", "made", "placing", "random", "states")

    def __init__(self, kind: Kind, args: Any, kwargs: Any, inputs: list[Argument], random: list[Any]) -> None:
        self.kind = kind
        self.args = args
        """With an `Argument` for each tensor."""
        self.kwargs = kwargs
        self.inputs = inputs
        self.random = random
        """Generators that it draws from."""
        self.states = [generator.get_state() for generator in random]
        self.gradients = torch.is_grad_enabled()
        """Whether gradients were on: recurrent layers of the CPU look, and give more."""
        self.made: list[weakref.ref[Made]] = []
        """Its results that recipes may make, which hold it."""
        self.placing: Placing = contextlib.nullcontext
        """Where it runs: without contents a tensor lies somewhere else than it seems to."""

    def see(self, out: Any) -> None:
        """The first call has given this."""

    def run(self, bring: Callable[[Argument], Any]) -> list[Any]:
        """Call the operator again: tensors, in the order of its results."""
        args, kwargs = _filled(self.args, bring), _filled(self.kwargs, bring)
        before = [generator.get_state() for generator in self.random]
        try:
            for generator, state in zip(self.random, self.states, strict=True):
                generator.set_state(state)
            with torch.set_grad_enabled(self.gradients), self.placing():
                out = self.kind.func(*args, **kwargs)
        finally:
            for generator, state in zip(self.random, before, strict=True):
                generator.set_state(state)
        return [args[0]] if self.kind.writes_first else list(out) if isinstance(out, tuple | list) else [out]


class Blank(Call):
    """A call that gives a tensor like another, of which it needs the shape only."""

    __slots__ = ("like",)

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind, (), {}, [], [])
        self.like: Any = None

    def see(self, out: Any) -> None:
        self.like = out.shape, out.stride(), out.dtype, out.device

    def run(self, bring: Callable[[Argument], Any]) -> list[Any]:
        shape, strides, dtype, device = self.like
        with self.placing():
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        value = LIKE[self.kind.base]
        return [made if value is None else made.fill_(value)]


def _filled(value: Any, bring: Callable[[Argument], Any]) -> Any:
    """Arguments with tensors in their places."""
    if isinstance(value, Argument):
        return bring(value)
    if isinstance(value, list | tuple):
        return [_filled(item, bring) for item in value]
    if isinstance(value, dict):
        return {name: _filled(item, bring) for name, item in value.items()}
    return value


def bring(node: Node) -> Any:
    """A tensor on the memory of a node, made again where it has to be."""
    if isinstance(node, Source):
        return node.bring()
    if node.found is None:
        with below_autocast(), no_functions():  # what was noted is what the dispatcher saw
            return _make(node)
    return node.found


def _make(target: Made) -> Any:
    """Run all calls that it takes, each once; what nobody needs any more goes at once."""
    order = _in_order(target)
    needed: dict[Made, int] = {target: 1}
    for call in order:
        for node in {argument.node for argument in call.inputs}:
            if isinstance(node, Made):
                needed[node] = needed.get(node, 0) + 1
    values: dict[Made, Any] = {}
    for call in order:
        sources: dict[Node, Any] = {}

        def give(argument: Argument, call: Call = call, sources: dict[Node, Any] = sources) -> Any:
            node = argument.node
            tensor = sources.get(node)
            if tensor is None:
                if isinstance(node, Source):
                    tensor = node.bring()
                else:
                    tensor = values.get(node, node.found)
                    written = call.kind.writes_first and argument is call.inputs[0]
                    if written and (needed[node] > 1 or node.found is not None):
                        tensor = clone_storage(tensor)
                sources[node] = tensor
            return at(tensor, argument.place)

        outs = call.run(give)
        for made in filter(None, (reference() for reference in call.made)):
            if made.waiting and made.found is None and made is not target:
                made.found = outs[made.index]
            if made in needed:
                values[made] = outs[made.index]
        del outs
        for node in {argument.node for argument in call.inputs}:
            if isinstance(node, Made):
                needed[node] -= 1
                if not needed[node]:
                    values.pop(node, None)
        sources.clear()
    return values[target]


def _in_order(target: Made) -> list[Call]:
    """Calls that make it from what is there, each after those that it needs."""
    order: list[Call] = []
    seen: set[int] = set()
    stack: list[tuple[Call, bool]] = [(target.call, False)]
    while stack:
        call, ready = stack.pop()
        if ready:
            order.append(call)
            continue
        if id(call) in seen:
            continue
        seen.add(id(call))
        stack.append((call, True))
        for argument in call.inputs:
            node = argument.node
            if isinstance(node, Made) and node.found is None and id(node.call) not in seen:
                stack.append((node.call, False))
    return order


def at(tensor: Any, place: Place) -> Any:
    """The tensor at a place of another's memory."""
    return tensor if place_of(tensor) == place else same_memory(tensor, place)


def clone_storage(tensor: Any) -> Any:
    """A tensor at the same place of a copy of the memory."""
    size = tensor.untyped_storage().nbytes()
    flat = same_memory(tensor, (torch.uint8, 0, (size,), (1,)))
    return same_memory(flat.clone(), place_of(tensor))
