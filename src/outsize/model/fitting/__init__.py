"""Fit: run a training step inside a budget of bytes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.model.fitting.fitted import Fitted
    from outsize.model.fitting.move.weight_files import without_weights
    from outsize.model.fitting.run.chunked_loss import chunked_cross_entropy
    from outsize.model.fitting.trainers import in_trainer, lightning_step, trainer_loss

__all__ = [
    "Fitted", "chunked_cross_entropy", "in_trainer", "lightning_step",
    "trainer_loss", "without_weights",
]  # fmt: skip

_HOMES = {
    "Fitted": "fitted", "chunked_cross_entropy": "run.chunked_loss", "in_trainer": "trainers", "lightning_step": "trainers",
    "trainer_loss": "trainers", "without_weights": "move.weight_files",
}  # fmt: skip
"""Name -> the module it lives in, which imports torch: this one is also imported where torch is not."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
