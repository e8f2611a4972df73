"""A forward pass whose saved tensors are kept, made again or moved, tensor by tensor.

In: the names of calls (`Sites`) that run again in the backward pass, and of those whose results wait elsewhere. Out: a
context for a forward pass. A dispatch mode sees every operator, whatever code called it: modules, functions, custom autograd
functions, the loss. Of a call that is to run again it notes the operator and its arguments; hooks give autograd a recipe in
the place of each tensor that it saves. What a recipe starts from is held. Where that is written later in the pass, it is
copied before, so that recipes always find what the first run found; a write after the pass is an error, as it is for what
autograd saves itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch

from outsize.model.fitting.recipes.nodes import (
    CHANGED,
    Argument,
    Blank,
    Call,
    Made,
    Node,
    Place,
    Placing,
    Source,
    at,
    bring,
    place_of,
)
from outsize.model.fitting.recipes.operators import Kind, Sites, kind_of
from outsize.model.torch_port.dispatch import is_functorch, same_memory, seeing, tensors_in, without_graph
from outsize.model.torch_port.objects import is_zero_tensor, key_of, version_of

ALL = "*"
"""Among the names of what waits elsewhere: all that is saved."""

LITTLE = 64
"""Of the results of one call those stay that are so many times smaller than the largest: means beside what they normalise."""

SMALL = 512
"""Bytes below which nothing moves. A copy is worth more, but a trace may take a tensor for larger than it is, and for moved."""


PLAIN = (torch.Tensor, torch.nn.Parameter)

STRIDED = torch.strided


class Elsewhere(Protocol):
    """Where saved tensors wait."""

    def keep(self, tensor: Any) -> Any:
        """Take a tensor there."""

    def bring(self, kept: Any) -> Any:
        """Bring it back; the same one for all who ask while it lives."""


class Kept:
    """A saved tensor that stays, and how often it had been written."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Any) -> None:
        weight = tensor.requires_grad and tensor.grad_fn is None
        self.tensor = tensor if weight else without_graph(tensor)  # a result would hold the graph that holds it
        self.version = None if tensor.is_inference() else version_of(tensor)

    def unpack(self) -> Any:
        """The tensor, where it is what it was."""
        if self.version is not None and version_of(self.tensor) != self.version:
            raise RuntimeError(CHANGED.format(tuple(self.tensor.shape)))
        return self.tensor


class Recipe:
    """A saved tensor that is not there."""

    __slots__ = ("node", "place")

    def __init__(self, node: Node, place: Place) -> None:
        self.node = node
        self.place = place
        if isinstance(node, Made):
            node.waiting += 1

    def unpack(self) -> Any:
        """The tensor; after the last who asked for it, its memory is not held any more."""
        node = self.node
        tensor = at(bring(node), self.place)
        if isinstance(node, Made):
            node.waiting -= 1
            if node.waiting <= 0:
                node.found = None
            elif node.found is None:
                node.found = tensor
        return tensor


