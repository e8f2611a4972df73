"""What a forward pass calls and what autograd saves of it: the ground on which recipes are planned.

In: a forward pass, usually on tensors without contents. Out: `Row`s, one for each call of an operator that makes or writes
memory, with what it took and made, and which of that autograd saves. Memory that is written becomes another item.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from outsize.model.fitting.recipes.forward_pass import LITTLE, has_memory
from outsize.model.fitting.recipes.operators import Sites, kind_of
from outsize.model.torch_port.dispatch import is_functorch, seeing, tensors_in
from outsize.model.torch_port.objects import key_of


@dataclass(frozen=True, slots=True)
class Row:
    site: str
    takes: tuple[int, ...]
    """Items."""
    makes: tuple[int, ...]
    """Items that its recipe could make; none where it cannot run again."""
    all_made: tuple[int, ...]
    """Items that it makes, also those that are small."""
    over: int | None
    """The item that it writes over, which nobody can keep; None: it makes new memory."""
    seconds: float


class Survey:
    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        """`clock`: estimated seconds of all operators so far."""
        self.rows: list[Row] = []
        self.sizes: list[int] = []
        """Item -> bytes."""
        self.saved: dict[int, None] = {}
        """Items that autograd saves, in order."""
        self.done = False
        self._sites = Sites(model)
        self._clock = clock
        self._items: dict[int, tuple[Any, int]] = {}
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The block is a forward pass; only the first is looked at."""
        if self.done:
            yield
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with self._sites.counting(), hooks, seeing(self._call):
            yield
        self.done = True

    def leave_out(self, real: dict[str, set[str]]) -> None:
        """Calls have no recipe in modules whose trace calls operators that their real pass does not: names would mean others.
        `real`: the operators of modules that have run."""
        traced: dict[str, set[str]] = {}
        for row in self.rows:
            module, base, _ = row.site.rsplit(":", 2)
            traced.setdefault(module, set()).add(base)
        strange = {module for module, bases in traced.items() if module in real and not bases <= real[module]}
        self.rows = [replace(row, makes=()) if row.site.rsplit(":", 2)[0] in strange else row for row in self.rows]

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind.view:
            return func(*args, **kwargs)
        site = self._sites.next(kind)
        given = tensors_in((args, kwargs))
        repeats = all(map(has_memory, given)) and (not kind.writes or kind.writes_first)
        given = [tensor for tensor in given if has_memory(tensor) and not kind.like]
        takes = tuple(dict.fromkeys(self._item(tensor) for tensor in given))
        over = self._item(args[0]) if kind.writes_first and has_memory(args[0]) else None
        began = self._clock()
        out = kind.func(*args, **kwargs)
        seconds = self._clock() - began
        if kind.writes:
            values = [args[n] for n, _ in kind.writes if n < len(args)] + [
                kwargs[k] for _, k in kind.writes if k in kwargs
            ]
            made = [self._item(tensor, renew=True) for tensor in tensors_in(values) if has_memory(tensor)]
        else:
            items = (self._item(tensor) for tensor in tensors_in(out) if has_memory(tensor))
            made = [item for item in dict.fromkeys(items) if item not in takes]  # others are views
        largest = max((self.sizes[item] for item in made), default=0)
        makes = tuple(item for item in made if LITTLE * self.sizes[item] > largest)
        self.rows.append(Row(site, takes, makes if repeats else (), tuple(made), over, seconds))
        return out

    def _pack(self, tensor: Any) -> Any:
        if not is_functorch(tensor) and has_memory(tensor):
            self.saved.setdefault(self._item(tensor))
        return tensor if tensor.requires_grad and tensor.grad_fn is None else tensor.detach()

    def _item(self, tensor: Any, renew: bool = False) -> int:
        storage = tensor.untyped_storage()
        found = self._items.get(key_of(storage))
        if found is None or found[0]() is not storage or renew:
            found = self._items[key_of(storage)] = (weakref.ref(storage), next(self._numbers))
            self.sizes.append(storage.nbytes())
        return found[1]
