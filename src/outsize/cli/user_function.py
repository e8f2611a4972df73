"""`package.module:function` on a command line -> the user's function."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outsize.core.errors import InputError


def load(target: str) -> Callable[..., Any]:
    """`package.module:function` -> the function; the current folder is searched first."""
    name, colon, attribute = target.partition(":")
    name = name.removesuffix(".py")
    if not colon or not name or not attribute:
        raise InputError(f"{target!r} is not MODULE:FUNCTION, such as train:make_step")
    sys.path.insert(0, os.getcwd())
    _refuse_loop(name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {error.name!r} here, asked for by {target!r}") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" at {os.path.basename(place.filename)}:{place.lineno}"
        raise InputError(f"importing {name} raised {type(error).__name__}{where}: {error}") from error
    if not hasattr(module, attribute):
        raise InputError(
            f"the module {name} has no {attribute!r}: it has {', '.join(_functions(module)) or 'no functions'}"
        )
    found = getattr(module, attribute)
    if not callable(found):
        raise InputError(f"{target} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _refuse_loop(name: str) -> None:
    """An error for a file that trains as soon as it is imported."""
    try:
        found = importlib.util.find_spec(name)
        source = "" if found is None or found.origin is None else Path(found.origin).read_text()
        body = ast.parse(source).body
    except (ImportError, SyntaxError, OSError, ValueError, AttributeError):
        return  # the import says what is wrong
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.If) and "__name__" in ast.unparse(statement)[:40]:
            continue
        if isinstance(statement, ast.For | ast.While | ast.With | ast.Try | ast.If) and _trains(statement):
            raise InputError(
                f"{name}.py starts to train when it is imported (line {statement.lineno}): "
                f"outsize estimate {name}.py follows it as it is"
            )


def _trains(statement: ast.stmt) -> bool:
    """True where a loop calls `backward()` or `step()`."""
    loops = [node for node in ast.walk(statement) if isinstance(node, ast.For | ast.While)]
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("backward", "step")
        for loop in loops
        for node in ast.walk(loop)
    )


def _functions(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
