"""The line that makes a variable from its own old value: `total = total + loss`, `kept = np.append(kept, x)`, `self.log
+= line`.

Found in the source of the files that the program has loaded; a variable is bound anew each step, so no object can be
followed.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from outsize.monitor.leaks.user_code import spell, user_frames, user_modules


def find_assignment(name: str) -> str | None:
    """The first line that grows the variable or attribute `name`; None where no source has one."""
    wanted = name.rpartition(".")[2]
    for file in _files():
        source = "".join(linecache.getlines(file))
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        lines = sorted(_growing(tree, wanted))
        if lines:
            return spell(file, lines[0])
    return None


def _files() -> Iterator[str]:
    """Files of the frames that are at work, then of the program's modules."""
    named = [frame.f_code.co_filename for frame in user_frames()]
    files = [vars(module).get("__file__") for module in user_modules()]
    yield from dict.fromkeys([*named, *(file for file in files if isinstance(file, str))])


def _growing(tree: ast.AST, wanted: str) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _is(node.target, wanted):
            yield node.lineno
        if not isinstance(node, ast.Assign) or not any(_binds(target, wanted) for target in node.targets):
            continue
        if any(_is(part, wanted) for part in ast.walk(node.value)):
            yield node.lineno


def _binds(target: ast.AST, wanted: str) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return any(_is(part, wanted) for part in parts)


def _is(node: ast.AST, wanted: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == wanted) or (
        isinstance(node, ast.Attribute) and node.attr == wanted
    )
