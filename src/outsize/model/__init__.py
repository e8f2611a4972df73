"""Foresee what a training or inference step takes, without the card."""

from __future__ import annotations

from outsize.model.calibration import calibrate, keep
from outsize.model.estimate import estimate

__all__ = ["calibrate", "estimate", "keep"]
