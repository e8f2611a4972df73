"""The exact bytes of tensors and where they fit: from specs, this machine's `Reading` and the models of allocators."""

from __future__ import annotations

from outsize.sizing.size import size

__all__ = ["size"]
