"""Tensors that are no block of memory with strides: sparse, nested, quantised. A trace has no rules for them.

In: an operator that met one, or torch's error about it. Out: a sentence that names them, in place of a riddle of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.core.errors import InputError
from outsize.model.tracing.rules.operators import look_up

_WORDS = {"Sparse": "sparse tensors", "Quantized": "quantised tensors"}
"""Word in torch's error where it has no such tensors without contents -> what they are."""


def refuse_nested(kinds: Any, func: Any, place: Callable[[], str]) -> None:
    """An error where an operator gets nested tensors."""
    if any(kind.__name__ == "NestedTensor" for kind in kinds):
        raise _not_followed("nested tensors", func, place)


def explained(error: NotImplementedError, func: Any, place: Callable[[], str]) -> Exception:
    """Torch's error by the name of what it is about; any other error stays as it is."""
    kind = next((kind for word, kind in _WORDS.items() if word in str(error)), None)
    return error if kind is None else _not_followed(kind, func, place)


def _not_followed(kind: str, func: Any, place: Callable[[], str]) -> InputError:
    where = ", ".join(filter(None, (look_up(func).name, place())))
    return InputError(f"{kind} are not followed ({where}): `outsize run --peak` measures a real run")
