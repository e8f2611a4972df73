"""How the losses of slices add up to the loss of the batch.

In: a slice and the batch it was cut from. Out: the weight of the slice's loss. Which rule holds is found by trying it
on a few samples (`check`), because a rule taken on trust is how gradient accumulation went wrong for years: a mean
over tokens is not a mean of means when samples have different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from outsize.core.errors import InputError
from outsize.core.noun import Noun
from outsize.model.fitting import batch as batches
from outsize.model.fitting.learn.loss_rule import IGNORED


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
    whole: tuple[tuple[str, int], ...] = ()
    """Where labels are that all have to count, each with the label that would not: the loss has several means."""

    @property
    def counts(self) -> bool:
        """True where the loss gives (total, count)."""
        return self.rule == "count"

    def measure(self, batch: Any) -> int:
        """Labels of a batch that count."""
        return int(self._counted(batch).sum()) if self.rule == "labels" else 0

    def weigh(self, batch: Any, runs: list[tuple[int, int]]) -> list[float]:
        """Weight of the loss of each slice; labels are asked for once, since whoever asks a card waits for it."""
        if missing := self.find_missing(batch):
            raise InputError(f"{missing}; fit with without=('slices',) for batches such as this one")
        rows = runs[-1][1]
        if self.rule == "samples":
            return [(stop - start) / rows for start, stop in runs]
        if self.rule == "labels":
            counted = self._counted(batch)
            each = (counted.flatten(1).sum(1) if counted.dim() > 1 else counted).tolist()
            return [sum(each[start:stop]) / max(1, sum(each)) for start, stop in runs]
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
        """True for each label that counts."""
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
