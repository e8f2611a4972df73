"""What a hosted plan has decided: the planner searches it, the runner obeys it, the trace runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedChoice(Noun):
    """How weights, gradients, state and inputs go to and fro."""

    limit: int
    """Most bytes of a unit."""
    ring: int
    """Bytes of device memory through which units pass."""
    held: tuple[str, ...] = ()
    """Modules and parameters that stay on the device."""
    update: Literal["card", "host", "kept", "none"] = "none"
    """Where parameters are updated; `kept`: gradients wait on the host, `none`: inference."""
    state: int = 0
    """Bytes of device memory through which optimizer state passes."""
    few: int = 0
    """Parameters below so many bytes are updated a few at a time: alone they would cost more calls than work."""
    inputs: bool = False
    """Inputs of units wait on the host."""
    pieces: int = 1
    """Pieces in which each unit's rows run."""
    more: bool = False
    """A larger batch than the planned one may run in more pieces."""
    disk: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`state`, `weights`, `gradients` -> parameters of which they are in the scratch file."""
    piece: int = 0
    """Bytes of one transfer to or from that file; 0: there is none."""
    chunks: int = 0
    """Pieces in which the output head and its cross entropy run; 0: whole."""
