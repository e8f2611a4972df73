"""Finds the tensors of a batch, whatever holds them, and joins the outputs of slices.

In: tensors, dicts, lists, tuples, named tuples, dataclasses, mappings such as transformers' `BatchEncoding`, and objects with
attributes such as torch_geometric's `Data`, nested as the user likes. Out: the same structures with other tensors; what is not a
tensor (a flag, a text) stays as it is. Of outputs, tensors with a row for each sample are joined and single values that are the
same in all slices stay; anything else (a mean over a slice, a cache) is refused, since no joining makes it the whole's.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.model.kernels.layouts import is_last

DEEP = 4
"""Objects inside objects that are looked into: some hold each other."""


def transform(value: Any, change: Callable[[str, Any], Any], path: str = "batch", leaf: Any = None) -> Any:
    """The same structure with every `leaf` (a tensor unless said) at `path` replaced by `change(path, it)`."""
    if leaf is None:
        import torch

        leaf = torch.Tensor
    if isinstance(value, leaf):
        return change(path, value)
    if isinstance(value, Mapping):
        items = {key: transform(item, change, f"{path}[{key!r}]", leaf) for key, item in value.items()}
        return items if type(value) is dict else _refill(value, items)
    if isinstance(value, list | tuple):
        parts = [transform(item, change, f"{path}[{i}]", leaf) for i, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            object.__setattr__(new, field.name, transform(item, change, f"{path}.{field.name}", leaf))
        return new
    return _transform_object(value, change, path, leaf)


def _transform_object(value: Any, change: Callable[[str, Any], Any], path: str, leaf: Any) -> Any:
    """An object of the user's own, or a graph: what its attributes hold; the object itself where nothing in it is another."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or isinstance(value, type | FunctionType | torch.nn.Module) or path.count(".") >= DEEP:
        return value
    items = {name: transform(item, change, f"{path}.{name}", leaf) for name, item in attributes.items()}
    if all(items[name] is item for name, item in attributes.items()):
        return value
    new = copy.copy(value)
    new.__dict__.update(items)
    return new


