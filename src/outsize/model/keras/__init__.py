"""Estimate and fit for Keras 3 and TensorFlow 2: a step is traced to a graph, which is followed without running it."""

from __future__ import annotations

from outsize.model.keras.estimate import estimate
from outsize.model.keras.fit import fit

__all__ = ["estimate", "fit"]
