"""Fit: run a training step inside a budget of bytes."""

from __future__ import annotations

from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.move.weight_files import without_weights
from outsize.model.fitting.run.chunked_loss import chunked_cross_entropy
from outsize.model.fitting.trainers import in_trainer, lightning_step, trainer_loss

__all__ = [
    "Fitted", "chunked_cross_entropy", "in_trainer", "lightning_step",
    "trainer_loss", "without_weights",
]  # fmt: skip
