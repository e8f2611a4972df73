"""What a fitted step of JAX does differently from the plain one."""

from __future__ import annotations

from dataclasses import dataclass

KEYS = ("slices", "checkpoint", "order", "offload", "timing")
"""What a user may leave out: remedies, and the timing of first steps."""


@dataclass(frozen=True, order=True)
class Choice:
    """The decisions as plain data. The plain step is `Choice()`."""

    slices: int = 1
    """Parts of the batch that are computed one after the other."""
    segments: int = 0
    """Parts of the loss that are computed again in the backward pass; 0: none is."""
    kept: str = ""
    """What is not computed again: `products` of matrices, values with `names` (`checkpoint_name`), or nothing."""
    ordered: bool = False
    """XLA orders the operators for memory."""
    kept_away: bool = False
    """What is kept, or stands between segments, waits in page-locked memory of the host for the backward pass."""
    state_away: bool = False
    """Optimizer state is in page-locked memory of the host between steps."""

    @property
    def kind(self) -> tuple[int, str]:
        """What runs again, which may be wrong where a loss draws or has effects."""
        return self.segments, self.kept

    def __str__(self) -> str:
        words = []
        if self.slices > 1:
            words.append(f"{self.slices} slices")
        if self.segments:
            what = "all but named values again" if self.kept == "names" else f"{self.segments} segments again"
            words.append(what + (", products kept" if self.kept == "products" else ""))
        if self.ordered:
            words.append("ordered for memory")
        if self.kept_away:
            words.append("kept values on the host")
        if self.state_away:
            words.append("optimizer state on the host")
        return ", ".join(words) or "plain"
