"""Fit: run a training step inside a budget of bytes."""

from __future__ import annotations

from outsize.model.fitting.adapters import in_trainer, lightning_step, trainer_loss
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.head import chunked_cross_entropy
from outsize.model.fitting.hosted.empty import without_weights
from outsize.model.fitting.hosted.fitted import HostedFitted
from outsize.model.fitting.largest import batch_size
from outsize.model.fitting.loading import loader
from outsize.model.fitting.verb import fit

__all__ = [
    "Fitted", "HostedFitted", "batch_size", "chunked_cross_entropy", "fit", "in_trainer", "lightning_step", "loader",
    "trainer_loss", "without_weights",
]  # fmt: skip
