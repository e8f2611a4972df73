"""Cuts a batch into slices along its first axis, whatever holds the tensors.

In: tensors, dicts, lists, tuples, named tuples, dataclasses and mappings such as transformers' `BatchEncoding`,
nested as the user likes. Out: the same structures with fewer rows. A batch whose tensors disagree about the number of
rows is refused before anything is changed; what is not a tensor (a flag, a text, a tensor without axes) is handed to
every slice as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from outsize.core.errors import InputError


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
    return value


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


def count_rows(batch: Any) -> int:
    """How many samples the batch has; an `InputError` where its tensors disagree or there is none."""
    rows: dict[int, str] = {}
    for path, tensor in tensors_of(batch).items():
        if str(tensor.layout) not in ("torch.strided", "torch.jagged"):
            raise InputError(f"{path} is a sparse tensor, which cannot be cut into slices: give {path}.to_dense()")
        if getattr(tensor, "is_nested", False):
            raise InputError(
                f"{path} is a nested tensor: its samples have no common shape, so it cannot be cut into slices; "
                "pad it, or group samples of one length into a batch"
            )
        if tensor.dim():
            rows.setdefault(tensor.shape[0], path)
    if not rows:
        raise InputError(
            "the batch holds no tensor with a first axis to cut: give tensors, or dicts, lists, tuples or dataclasses of them"
        )
    if len(rows) > 1:
        said = ", ".join(f"{path} has {count}" for count, path in rows.items())
        raise InputError(f"the tensors of the batch disagree about the number of samples: {said}")
    count = next(iter(rows))
    if count == 0:
        raise InputError("the batch is empty: its tensors have 0 samples")
    _refuse_arrays(batch, count)
    return count


def _refuse_arrays(batch: Any, rows: int) -> None:
    """NumPy's arrays would be handed whole to every slice."""
    import numpy as np

    def refuse(path: str, array: Any) -> Any:
        if array.ndim and array.shape[0] == rows:
            raise InputError(
                f"{path} is a NumPy array of {rows} samples and fit cuts tensors: give torch.from_numpy({path})"
            )
        return array

    transform(batch, refuse, leaf=np.ndarray)


def take(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch, as views."""
    return transform(batch, lambda _, tensor: tensor[start:stop] if tensor.dim() else tensor)


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
