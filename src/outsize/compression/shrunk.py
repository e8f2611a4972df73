"""What users hold after `shrink`: the smaller model and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outsize.core.shrinking import Shrinking


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shrunk:
    """A smaller model."""

    model: Any
    """A `torch.nn.Module` that takes and gives what the user's model does."""
    plan: Shrinking
    """What was measured and what was taken."""

    def __repr__(self) -> str:
        return str(self.plan)
