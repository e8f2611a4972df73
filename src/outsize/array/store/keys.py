"""Which array of a file is meant: `path::key` in one text, or a key beside it, or the only one there is."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.core.errors import InputError

_LISTED = 20
"""A file may hold ten thousand tensors; an error lists this many."""


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
        raise InputError(
            f"{path} holds {len(keys)} arrays; say which, as {path}::{keys[0]} or with key=: {_listed(keys)}"
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
