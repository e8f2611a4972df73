"""What forked workers read: the longest list or dict of a `DataLoader`'s dataset, and the line that reads it."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from outsize.monitor.leaks.census import named_values
from outsize.monitor.leaks.user_code import locals_of, spell, user_frames, user_modules

_LONG = 10_000


WorkerData = tuple[str | None, str | None, str | None]
"""(name, line that reads it, words for it)."""


def nothing_known() -> WorkerData:
    """What is known of another process."""
    return None, None, None


def find_worker_data() -> WorkerData:
    """The longest container of Python objects that workers may read."""
    best: tuple[int, str, Any, Any] | None = None
    for owner, name, value in _candidates():
        if isinstance(value, list | dict | tuple) and len(value) >= _LONG and (best is None or len(value) > best[0]):
            full = f"{owner}{name}" if name.startswith(".") else name
            best = (len(value), full, value, owner)
    if best is None:
        return nothing_known()
    length, name, value, _ = best
    return name, _reading_line(name), f"`{name}`, a {type(value).__name__} of {length:,} objects,"


def _candidates() -> Iterator[tuple[str, str, Any]]:
    yield from named_values()
    for dataset in _datasets():
        for name, value in getattr(dataset, "__dict__", {}).items():
            yield type(dataset).__qualname__, f".{name}", value


def _datasets() -> list[Any]:
    """What the program's `DataLoader`s read."""
    loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    return [] if loader is None else [item.dataset for item in gc.get_objects() if issubclass(type(item), loader)]


def _classes(name: str) -> Iterator[type]:
    """Classes of that name: of the program's modules and objects (which `gc.freeze()` does not hide), and of datasets."""
    held = [value for module in user_modules() for value in list(vars(module).values())]
    held += [value for frame in user_frames() for value in locals_of(frame).values()]
    for value in (*held, *_datasets()):
        kind = value if issubclass(type(value), type) else type(value)
        if kind.__qualname__ == name:
            yield kind


def _reading_line(name: str) -> str | None:
    """The line of the class's `__getitem__` or `__iter__` that uses the attribute."""
    owner, _, attribute = name.rpartition(".")
    for kind in dict.fromkeys(_classes(owner)):
        for method in ("__getitem__", "__iter__", "__getitems__"):
            function = kind.__dict__.get(method)
            if function is None:
                continue
            try:
                lines, first = inspect.getsourcelines(function)
                tree = ast.parse(textwrap.dedent("".join(lines)))
            except (OSError, SyntaxError, TypeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr == attribute:
                    return spell(function.__code__.co_filename, first + node.lineno - 1)
    return None
