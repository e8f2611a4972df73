"""What the user's own code says, in a few letters: a plan is for this code.

In: a function, a class or an object that is called. Out: a digest of its bytecode, with that of the functions of the same module
that it names, and of all methods of a class. It is the same in every process with the same Python.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

LETTERS = 12
"""Of the digest: enough to tell, and short enough to be read."""


def digest_of_code(thing: Any) -> str:
    """A digest of the code behind a class, or behind something that is called."""
    found = hashlib.sha256()
    seen: set[Any] = set()
    for function in _functions_of(thing):
        for part in _parts(function, seen):
            found.update(part.encode())
    return found.hexdigest()[:LETTERS]


def _functions_of(thing: Any) -> Iterator[FunctionType]:
    """The functions of Python behind it, in a fixed order; none where it is written in another language."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = getattr(thing, "__func__", thing)
    if isinstance(thing, FunctionType):
        yield thing
        return
    for base in (thing if isinstance(thing, type) else type(thing)).__mro__:
        if base.__module__.partition(".")[0] in ("builtins", "torch"):
            continue
        for _, one in sorted(vars(base).items()):
            one = getattr(one, "__func__", getattr(one, "fget", one))
            if isinstance(one, FunctionType):
                yield one


def _parts(function: FunctionType, seen: set[Any]) -> Iterator[str]:
    """The code of a function, and of the functions beside it that it names or closes over."""
    if function in seen:
        return
    seen.add(function)
    yield from _code(function.__code__)
    names = sorted(set(_names(function.__code__)))
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    for other in (*(function.__globals__.get(name) for name in names), *cells):
        other = getattr(other, "__wrapped__", other)
        if isinstance(other, FunctionType) and other.__module__ == function.__module__:
            yield from _parts(other, seen)


def _code(code: CodeType) -> Iterator[str]:
    yield from (code.co_name, code.co_code.hex(), repr(code.co_names), repr(code.co_varnames))
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code(value)
        else:  # the order of a set differs from process to process
            yield repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its function has not been defined yet
        return False
