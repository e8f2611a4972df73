"""What a user may say beside the path of an array that is opened or written; every format takes what concerns it.

Which array of a file is meant: `path::key` in one text, or a key beside it, or the only one there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outsize.core.dtypes import parse_dtype
from outsize.core.errors import InputError, SeveralArrays

_LISTED = 20
"""A file may hold ten thousand tensors; an error lists this many."""


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


def split_key(source: str, key: str | None) -> tuple[str, str | None]:
    """`x.h5::/group/x` -> (`x.h5`, `/group/x`); a key given beside it must not contradict."""
    path, mark, inside = source.partition("::")
    if not mark:
        return source, key
    if key is not None and key != inside:
        raise InputError(f"two keys for {path}: {inside!r} after '::' and key={key!r}")
    return path, inside


def choose_key(path: str, keys: Sequence[str], key: str | None) -> str:
    """The key that is meant; an `InputError` that lists what there is where none or an unknown one was given."""
    if key is None:
        if len(keys) == 1:
            return keys[0]
        if not keys:
            raise InputError(f"{path} holds no arrays")
        raise SeveralArrays(
            f"{path} holds {len(keys)} arrays; say which, as {path}::{keys[0]} or with key=: {_listed(keys)}",
            keys=tuple(keys),
        )
    for wanted in (key, key.strip("/")):
        if wanted in keys:
            return wanted
    import difflib  # slow to load, and only needed for a mistake

    near = difflib.get_close_matches(key, keys, n=3)
    shown = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it holds {_listed(keys)}"
    raise InputError(f"{path} has no array {key!r}; {shown}")


def _listed(keys: Sequence[str]) -> str:
    shown = ", ".join(key if len(key) <= 80 else key[:77] + "..." for key in keys[:_LISTED])
    return shown + (f", and {len(keys) - _LISTED} more" if len(keys) > _LISTED else "")


def as_numpy(dtype: Any) -> np.dtype[Any]:
    """NumPy's own reading first; then the names of other frameworks. `f16` is float16, as everywhere in Outsize."""
    if isinstance(dtype, str) and dtype.lower() == "f16":
        dtype = "float16"
    try:
        return np.dtype(dtype)  # type: ignore[no-any-return]
    except TypeError:
        name = parse_dtype(dtype).name
    try:
        return np.dtype(name)
    except TypeError:
        way_out = "only .safetensors can hold it" if name == "bfloat16" else "use float16 or float32 instead"
        raise InputError(f"NumPy has no {name}: {way_out}") from None