def _refill(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind with other values; `BatchEncoding`, `ModelOutput` and friends keep their class."""
    new: Any = copy.copy(value)
    if isinstance(getattr(value, "data", None), dict):  # UserDict and BatchEncoding
        new.data = items
        return new
    for key, item in items.items():
        new[key] = item
    return new


def tensors_of(batch: Any) -> dict[str, Any]:
    """Path -> tensor, in order."""
    found: dict[str, Any] = {}

    def note(path: str, tensor: Any) -> Any:
        found[path] = tensor
        return tensor

    transform(batch, note)
    return found


def refuse_arrays(batch: Any, rows: int) -> None:
    """NumPy's arrays would be handed whole to every slice."""
    import numpy as np

    def refuse(path: str, array: Any) -> Any:
        if array.ndim and array.shape[0] == rows:
            raise InputError(
                f"{path} is a NumPy array of {rows} samples and fit cuts tensors: give torch.from_numpy({path})"
            )
        return array

    transform(batch, refuse, leaf=np.ndarray)


def cut(rows: int, slices: int, first: int = 0) -> list[tuple[int, int]]:
    """`rows` in `slices` nearly equal runs, none empty: the larger ones first, or the first of so many rows."""
    slices = min(slices, rows)
    bounds = [0]
    if 0 < first <= rows - (slices - 1) and slices > 1:
        bounds, slices = [0, first], slices - 1
    size, extra = divmod(rows - bounds[-1], slices)
    for index in range(slices):
        bounds.append(bounds[-1] + size + (index < extra))
    return list(itertools.pairwise(bounds))


def call_model(model: Any, part: Any) -> Any:
    """Run a model on a slice: keywords from a mapping, arguments from a tuple, else the slice itself."""
    if isinstance(part, Mapping):
        return model(**part)
    return model(*part) if isinstance(part, tuple | list) else model(part)


class NotJoined(InputError):
    """Slices whose outputs do not make the whole's."""


def join(outs: list[Any], rows: list[int]) -> Any:
    """One output from those of slices of so many `rows`, gradients included."""
    return _merge(outs, lambda tensors, path: _join_tensors(tensors, rows, path))


class Joined:
    """One output from those of slices, without gradients: each is written into its rows and let go of."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        """Samples of the batch."""
        self._there = 0
        """Samples of which the output is there."""
        self.whole: Any = None
        """The output, as far as it is there."""

    def add(self, out: Any, count: int) -> None:
        """The output of the next `count` samples."""
        if not self._there:
            self.whole = (
                out if count == self._rows else _merge([out], lambda one, path: self._start(one[0], count, path))
            )
        else:
            self.whole = _merge([self.whole, out], lambda both, path: self._put(both[0], both[1], count, path))
        self._there += count

    def _start(self, out: Any, count: int, path: str) -> Any:
        if not out.dim():
            return out
        _require_rows(out, count, path)
        if is_last(out):
            whole = out.new_empty((self._rows, *out.movedim(1, -1).shape[1:])).movedim(-1, 1)
        else:
            whole = out.new_empty((self._rows, *out.shape[1:]))
        whole[:count].copy_(out)
        return whole

    def _put(self, whole: Any, out: Any, count: int, path: str) -> Any:
        if not out.dim() and not whole.dim():
            return _same([whole, out], count, path)
        _require_rows(out, count, path)
        if out.shape[1:] != whole.shape[1:] or out.dtype != whole.dtype:
            raise _refuse(
                path, f"of shape {tuple(whole.shape[1:])} a sample in one slice and {tuple(out.shape[1:])} in another"
            )
        whole[self._there : self._there + count].copy_(out)
        return whole


def _merge(outs: list[Any], merge: Callable[[list[Any], str], Any], path: str = "the output") -> Any:
    """What is like each of `outs`, with `merge(tensors, path)` for the tensors that stand at the same place."""
    first = outs[0]
    if isinstance(first, torch.Tensor):
        return merge(outs, path)
    if isinstance(first, Mapping) and all(set(out) == set(first) for out in outs):
        items = {key: _merge([out[key] for out in outs], merge, f"{path}[{key!r}]") for key in first}
        return items if type(first) is dict else type(first)(**items)
    if isinstance(first, list | tuple) and all(len(out) == len(first) for out in outs):
        parts = [_merge([out[i] for out in outs], merge, f"{path}[{i}]") for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{name: _merge([getattr(out, name) for out in outs], merge, f"{path}.{name}") for name in names}
        )
    if first is None or isinstance(first, bool | int | float | str):
        if all(out == first for out in outs):
            return first
        raise _refuse(path, f"{first!r} for one slice and {next(out for out in outs if out != first)!r} for another")
    raise _refuse(
        path, f"a {type(first).__name__}" if not isinstance(first, list | tuple | Mapping) else "of another length"
    )


def _join_tensors(outs: list[Any], rows: list[int], path: str) -> Any:
    if not any(out.dim() for out in outs):
        return _same(outs, rows[0], path)
    for out, count in zip(outs, rows, strict=True):
        _require_rows(out, count, path)
    return torch.cat(outs)


def _same(outs: list[Any], rows: int, path: str) -> Any:
    """A single value, where every slice has the same."""
    first = outs[0]
    if _unknown(first) or all(torch.equal(out, first) for out in outs):
        return first
    raise _refuse(path, f"of shape () for a slice of {rows} samples, and differs")


def _require_rows(out: Any, count: int, path: str) -> None:
    if not out.dim() or out.shape[0] != count:
        raise _refuse(path, f"of shape {tuple(out.shape)} for a slice of {count} samples")


def _unknown(tensor: Any) -> bool:
    """True for a tensor without contents, which says nothing of whether two are the same."""
    return tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _refuse(path: str, what: str) -> NotJoined:
    return NotJoined(f"{path} is {what}, so that slices of the batch cannot be joined: fit with without=('slices',)")
