"""What a plan has decided.

In: nothing. Out: `Choice`, the one value that the planner searches, the runner obeys and the projection traces: all
three read the same few fields, so what is projected is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Noun):
    """Which remedies are on, and how far."""

    slices: int = 1
    """Into how many slices the batch is cut."""
    first: int = 0
    """Samples of the first slice, where it is larger than the others; 0: all are alike."""
    checkpoint: tuple[str, ...] = ()
    """Modules whose activations are computed again in the backward pass."""
    offload: tuple[str, ...] = ()
    """Modules whose activations wait elsewhere for the backward pass."""
    in_backward: bool = False
    """Parameters are updated as soon as the gradients of a few are complete."""
    state_away: float = 0.0
    """Part of the optimizer state, that of the largest parameters, that lives elsewhere and visits group by group."""
    gradients_away: bool = False
    """Gradients live elsewhere until the update."""
    stream: tuple[str, ...] = ()
    """Modules whose weights live elsewhere and visit when the module runs."""
    chunks: int = 0
    """Pieces in which the output head and its cross entropy run; 0: whole."""
    autocast: bool = False
    """Run in bfloat16 autocast."""
    expandable: bool = False
    """The card's allocator has segments that grow."""

    @property
    def plain(self) -> bool:
        """The step runs as it would without us, whatever the allocator does."""
        return replace(self, expandable=False) == Choice()

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Which of weights, gradients and state are elsewhere or gone early."""
        return tuple(name for name in ("in_backward", "state_away", "gradients_away", "stream") if getattr(self, name))
