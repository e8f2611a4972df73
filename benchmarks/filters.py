"""A separable 5x5 Gaussian filter (binomial weights) of the last two axes, in plain NumPy; the outermost two rows are
not meant."""

from __future__ import annotations

from typing import Any

import numpy as np


def gauss5(block: Any) -> Any:
    """Filter along both axes; the result has the block's shape."""
    return _along(_along(block, -1), -2)


def _along(block: Any, axis: int) -> Any:
    x = np.moveaxis(block, axis, -1)
    out = np.empty(block.shape, block.dtype)
    y = np.moveaxis(out, axis, -1)
    middle = y[..., 2:-2]
    np.add(x[..., 1:-3], x[..., 3:-1], out=middle)
    middle *= np.float32(4)
    room = x[..., 2:-2] * np.float32(6)
    middle += room
    np.add(x[..., :-4], x[..., 4:], out=room)
    middle += room
    middle /= np.float32(16)
    y[..., :2], y[..., -2:] = x[..., :2], x[..., -2:]
    return out
