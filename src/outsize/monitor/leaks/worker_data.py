"""What forked workers read: the longest list or dict of a `DataLoader`'s dataset, and the line that reads it."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import textwrap
from typing import Any

from outsize.monitor.leaks.census import named_values
from outsize.monitor.leaks.user_code import spell

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


def _candidates() -> Any:
    yield from named_values()
    loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if loader is not None:
        for item in gc.get_objects():
            if isinstance(item, loader):
                dataset = item.dataset
                for name, value in getattr(dataset, "__dict__", {}).items():
                    yield type(dataset).__qualname__, f".{name}", value


def _reading_line(name: str) -> str | None:
    """The line of the class's `__getitem__` or `__iter__` that uses the attribute."""
    owner, _, attribute = name.rpartition(".")
    for kind in (item for item in gc.get_objects() if isinstance(item, type) and item.__qualname__ == owner):
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