class ForwardPass:
    """Forward passes of one step."""

    def __init__(
        self, model: Any, again: Collection[str], away: Collection[str], elsewhere: Elsewhere, generators: list[Any],
        stays: set[int], placing: Callable[[Any], Placing] | None = None,
    ) -> None:  # fmt: skip
        """`stays`: addresses of storages that are there anyway. `placing`: of a result without contents, where it was made."""
        self.sites = Sites(model)
        self._again, self._away = frozenset(again), frozenset(away)
        self._elsewhere = elsewhere
        self._generators = generators
        self._fixed = stays
        self._placing = placing
        self._nodes: dict[int, tuple[Any, Node]] = {}
        """Address of a storage -> (a weak reference to it, what it holds now): results of calls that run again."""
        self._sources: dict[int, tuple[Any, Any]] = {}
        """Address of a storage -> weak references to it and to what recipes have of it."""
        self._movable: dict[int, Any] = {}
        """Address of a storage -> a weak reference to it: results that may wait elsewhere."""
        self._last: Any = None
        """What came back last: often the next one wants it too."""
        self._busy = False
        """A recipe runs: its calls are not noted."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        try:
            with self.sites.counting(), hooks, seeing(self._call):
                yield
        finally:
            for table in (self._nodes, self._sources, self._movable):
                table.clear()

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind.view or self._busy:
            return kind.run(*args, **kwargs)
        site = self.sites.next(kind)
        noted = None
        if kind.writes or kind.statistics:
            noted = self._before_write(kind, args, kwargs, site in self._again)
        elif site in self._again:
            noted = Blank(kind) if kind.like else self._note(kind, args, kwargs)
        out = kind.run(*args, **kwargs)
        if noted is not None:
            noted.see(out)
            if self._placing is not None:
                noted.placing = self._placing(out)
            self._add(noted, [args[0]] if kind.writes_first else out, args)
        elif site in self._away:
            self._let_move(out)
        return out

    # before a call

    def _before_write(self, kind: Kind, args: Any, kwargs: dict[str, Any], again: bool) -> Call | None:
        """What is written is something else afterwards; the call, where it can run again on a copy of what was there."""
        noted = None
        if again and kind.statistics:
            noted = self._note(kind, (*args[:3], None, None, *args[5:]) if args[5] else args, kwargs)
        elif again and kind.writes_first and isinstance(self._node(args[0]), Made):
            noted = self._note(kind, args, kwargs)
        written = [3, 4] if kind.statistics else [number for number, _ in kind.writes]
        names = [name for _, name in kind.writes]
        values = [args[n] for n in written if n < len(args)] + [kwargs[name] for name in names if name in kwargs]
        for tensor in filter(has_memory, tensors_in(values)):
            key = key_of(tensor.untyped_storage())
            found = self._sources.pop(key, None)
            source = found[1]() if found is not None else None
            if source is not None and found is not None and found[0]() is tensor.untyped_storage():
                source.save_from_write()
            self._nodes.pop(key, None)
            self._movable.pop(key, None)
        return noted

    def _note(self, kind: Kind, args: Any, kwargs: dict[str, Any]) -> Call | None:
        """The call as it can be made again, None where it cannot."""
        if not all(map(has_memory, tensors_in((args, kwargs)))):
            return None
        inputs: list[Argument] = []
        random = []
        if kind.draws:
            given = kwargs.get("generator")
            random = self._generators if given is None else [given]

        args = self._packed(args, inputs)
        kwargs = {name: self._packed(value, inputs) for name, value in kwargs.items()}
        return Call(kind, args, kwargs, inputs, random)

    def _packed(self, value: Any, inputs: list[Argument]) -> Any:
        """Arguments without their tensors, which are noted."""
        if isinstance(value, torch.Tensor):
            inputs.append(Argument(self._node(value) or self._source(value), place_of(value)))
            return inputs[-1]
        if isinstance(value, list | tuple):
            return [self._packed(item, inputs) for item in value]
        return value

    def _node(self, tensor: Any) -> Node | None:
        """What is known of a tensor's memory."""
        storage = tensor.untyped_storage()
        found = self._nodes.get(key_of(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def _source(self, tensor: Any) -> Source:
        """A tensor that a recipe starts from."""
        storage = tensor.untyped_storage()
        key = key_of(storage)
        found = self._sources.get(key)
        source = found[1]() if found is not None and found[0]() is storage else None
        if source is None:
            source = self._moved(tensor, storage) if self._moves(storage) else Source(without_graph(tensor))
            self._sources[key] = (weakref.ref(storage), weakref.ref(source))
        return source

    def _moved(self, tensor: Any, storage: Any) -> Source:
        """A source that waits elsewhere."""
        kept = self._elsewhere.keep(same_memory(tensor, (torch.uint8, 0, (storage.nbytes(),), (1,))))

        def fetch() -> Any:
            self._last = self._elsewhere.bring(kept)
            return self._last

        return Source(tensor, fetch)

    def end(self) -> None:
        self._last = None

    # after it

    def _add(self, call: Call, out: Any, args: Any) -> None:
        """Results of a call that can be made again."""
        results = list(out) if isinstance(out, tuple | list) else [out]
        tensors = [(number, t) for number, t in enumerate(results) if isinstance(t, torch.Tensor) and has_memory(t)]
        taken = (
            set()
            if call.kind.writes_first
            else {key_of(t.untyped_storage()) for t in tensors_in(args) if has_memory(t)}
        )
        largest = max((t.untyped_storage().nbytes() for _, t in tensors), default=0)
        for number, tensor in tensors:
            storage = tensor.untyped_storage()
            key = key_of(storage)
            if key not in taken and LITTLE * storage.nbytes() > largest:
                taken.add(key)
                made = Made(call, number)
                call.made.append(weakref.ref(made))
                self._know(key, storage, made)

    def _let_move(self, out: Any) -> None:
        """Results that wait elsewhere once they are saved."""
        for tensor in filter(has_memory, tensors_in(out)):
            storage = tensor.untyped_storage()
            self._movable[key_of(storage)] = weakref.ref(storage)

    def _moves(self, storage: Any) -> bool:
        """True where what is in a storage is to wait elsewhere."""
        key = key_of(storage)
        if storage.nbytes() < SMALL or key in self._fixed:
            return False
        found = self._movable.get(key)
        return ALL in self._away or (found is not None and found() is storage)

    def _know(self, key: int, storage: Any, node: Node) -> None:
        nodes = self._nodes

        def gone(reference: Any) -> None:
            if key in nodes and nodes[key][0] is reference:
                del nodes[key]

        nodes[key] = (weakref.ref(storage, gone), node)

    # hooks

    def _pack(self, tensor: Any) -> Any:
        if is_functorch(tensor) or not has_memory(tensor):
            return tensor
        if not self._nodes and not self._away:
            return Kept(tensor)
        node = self._node(tensor)
        if node is None and self._away and self._moves(tensor.untyped_storage()):
            node = self._source(tensor)
        return Kept(tensor) if node is None else Recipe(node, place_of(tensor))

    def _unpack(self, saved: Any) -> Any:
        if type(saved) is Kept:
            return saved.unpack()
        if type(saved) is not Recipe:
            return saved
        before, self._busy = self._busy, True
        try:
            return saved.unpack()
        finally:
            self._busy = before


def has_memory(tensor: Any) -> bool:
    """A plain tensor whose values are the bytes of its storage."""
    plain = type(tensor) in PLAIN and tensor.layout is STRIDED
    return plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or is_zero_tensor(tensor))
