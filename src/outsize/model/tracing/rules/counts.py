"""Counts that a script reads and only shows: right answers, tokens, samples.

In: `.item()` of a sum of whole numbers that is not known. Out: a number that is watched. Sizes do not depend on it while it
is only added up, divided or printed. Once it is compared or given to torch it becomes a guess.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from typing import Any

from outsize.model.tracing.rules.known_values import shadow
from outsize.model.tracing.trace import Trace


class Count(int):
    """A whole number that is not known and that sizes do not depend on, until it is compared or given to torch."""

    place = ""
    use: Callable[[str], None]

    def _of(self, value: Any) -> Any:
        if type(value) is not int:
            return value
        made = Count(value)
        made.place, made.use = self.place, self.use
        return made

    def used(self) -> None:
        """From now on a size may depend on it."""
        self.use(f"a count read on the host was chosen, not computed ({self.place}), and is used afterwards")

    __hash__ = int.__hash__


def _counted(name: str, decides: bool) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: Count, *args: Any) -> Any:
        if decides:
            self.used()
        return self._of(plain(self, *args))

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "neg"):
    setattr(Count, f"__{_name}__", _counted(f"__{_name}__", decides=False))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(Count, f"__{_name}__", _counted(f"__{_name}__", decides=True))


def is_count(tracer: Trace, tensor: Any) -> bool:
    """True for a sum of whole numbers that is not known, read by a line that adds it up, returns it or shows it."""
    held = tracer.ledger.of(tensor)
    if tensor.is_floating_point() or held is None or not any(word in held.op for word in ("sum", "count_nonzero")):
        return False
    if shadow(tracer, tensor) is not None:
        return False
    try:
        (statement,) = ast.parse(linecache.getline(*tracer.owners.where()).strip()).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(statement, ast.AugAssign | ast.Return | ast.Expr)


def count(tracer: Trace, tensor: Any) -> Count:
    """The number, watched."""
    made = Count(1)
    made.place, made.use = tracer.owners.place(), tracer.guess
    tracer.counted = True
    tracer.note_value("a count read on the host", tracer.ledger.of(tensor))
    return made


def use_counts(tracer: Trace, value: Any) -> None:
    """Counts that are given to torch may be sizes."""
    if isinstance(value, Count):
        value.used()
    elif isinstance(value, list | tuple):
        for item in value:
            use_counts(tracer, item)
    elif isinstance(value, dict):
        use_counts(tracer, list(value.values()))
    elif isinstance(value, slice):
        use_counts(tracer, [value.start, value.stop, value.step])
