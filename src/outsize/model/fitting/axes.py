"""Which axis of each tensor of a batch counts samples, and so how the batch is cut.

In: a batch, and what the user said of it (`batch_axis`). Out: `Axes`: the number of samples and slices of them, as views. Most
batches have their samples along the first axis of every tensor. Others share a tensor between samples (class weights,
positions, a mask), put time first, or pack sequences one after another with a tensor of their ends. `find_axes` gives the
readings that the shapes allow, the likeliest first; a trial on a few samples tells which is right. A batch that no reading
cuts counts as one sample: it runs whole, and other remedies are left.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from outsize.core.errors import InputError
from outsize.model.fitting.batch import refuse_arrays, tensors_of, transform

Axis = int | Literal["ends"] | None
"""The axis that counts samples; None: all samples share the tensor; "ends": it holds where packed sequences end."""

MOST = 6
"""Readings of a batch that are tried."""

SAY = "say which axis counts samples with fit(..., batch_axis={...}): a number for each tensor, None for one that all share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """One reading of a batch."""

    at: Mapping[str, Axis] = field(default_factory=dict)
    """Where a tensor is -> its axis; of tensors that are not named here it is the first one."""
    packed: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Where packed sequences are -> where their ends are, and the axis along which they follow each other."""
    whole: str = ""
    """Why the batch is never cut; empty: it is."""

    def count(self, batch: Any) -> int:
        """How many samples the batch has; an `InputError` where its tensors disagree or there is none."""
        rows: dict[int, str] = {}
        for path, tensor in () if self.whole else tensors_of(batch).items():
            axis = self.at.get(path, 0)
            if path in self.packed or axis is None or not tensor.dim():
                continue
            if axis == "ends":
                rows.setdefault(tensor.shape[0] - 1, path)
            elif tensor.dim() <= axis:
                raise InputError(f"{path} has {tensor.dim()} axes and no axis {axis} to cut: {SAY}")
            else:
                rows.setdefault(tensor.shape[axis], path)
        if self.whole:
            return 1
        if not rows:
            raise InputError(
                "the batch holds no tensor with a first axis to cut: give tensors, or dicts, lists, tuples or dataclasses of them"
            )
        if len(rows) > 1:
            raise InputError(f"{_disagree(rows)}; {SAY}")
        count = next(iter(rows))
        if count <= 0:
            raise InputError("the batch is empty: its tensors have 0 samples")
        refuse_arrays(batch, count)
        return count

    def take(self, batch: Any, start: int, stop: int) -> Any:
        """Samples `start` to `stop` of a batch, as views; copies where a view has gaps that the whole has not."""
        if self.whole:
            return batch
        ends: dict[str, tuple[int, int]] = {}
        if self.packed:
            tensors = tensors_of(batch)
            for path in {path for path, _ in self.packed.values()}:
                ends[path] = int(tensors[path][start]), int(tensors[path][stop])
        return transform(batch, lambda path, tensor: _plain(tensor, self.part(path, tensor, start, stop, ends)))

    def part(
        self, path: str, tensor: Any, start: int, stop: int, ends: Mapping[str, tuple[int, int]] | None = None
    ) -> Any:
        """One tensor's rows of the samples `start` to `stop`, as a view."""
        axis = self.at.get(path, 0)
        if path in self.packed:
            owner, axis = self.packed[path]
            start, stop = ends[owner] if ends else (start, stop)
            return tensor.narrow(axis, start, stop - start)
        if axis is None or not tensor.dim():
            return tensor
        if axis == "ends":
            return tensor[start : stop + 1] - tensor[start]
        return tensor.narrow(axis, start, stop - start)

    def telling(self, batch: Any, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The runs of samples that show what all of them hold: the first makes gradients and the second adds to them; shorter
        ones may hold more, since kernels go another way and small tensors are not moved. Of packed elements those with most."""
        if self.packed:
            owner = next(iter(self.packed.values()))[0]
            ends = tensors_of(batch)[owner].tolist()
            return sorted(runs, key=lambda run: ends[run[0]] - ends[run[1]])[:2]
        known = {stop - start for start, stop in runs[:2]}
        return runs[:2] + [run for run in runs[-1:] if run[1] - run[0] not in known]

    def double(self, batch: Any) -> Any:
        """The batch with every sample twice; None where that cannot be said."""
        if self.packed or self.whole:
            return None

        def twice(path: str, tensor: Any) -> Any:
            axis = self.at.get(path, 0)
            return tensor if axis is None or not tensor.dim() else torch.cat([tensor, tensor], axis)

        return transform(batch, twice)


def _plain(whole: Any, part: Any) -> Any:
    """A part without gaps where the whole has none: `view` in the user's code needs that."""
    return part.contiguous() if whole.is_contiguous() else part


def say_disagreement(batch: Any) -> str:
    """What the first axes of a batch's tensors say of the number of samples, empty where they agree."""
    rows: dict[int, str] = {}
    for path, tensor in tensors_of(batch).items():
        if tensor.dim():
            rows.setdefault(tensor.shape[0], path)
    return _disagree(rows) if len(rows) > 1 else ""


def _disagree(rows: Mapping[int, str]) -> str:
    said = ", ".join(f"{path} has {count}" for count, path in rows.items())
    return f"the tensors of the batch disagree about the number of samples: {said}"


def read_axes(batch: Any, said: Any) -> Axes:
    """What the user says: one axis for all tensors, or a table from names (keys, attributes, numbers, whole paths) to axes."""
    tensors = tensors_of(batch)
    if isinstance(said, int) and not isinstance(said, bool):
        table: dict[str, Any] = {path: said for path, tensor in tensors.items() if tensor.dim()}
    elif isinstance(said, Mapping):
        table = {}
        for name, axis in said.items():
            found = [p for p in tensors if p == name or p.endswith((f"[{name!r}]", f".{name}"))]
            if not found:
                raise InputError(f"batch_axis names {name!r}, which is no tensor of the batch: {', '.join(tensors)}")
            table |= dict.fromkeys(found, axis)
    else:
        raise InputError(f"batch_axis={said!r} is no axis and no table of axes: batch_axis={{'x': 1, 'weights': None}}")
    for path, axis in table.items():
        dims = tensors[path].dim()
        if axis not in (None, "ends") and (
            isinstance(axis, bool) or not isinstance(axis, int) or not -dims <= axis < dims
        ):
            raise InputError(f"batch_axis gives {path} the axis {axis!r}, and it has {dims}")
        table[path] = axis % dims if isinstance(axis, int) else axis
    ends = [path for path, axis in table.items() if axis == "ends"]
    packed = _packed(tensors, ends)
    left = {path: axis for path, axis in table.items() if path not in packed or axis == "ends"}
    axes = Axes(at=left, packed=packed)
    axes.count(batch)
    return axes


def find_axes(batch: Any, time_first: bool) -> tuple[Axes, ...]:
    """Readings of a batch, the likeliest first; `time_first`: the model has layers that take time along the first axis."""
    tensors = {path: tensor for path, tensor in tensors_of(batch).items() if tensor.dim()}
    for path, tensor in tensors.items():
        if getattr(tensor, "is_nested", False):
            raise InputError(
                f"{path} is a nested tensor: its samples have no common shape, so it cannot be cut into slices; "
                "pad it, or group samples of one length into a batch"
            )
        if str(tensor.layout) != "torch.strided":
            raise InputError(f"{path} is a sparse tensor, which cannot be cut into slices: give {path}.to_dense()")
    firsts = {tensor.shape[0] for tensor in tensors.values()}
    found: list[Axes] = []
    if len(firsts) <= 1:
        Axes().count(batch)
        seconds = dict.fromkeys(tensor.shape[1] for tensor in tensors.values() if tensor.dim() > 1 and time_first)
        found = [Axes(), *(_read_by(tensors, n, 1) for n in seconds if n > 1)]
    else:
        ends = [path for path, tensor in tensors.items() if _are_ends(path, tensor, tensors)]
        packed = _packed(tensors, ends)
        if packed:
            count = len(tensors[ends[0]]) - 1
            at: dict[str, Axis] = {p: 0 if t.shape[0] == count else None for p, t in tensors.items() if p not in packed}
            found.append(Axes(at=at | dict.fromkeys(ends, "ends"), packed=packed))
        found += [_read_by(tensors, n, axis) for n, axis in _by_cover(tensors)[: MOST - 2]]
        found.append(Axes(whole=f"{say_disagreement(batch)}; {SAY}"))
    varied = [_sharing(one, path) for one in found[:1] for path in tensors if len(tensors) > 1 and not one.whole]
    some = [one for one in varied if any(one.at.get(path, 0) is not None for path in tensors)]
    return tuple([one for one in (*found, *some) if one.whole or _is_safe(one, batch)][:MOST])


def _read_by(tensors: Mapping[str, Any], rows: int, axis: int) -> Axes:
    """Samples are counted by the axis of this size: this one or the first that has it; other tensors are shared."""

    def pick(shape: tuple[int, ...]) -> int | None:
        if len(shape) > axis and shape[axis] == rows:
            return axis
        return shape.index(rows) if rows in shape else None

    return Axes(at={path: pick(tuple(tensor.shape)) for path, tensor in tensors.items()})


def _by_cover(tensors: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(size, axis) of first axes, and of second ones that all tensors have; those that most tensors have first."""

    def cover(pair: tuple[int, int]) -> tuple[int, int]:
        having = [tensor.numel() for tensor in tensors.values() if pair[0] in tensor.shape]
        return len(having), sum(having)

    firsts = [(tensor.shape[0], 0) for tensor in tensors.values()]
    seconds = [(t.shape[1], 1) for t in tensors.values() if t.dim() > 1]
    every = [pair for pair in seconds if all(pair[0] in t.shape for t in tensors.values())]
    pairs = dict.fromkeys(pair for pair in (*firsts, *every) if pair[0] > 1)
    return sorted(pairs, key=cover, reverse=True)


def _is_safe(axes: Axes, batch: Any) -> bool:
    """False where a tensor looks like indices of samples, or of rows, and would not fit what is cut: a card does not survive an
    index that is too large."""
    tensors = tensors_of(batch)
    ends = next((owner for owner, _ in axes.packed.values()), None)
    for path, tensor in tensors.items():
        if tensor.device.type != "cuda" or tensor.dtype.is_floating_point or str(tensor.dtype) == "torch.bool":
            continue
        rows = axes.count(batch) if ends is None else int(tensors[ends][-1])
        whole = path not in axes.packed and axes.at.get(path, 0) is None
        if whole and tensor.numel() and rows // 2 <= int(tensor.max()) < rows:
            return False
        # which sequence each is in
        if path in axes.packed and bool((tensor.diff(dim=axes.packed[path][1]) >= 0).all()):
            return False
    return True


def _sharing(axes: Axes, path: str) -> Axes:
    """The same reading, but all samples share this tensor, whose size is that of the batch by chance."""
    return Axes(at={**axes.at, path: None}, packed=axes.packed)


def _are_ends(path: str, tensor: Any, tensors: Mapping[str, Any]) -> bool:
    """True for whole numbers that begin with 0, rise, and end with the length of another tensor."""
    if tensor.dim() != 1 or len(tensor) < 3 or tensor.dtype.is_floating_point or str(tensor.dtype) == "torch.bool":
        return False
    values = tensor.tolist()
    rising = values[0] == 0 and all(before < after for before, after in itertools.pairwise(values))
    return rising and any(values[-1] in other.shape[:2] for name, other in tensors.items() if name != path)


def _packed(tensors: Mapping[str, Any], ends: list[str]) -> dict[str, tuple[str, int]]:
    """Tensors as long as the last end says."""
    found: dict[str, tuple[str, int]] = {}
    for owner in reversed(ends):  # the first one counts
        total = int(tensors[owner][-1])
        long = {path: t for path, t in tensors.items() if path not in ends and total in t.shape[:2]}
        found |= {path: (owner, tuple(tensor.shape).index(total)) for path, tensor in long.items()}
    return found
