"""Arrays larger than memory: graph -> plan -> run, inside a budget of bytes. The namespace of the array API standard."""

from __future__ import annotations

from outsize.array.array import Array

__all__ = ["Array"]
