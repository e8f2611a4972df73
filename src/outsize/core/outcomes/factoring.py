"""What a decomposition made: how much smaller, how far from the data, and the singular values that it was cut at."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.noun import Known, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum(Noun):
    """Singular values along one mode (or at one cut of a tensor train), and how many were kept."""

    name: str
    """`mode 0`, or `cut 1 | 2` of a tensor train."""
    values: tuple[float, ...]
    """Falling. Of a long mode, as many as were computed."""
    kept: int
    length: int
    """How many there are: the length of the mode."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Factoring(Noun):
    """A tensor kept as factors."""

    method: str
    """`tucker`, `tt`, `cp`, `svd`, or a plain dtype or codec."""
    shape: tuple[int, ...]
    dtype: str
    ranks: tuple[int, ...]
    """Of each mode; of each cut of a tensor train; the one rank of CP and SVD; () of a plain dtype."""
    error: float | None
    """Frobenius norm of what is lost, relative to that of the data; None where no bound is known."""
    known: Known
    asked: float | None
    """The error that was asked for, None where a rank was."""
    bytes_before: int
    bytes_after: int
    spectra: tuple[Spectrum, ...] = ()
    """Singular values and cuts, where they are known."""
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    """How long it took, None where it was not measured."""
    read: int | None = None
    """Bytes of data that were read in all, None where that was not measured."""
    projected: int | None = None
    """Host bytes that the plan said it would hold at most."""
    measured: int | None = None
    budget: int | None = None
    source: str | None = None
    target: str | None = None

    @property
    def ratio(self) -> float:
        return self.bytes_before / self.bytes_after if self.bytes_after else float("inf")

    @property
    def rate(self) -> float | None:
        """Bytes of the data per second, each counted once however often it was read."""
        return self.bytes_before / self.seconds if self.seconds else None
