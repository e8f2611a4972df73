"""Runs compiled models with graphs that compute a part of their forward pass again.

In: a model and the part. Out: a block in which whatever is compiled of it saves that much less. Torch remembers what it has
compiled; where another part is wanted than before, it has to forget that.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from outsize.model.compiled.partition import choose_saved
from outsize.model.torch_port import compiler

_parts: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
"""Model -> the part that its graphs compute again now."""


@contextlib.contextmanager
def computing_again(model: Any, part: float, real: bool) -> Iterator[None]:
    """Graphs that are compiled in the block compute `part` again; `real`: kernels run, and the compiler may know other graphs."""
    if real and _parts.get(model) != part:
        compiler.reset_compiler()
        _parts[model] = part
    with compiler.saving(functools.partial(choose_saved, part=part), part):
        yield


def forget(model: Any) -> None:
    """What is compiled next is compiled anew: the compiler was used for something else."""
    _parts.pop(model, None)
