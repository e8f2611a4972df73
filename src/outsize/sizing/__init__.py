"""What tensors of given shapes take, exactly, and where they fit: specs, this machine's `Reading` and the allocators' rules."""

from __future__ import annotations

from outsize.sizing.size import size

__all__ = ["size"]
