"""The name under which a program holds an object: `find_holding(losses)` -> `losses` of `__main__`, with the way from
there down.

First the program's own variables and attributes are looked through. Where none of them is the object, its referrers are
followed upward, level by level, until a variable, a class, a function or a module is met.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

from outsize.monitor.leaks.census import CACHE, named_values
from outsize.monitor.leaks.user_code import code_line, is_user_file, is_user_module, locals_of

_LEVELS = 9
_C_ATTRIBUTES = ("_backward_hooks",)
"""Attributes that an object of C code (a tensor) has beside those of its dict."""
_WIDEST = 400
"""Referrers that are followed on one level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How an object is held."""

    name: str | None
    """`losses`, `Trainer.history`, `threading._active`; None where no name leads to it."""
    chain: tuple[str, ...] = ()
    """From the name down to the object."""
    where: str | None = None
    """Line of the function that holds it, for caches and closures."""
    is_user: bool = True
    """False where a library's name holds it and no name of the program."""


NOTHING = Holding(name=None, is_user=False)


def find_holding(target: Any, ours: set[int]) -> Holding:
    """The shortest way from a name of the program to an object, else from a name of a library."""
    roots: dict[int, str] = {}
    for owner, name, value in named_values():
        if value is target or gc.is_tracked(value):
            roots.setdefault(id(value), f"{owner}{name}" if name.startswith(".") else name)
    if id(target) in roots:
        return Holding(name=roots[id(target)], chain=(roots[id(target)],))
    return _climb(target, ours, roots)


def _climb(target: Any, ours: set[int], roots: dict[int, str]) -> Holding:
    level: list[tuple[Any, tuple[str, ...]]] = [(target, ())]
    seen = {id(target), id(roots), *ours}
    library = NOTHING
    for _ in range(_LEVELS):
        above: list[tuple[Any, tuple[str, ...]]] = []
        children = {id(item): (item, path) for item, path in level}
        parents = gc.get_referrers(*[item for item, _ in level])
        seen |= {id(level), id(above), id(children), id(parents), id(library)}
        for parent in parents:
            if id(parent) in seen or _is_ours(parent):
                continue
            seen.add(id(parent))
            for link, child in _links(parent, children):
                path = (link, *children[id(child)][1]) if link else children[id(child)][1]
                holding = _name_root(parent, link, path)
                if id(parent) in roots:
                    root = roots[id(parent)]
                    holding = Holding(name=_join(root, path), chain=(root, *path))
                if holding is not None and holding.is_user:
                    return holding
                library = holding if holding is not None and library is NOTHING else library
                if holding is None and len(above) < _WIDEST:
                    above.append((parent, path))
        if not above:
            break
        level = above
    return library


def _is_ours(parent: Any) -> bool:
    """Frames of this search, and the lists and tuples that they hold."""
    if isinstance(parent, FrameType):
        return not is_user_file(parent.f_code.co_filename) and "outsize" in parent.f_code.co_filename
    return isinstance(parent, tuple) and len(parent) == 2 and isinstance(parent[1], tuple)


def _links(parent: Any, children: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """(how the parent names it, child) for the first of the children that the parent holds."""
    if isinstance(parent, dict):
        for key, value in list(dict.items(parent)):
            if id(value) in children:
                yield _key_link(key), value
                return
    elif isinstance(parent, list | tuple):
        for index, value in enumerate(list(parent)):
            if id(value) in children:
                yield f"[{index}]", value
                return
    elif isinstance(parent, FrameType):
        for name, value in locals_of(parent).items():
            if id(value) in children:
                yield name, value
                return
    else:
        yield from _attribute_links(parent, children)


def _key_link(key: Any) -> str:
    """How a key is written; one that is only an object at some address says nothing."""
    if isinstance(key, str):
        return key
    try:
        text = repr(key)
    except Exception:  # objects answer as they like
        return ""
    return "" if text.startswith("<") else f"[{text:.20}]"


def _attribute_links(parent: Any, children: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    try:
        names = dict(vars(parent)) if not isinstance(parent, type | ModuleType) else {}
    except TypeError:
        names = {}
    for kind in type(parent).__mro__:
        for name in getattr(kind, "__slots__", ()) if isinstance(getattr(kind, "__slots__", ()), tuple | list) else ():
            names.setdefault(name, getattr(parent, name, None))
    for name in _C_ATTRIBUTES:
        names.setdefault(name, getattr(parent, name, None) if hasattr(type(parent), name) else None)
    for name, value in names.items():
        if id(value) in children:
            yield f".{name}", value
            return
    for value in gc.get_referents(parent):
        if id(value) in children:
            yield "", value
            return


def _name_root(parent: Any, link: str, path: tuple[str, ...]) -> Holding | None:
    """The holding where this referrer has a name of its own."""
    if isinstance(parent, dict) and "__name__" in parent and isinstance(parent.get("__builtins__"), dict | ModuleType):
        module = sys.modules.get(parent["__name__"])
        user = module is None or is_user_module(module)
        name = link if user else f"{parent['__name__']}.{link}"
        return Holding(name=_join(name, path[1:]), chain=path, is_user=user)
    if isinstance(parent, FrameType):
        user = is_user_file(parent.f_code.co_filename)
        return Holding(name=_join(link, path[1:]), chain=path, is_user=user)
    if isinstance(parent, type):
        module = sys.modules.get(parent.__module__)
        user = module is None or is_user_module(module)
        return Holding(name=_join(parent.__qualname__, path), chain=(parent.__qualname__, *path), is_user=user)
    if type(parent) is CACHE and hasattr(parent, "__wrapped__"):
        code = getattr(parent.__wrapped__, "__code__", None)
        where = None if code is None else code_line(code)
        return Holding(name=parent.__wrapped__.__qualname__, chain=path, where=where, is_user=_is_user_code(code))
    if isinstance(parent, FunctionType):
        name = _closure_name(parent, path)
        return Holding(name=name, chain=path, where=code_line(parent.__code__), is_user=_is_user_code(parent.__code__))
    return None


def _closure_name(function: FunctionType, path: tuple[str, ...]) -> str:
    """The name of a closure's variable, else of the function itself."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        inner = _contents(cell)
        if inner is not None and gc.is_tracked(inner) and isinstance(inner, list | dict | set):
            return f"{name} of {function.__qualname__}"
    return function.__qualname__


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_user_code(code: Any) -> bool:
    return code is not None and is_user_file(code.co_filename)


def _join(name: str, path: tuple[str, ...]) -> str:
    """`model` and `._modules`, `[layer]` as one name; long ways are cut in the middle."""
    parts = [part if part.startswith((".", "[")) else f".{part}" for part in path if part]
    parts = [part for part in parts if part != ".__dict__"]
    return name + "".join(parts if len(parts) <= 4 else (*parts[:2], "...", *parts[-2:]))
