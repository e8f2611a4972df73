"""The namespace's functions, by subject. Names and meanings are the array API standard's; NumPy's spelling is accepted
beside it where NumPy sends its own function here (`np.concatenate`, `np.transpose`)."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from outsize.array.api import (
    blockwise,
    creation,
    elementwise,
    inspection,
    manipulation,
    order_statistics,
    products,
    reductions,
    sets,
    sorting,
)  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: found
    for module in (
        creation,
        elementwise,
        manipulation,
        reductions,
        products,
        sorting,
        order_statistics,
        sets,
        blockwise,
        inspection,
    )
    for name, found in vars(module).items()
    if not name.startswith("_") and isinstance(found, FunctionType) and found.__module__ == module.__name__
}
"""Name -> function."""
