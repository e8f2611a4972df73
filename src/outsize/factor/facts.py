"""What is known of factors beside their values: how far they are from the data, and what was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.core.noun import Known
from outsize.core.outcomes.factoring import Spectrum
from outsize.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a decomposition says, or what follows from it."""

    error: float | None = None
    """Frobenius norm of what is lost, relative to that of the data; None where only `lost` is known, or nothing."""
    lost: float | None = None
    """Frobenius norm of what is lost; None where it follows from `error`, or is unknown."""
    known: Known = Known.BOUND
    asked: float | None = None
    norm: float | None = None
    """Frobenius norm of the data; None if unknown."""
    original: np.dtype[Any] | None = None
    """Element type of the data, None if it is that of the factors."""
    notes: tuple[str, ...] = ()
    spectra: tuple[Spectrum, ...] = ()
    plan: Plan | None = None
    seconds: float | None = None
    read: int | None = None
    """Bytes of data that were read in all."""
    measured: int | None = None
    """Host bytes that it held at most."""
