"""What a user's loss function gave, and how the losses of slices add up to the loss of the batch.

In: the value of the loss; the slices of a batch. Out: a scalar, or a total and a count whose quotient is the loss; the weight of
each slice's loss. `learn` finds the rule by trying it on a few samples: a mean over tokens is not a mean of means when samples
have different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from outsize.core.errors import InputError
from outsize.core.noun import Noun
from outsize.model.fitting import batch as batches
from outsize.model.fitting.axes import Axes

IGNORED = -100
"""The label that cross entropy leaves out unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser(Noun):
    rule: Literal["samples", "sum", "labels", "count"] = "samples"
    """Mean over samples, sum, mean over labels that are not ignored, or the loss's own (total, count)."""
    path: str = ""
    """Where in the batch the labels are."""
    shifted: bool = False
    """The first label of each row has no prediction, as in a causal language model."""
    ignored: int = IGNORED
    """The label that is left out."""
    whole: tuple[tuple[str, int], ...] = ()
    """Where labels are that all have to count, each with the label that would not: the loss has several means."""

    @property
    def counts(self) -> bool:
        """True where the loss gives (total, count)."""
        return self.rule == "count"

    def measure(self, batch: Any) -> int:
        """Labels of a batch that count."""
        return int(self._counted(batch).sum()) if self.rule == "labels" else 0

    def weigh(self, batch: Any, runs: list[tuple[int, int]], axes: Axes) -> list[float]:
        """Weight of the loss of each slice; labels are asked for once, since whoever asks a card waits for it."""
        if missing := self.find_missing(batch):
            raise InputError(f"{missing}; fit with without=('slices',) for batches such as this one")
        rows = runs[-1][1]
        if self.rule == "samples":
            return [(stop - start) / rows for start, stop in runs]
        if self.rule == "labels":
            import torch

            counts = torch.stack([self._counted(axes.take(batch, *run)).sum() for run in runs]).tolist()
            return [count / max(1, sum(counts)) for count in counts]
        return [1.0] * len(runs)

    def find_missing(self, batch: Any) -> str:
        """Why this batch cannot be cut: one of several means leaves out labels of it; empty where none does."""
        tensors = batches.tensors_of(batch)
        for path, label in self.whole:
            if (tensors[path] == label).any():
                return (
                    f"the loss has several terms, of which one is a mean over the labels in {path} that are not {label}, so that "
                    "slices would weigh differently: give (total, count) to have it cut"
                )
        return ""

    def _counted(self, batch: Any) -> Any:
        labels = batches.tensors_of(batch)[self.path]
        labels = labels[..., 1:] if self.shifted else labels
        return labels != self.ignored

    def __str__(self) -> str:
        said = {
            "samples": "a mean over samples",
            "sum": "a sum over samples",
            "labels": f"a mean over the labels in {self.path} that are not {self.ignored}",
            "count": "the loss's own total / count",
        }
        return said[self.rule]


def read_loss(value: Any) -> tuple[Any, Any]:
    """(loss, None) for a scalar, (total, count) for a pair; an `InputError` for anything else."""
    pair = isinstance(value, tuple) and len(value) == 2
    loss, count = value if pair else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (pair and not _is_number(count)):
        raise InputError(
            f"loss(model, batch) gave {_describe(value)}: it must give a scalar tensor, or a pair (total, count) whose quotient "
            "is the loss"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(
            "loss(model, batch) gave a number that has no gradient: it was detached, made under no_grad, or depends on no "
            "parameter that is trained"
        )
    return loss.reshape(()), count


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1)
    return isinstance(value, int | float)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__
