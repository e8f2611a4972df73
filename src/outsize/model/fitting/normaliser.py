"""How the losses of slices add up to the loss of the batch.

In: a slice and the batch it was cut from. Out: the weight of the slice's loss. Which rule holds is found by trying it
on a few samples (`check`), because a rule taken on trust is how gradient accumulation went wrong for years: a mean
over tokens is not a mean of means when samples have different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from outsize.core.noun import Noun
from outsize.model.fitting import batch as batches
from outsize.model.fitting.means import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser(Noun):
    """One rule."""

    rule: Literal["samples", "sum", "labels", "count"] = "samples"
    """Mean over samples, sum, mean over labels that are not ignored, or the loss's own (total, count)."""
    path: str = ""
    """Where in the batch the labels are."""
    shifted: bool = False
    """The first label of each row has no prediction, as in a causal language model."""
    ignored: int = IGNORED
    """The label that is left out."""

    @property
    def counts(self) -> bool:
        """True where the loss gives (total, count)."""
        return self.rule == "count"

    def measure(self, batch: Any) -> int:
        """Labels of a batch that count."""
        if self.rule != "labels":
            return 0
        labels = batches.tensors_of(batch)[self.path]
        labels = labels[..., 1:] if self.shifted else labels
        return int((labels != self.ignored).sum())

    def weigh(self, part: Any, rows: int, all_rows: int, whole: int) -> float:
        """Weight of the loss of a slice of `rows` out of `all_rows` samples."""
        if self.rule == "samples":
            return rows / all_rows
        if self.rule == "labels":
            return self.measure(part) / max(1, whole)
        return 1.0

    def __str__(self) -> str:
        said = {
            "samples": "a mean over samples",
            "sum": "a sum over samples",
            "labels": f"a mean over the labels in {self.path} that are not {self.ignored}",
            "count": "the loss's own total / count",
        }
        return said[self.rule]
