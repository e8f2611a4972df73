"""What a user may say beside the path of an array that is opened or written; every format takes what concerns it."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """What a user may say beside the path."""

    key: str | None = None
    """Which array of a file that holds several."""
    mode: str = "r"
    """`r`, or `r+` to write in place."""
    missing: str = "error"
    """What a missing zarr chunk means: `error` or `fill`."""
    chunks: tuple[int, ...] | None = None
    """Shape of the chunks of an output."""
    compress: bool = True
    """Compress the chunks of an output where the format can."""


DEFAULT = Options()
"""Nothing was said."""
