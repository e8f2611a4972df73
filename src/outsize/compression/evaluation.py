"""The user's data and loss -> a measured loss.

A loss is measured in evaluation mode, without gradients, on the same batches each time and from the same random state for each,
so that two models differ only by what was done to them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.compression.hooks import evaluating, hooked
from outsize.compression.method import Subject
from outsize.core.errors import InputError
from outsize.model.fitting.user_errors import in_users_code

MOST_BATCHES = 128
"""Batches that are taken of a longer loader."""
FEW_BATCHES = 32
"""Of which so many are enough for what is done a hundred times: to measure each candidate alone, to fit methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one evaluation found."""

    loss: float
    """Mean over all samples; infinite where it is not a number."""
    seconds: float
    """Of one batch, the fastest."""
    parts: tuple[float, ...] = ()
    """What each batch gives to the mean."""
    sums: tuple[tuple[float, float], ...] = ()
    """(total, count) of each batch."""

    def doubt(self, other: Measured) -> float:
        """One standard error of the difference between two losses, from how it differs between batches: a change that is seen on
        these batches by chance would not be seen on others."""
        count = len(self.parts)
        if count < 2 or not math.isfinite(self.loss) or not math.isfinite(other.loss):
            return 0.0
        return statistics.stdev(one - two for one, two in zip(self.parts, other.parts, strict=True)) * math.sqrt(count)

    def is_worse(self, other: Measured) -> bool:
        """True where the loss is higher by more than chance explains."""
        return self.loss - other.loss > self.doubt(other)


def read_batches(data: Any, most: int, what: str = "data") -> tuple[list[Any], bool]:
    """The batches, and whether there were more. A tensor, tuple or table is one batch; a list or loader holds many."""
    import torch

    if data is None:
        raise InputError(
            "shrink measures on your data: give data=, a list or loader of batches that loss(model, batch) takes"
        )
    if isinstance(data, torch.Tensor | tuple | dict):
        return [data], False
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        raise InputError(f"{what} is {type(data).__name__}: give one batch, or a list or loader of batches")
    with in_users_code(f"going through {what}"):
        found = list(itertools.islice(iter(data), most + 1))
    if not found:
        raise InputError(f"{what} has no batches: shrink takes nothing away without measuring on your data")
    return found[:most], len(found) > most


def fingerprint(batch: Any) -> bytes:
    """The same for two batches that hold the same."""
    import torch

    from outsize.model.fitting.batch import tensors_of

    found = hashlib.blake2b(digest_size=16)
    tensors = tensors_of(batch)
    for path, tensor in tensors.items():
        found.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        try:
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
        ):  # a kind of tensor without plain bytes, such as a sparse one
            found.update(str(id(tensor)).encode())
    if not tensors:
        found.update(repr(batch).encode())
    return found.digest()


def default_loss(model: Any, batch: Any) -> Any:
    """What models of transformers give: `model(**batch).loss`."""
    found = getattr(model(**batch), "loss", None) if isinstance(batch, dict) else None
    if found is None:
        raise InputError("give loss=: a function loss(model, batch) that returns a scalar, or (total, count)")
    return found


def evaluate(model: Any, subject: Subject) -> Measured:
    """The loss of a model on the subject's data; the model is left as it was."""
    import torch

    found: list[tuple[float, float]] = []
    fastest = math.inf
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        for batch in subject.batches:
            torch.manual_seed(0)
            began = time.perf_counter()
            found.append(_as_numbers(subject.loss(model, batch)))
            fastest = min(fastest, time.perf_counter() - began)
    return _as_measured(found, fastest)


def evaluate_hooked(subject: Subject, hooks: Collection[Any]) -> Measured:
    """The loss of the user's model, seen by these hooks, which go afterwards."""
    with hooked(hooks):
        return evaluate(subject.model, subject)


def join(measured: Iterable[Measured]) -> Measured:
    """Evaluations of several parts of the data as one."""
    found = list(measured)
    return _as_measured([pair for one in found for pair in one.sums], min(one.seconds for one in found))


def _as_measured(sums: Sequence[tuple[float, float]], seconds: float) -> Measured:
    weight = sum(count for _, count in sums)
    parts = tuple(total / weight for total, _ in sums) if weight else (math.nan,)
    mean = math.fsum(parts) if all(map(math.isfinite, parts)) else math.inf
    return Measured(loss=mean, seconds=seconds, parts=parts, sums=tuple(sums))


def _as_numbers(found: Any) -> tuple[float, float]:
    """(total, count) of what a loss gave."""
    try:
        if isinstance(found, tuple):
            total, count = found
            return float(total), float(count)
        return float(found), 1.0
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(found, "shape", None)
        what = type(found).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise InputError(f"loss(model, batch) gave {what}: it must give a scalar, or (total, count)") from None


def require_loss(subject: Subject) -> Measured:
    """The loss of the user's own model, which must be a number and come from the model."""
    asked: list[bool] = []
    hooks = [module.register_forward_hook(lambda *_: asked.append(True)) for module in subject.model.modules()]
    with in_users_code("loss(model, batch)"):
        found = evaluate_hooked(subject, hooks)
    if not math.isfinite(found.loss):
        raise InputError(
            "the loss of this model on this data is not a finite number: nothing can be measured against it"
        )
    if not asked:
        raise InputError(
            "loss(model, batch) does not call the model that it is given: it must compute with its first argument, not with "
            "a model of its own"
        )
    return found


def first_call(subject: Subject) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What the loss of the first batch calls the model with; None where it calls something else."""
    import torch

    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hooks = [subject.model.register_forward_pre_hook(lambda _, *given: found.append(given), with_kwargs=True)]
    with hooked(hooks), torch.no_grad(), torch.random.fork_rng():
        subject.loss(subject.model, subject.batches[0])
    return found[0] if found else None
