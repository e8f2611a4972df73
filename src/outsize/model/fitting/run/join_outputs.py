"""Outputs of slices as the output of the batch.

In: what the slices gave, and how many samples each had. Out: the same structure: tensors with a row for each sample are joined,
single values that are the same in all slices stay, and anything else (a mean over a slice, a cache) is refused, since no
joining makes it the whole's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from outsize.core.errors import InputError


class NotJoined(InputError):
    """Slices whose outputs do not make the whole's."""


def join(outs: list[Any], rows: list[int], path: str = "the output") -> Any:
    """One output from those of slices of so many `rows`."""
    import torch

    first = outs[0]
    if isinstance(first, torch.Tensor):
        return _join_tensors(outs, rows, path)
    if isinstance(first, Mapping) and all(set(out) == set(first) for out in outs):
        items = {key: join([out[key] for out in outs], rows, f"{path}[{key!r}]") for key in first}
        return items if type(first) is dict else type(first)(**items)
    if isinstance(first, list | tuple) and all(len(out) == len(first) for out in outs):
        parts = [join([out[i] for out in outs], rows, f"{path}[{i}]") for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first, **{name: join([getattr(out, name) for out in outs], rows, f"{path}.{name}") for name in names}
        )
    if first is None or isinstance(first, bool | int | float | str):
        if all(out == first for out in outs):
            return first
        raise _refuse(path, f"{first!r} for one slice and {next(out for out in outs if out != first)!r} for another")
    raise _refuse(
        path, f"a {type(first).__name__}" if not isinstance(first, list | tuple | Mapping) else "of another length"
    )


def _join_tensors(outs: list[Any], rows: list[int], path: str) -> Any:
    import torch

    first = outs[0]
    if all(out.dim() and out.shape[0] == count for out, count in zip(outs, rows, strict=True)):
        return torch.cat(outs)
    if not any(out.dim() for out in outs) and (_unknown(first) or all(torch.equal(out, first) for out in outs)):
        return first
    raise _refuse(path, f"of shape {tuple(first.shape)} for a slice of {rows[0]} samples")


def _unknown(tensor: Any) -> bool:
    """True for a tensor without contents, which says nothing of whether two are the same."""
    import torch

    return tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _refuse(path: str, what: str) -> NotJoined:
    return NotJoined(f"{path} is {what}, so that slices of the batch cannot be joined: fit with without=('slices',)")
