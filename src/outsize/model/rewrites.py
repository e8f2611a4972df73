"""Operators that the card's torch runs under another name than the one chosen for a tensor without a card.

Torch looks at a tensor's real device when it picks the fused form of an operator. While a trace runs, these composite operators
are replaced by what torch picks on CUDA, so that the same things are saved for the backward pass.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def installed(on_card: Callable[[Any], bool]) -> Iterator[None]:
    """The replacements for tensors for which `on_card(tensor)` holds, for as long as the block runs."""
    import torch

    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")

    def dropout(x: Any, p: float, train: bool) -> Any:
        if train and 0 < p < 1 and x.numel() and on_card(x):
            return aten.native_dropout(x, p, train)[0]
        return aten.dropout.default.decompose(x, p, train)

    rows = (("dropout", dropout),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in rows:
            library.impl(name, function, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()
