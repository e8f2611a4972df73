"""What recipes have to know of an operator, looked up once; and names for the calls of operators in a forward pass.

In: an operator as the dispatcher names it. Out: `Kind`: whether a second call gives the same, what it writes. `Sites` names
each call by the module that it ran in, the operator, and how many such calls came before it: the same names in every pass of
a step, in slices and on tensors without contents, so that a plan can say which calls run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from outsize.model.torch_port.dispatch import arguments_of, below_python, is_mutable
from outsize.model.torch_port.objects import around_modules

STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Operators that write running averages (arguments 3 and 4) in training (argument 5), which their schemas do not say."""

LIKE = {"empty_like": None, "zeros_like": 0, "ones_like": 1, "new_empty": None, "new_zeros": 0, "new_ones": 1}
"""Operators that look only at the shape of a tensor -> what they fill theirs with."""

UNWRITTEN = ("set_", "resize_", "resize_as_", "_resize_output_")
"""In-place operators that give a tensor other memory."""


class Kind:
    def __init__(self, func: Any) -> None:
        self.func = func  # held, so that no other gets its number
        self.run = below_python(func)
        self.base = func.overloadpacket.__name__
        """The operator; a trace may call another overload of it than a real step does."""
        self.view = bool(func.is_view) or func.namespace != "aten"
        """Makes no memory; an operator that is not torch's own is left alone as well: nobody knows what it does."""
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.like = self.base in LIKE
        self.statistics = self.base in STATISTICS
        arguments = arguments_of(func)
        written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.writes = tuple((number, a.name) for number, a in enumerate(arguments) if a in written)
        """(position, name) of the arguments that it writes."""
        if is_mutable(func) and not self.writes:
            self.writes = tuple((number, a.name) for number, a in enumerate(arguments))
        first = len(self.writes) == 1 and self.writes[0][0] == 0 and not arguments[0].kwarg_only
        self.writes_first = bool(first and str(arguments[0].type) == "Tensor" and self.base not in UNWRITTEN)
        """Writes its first argument, one tensor, and nothing else, so that a second call can write a copy."""


_FOUND: dict[int, Kind] = {}


def kind_of(func: Any) -> Kind:
    found = _FOUND.get(id(func))
    if found is None:
        found = _FOUND[id(func)] = Kind(func)
    return found


class Sites:
    """Names calls of operators in a forward pass."""

    def __init__(self, model: Any) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = [""]
        self._counts: dict[tuple[str, str], int] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self._stack, self._counts = [""], {}
        with around_modules(self._enter, self._leave):
            yield

    def next(self, kind: Kind) -> str:
        """The name of the call that comes now."""
        key = (self._stack[-1], kind.base)
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        return f"{key[0]}:{key[1]}:{number}"

    def _enter(self, module: Any, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append(name)

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        """Modules in it that have failed, and were caught, are left with it."""
        name = self._names.get(id(module))
        if name is not None and name in self._stack[1:]:
            while self._stack.pop() != name:
                pass
