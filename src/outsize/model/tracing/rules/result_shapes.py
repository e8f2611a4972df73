"""A cache of the results that torch gives for an operator's arguments.

In: an operator and arguments without contents. Out: what torch would give. Most of torch's shape rules are Python and take longer
than the rest of a trace; a model needs the same ones for every layer, and every trace of it once more. Only results that follow
from shapes, strides and dtypes are kept: new tensors, an argument written in place, or nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.torch_port.dispatch import has_modes, key_bits, keys_of, tensors_in
from outsize.model.torch_port.objects import key_of, storage_key
from outsize.model.tracing.rules.operators import Operator

_ASK, _FIRST, _NOTHING, _NEW, _LIST = range(5)
"""Kinds of results: ask torch every time; the first argument; nothing; one new tensor; several."""

_PLAIN = (int, float, bool, str, type(None))


MOST = 2**13
"""Answers that are kept at once; a model has about a hundred for each size of its batch."""


class Shapes:
    """Answers that follow from what was asked and nothing else, so that they hold for every model."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, Any]] = {}

    def run(self, operator: Operator, args: Any, kwargs: dict[str, Any]) -> Any:
        func = operator.func
        if not operator.by_shapes or has_modes():  # somebody else looks on
            return func(*args, **kwargs)
        key: list[Any] = [id(func), torch.get_default_dtype()]
        if not (describe(args, key) and (not kwargs or describe([*kwargs, *kwargs.values()], key))):
            return func(*args, **kwargs)
        whole = tuple(key)
        known: tuple[int | None, Any] = self._known.get(whole, (None, None))
        kind, what = known
        if kind == _NEW:
            return _make(what)
        if kind == _FIRST:
            return args[0]
        if kind == _NOTHING:
            return None
        if kind == _LIST:
            return what[0](None if one is None else _make(one) for one in what[1])
        out = func(*args, **kwargs)
        if kind is None:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[whole] = _learn(operator, args, out)
        return out


SHAPES = Shapes()
"""Those of all traces in this process."""


def describe(values: Any, key: list[Any]) -> bool:
    """Append everything that a shape rule may look at; False if that is not known."""
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            keys = key_bits(value)  # where it is, and whether its signs are read otherwise
            key.append((value.shape, value.stride(), value.dtype, value.storage_offset(), keys))
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not describe(value, key):
                return False
        elif kind in _PLAIN or kind in (torch.dtype, torch.layout, torch.device, torch.memory_format):
            key.append((kind, value))
        else:
            return False
    return True


def _learn(operator: Operator, args: Any, out: Any) -> tuple[int, Any]:
    """What to remember of an answer."""
    if operator.mutable:
        if out is None:
            return _NOTHING, None
        return (_FIRST, None) if args and out is args[0] else (_ASK, None)
    taken = {storage_key(tensor) for tensor in tensors_in(args)}
    if type(out) is torch.Tensor:
        one = _new(out, taken)
        return (_ASK, None) if one is None else (_NEW, one)
    if type(out) in (tuple, list) and all(one is None or type(one) is torch.Tensor for one in out):
        made = [None if one is None else _new(one, taken) for one in out]
        if all((a is None) == (b is None) for a, b in zip(out, made, strict=True)):
            return _LIST, (type(out), made)
    return _ASK, None


def _new(tensor: Any, taken: set[int]) -> Any:
    """Shape, strides and dtype of a tensor that has memory of its own, which follows from these; else None."""

    storage = tensor.untyped_storage()
    keys = keys_of(tensor)
    what = (tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.device.type != "meta" or key_of(storage) in taken or tensor.storage_offset():
        return None
    like = _make(what)
    taken.add(key_of(storage))  # two results in one memory are no memory of their own
    same = storage.nbytes() == like.untyped_storage().nbytes() and keys == keys_of(like)
    return what if same else None


def _make(what: tuple[Any, Any, Any]) -> Any:
    return torch.empty_strided(what[0], what[1], dtype=what[2], device="meta")
