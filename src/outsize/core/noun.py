"""What all nouns share: a readable text, an HTML picture for notebooks, and plain data for JSON.

`report` draws a noun, and `core` may not import `report`. So a noun looks its drawing up when it is shown. The top of
the package sets where to look (`set_drawing`).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal


class Known(enum.StrEnum):
    """How a number is known. Every projected number carries one of these."""

    EXACT = "exact"
    """Equal to what happens, to the byte."""
    BOUND = "bound"
    """Never below what happens."""
    ESTIMATE = "estimate"
    """Near what happens, on either side."""


Drawing = Callable[[Any, Literal["text", "html"]], str | None]
"""(noun, skin) -> drawn text, or None where `report` has no drawing for this noun."""

_drawing: Callable[[], Drawing] | None = None


def set_drawing(loader: Callable[[], Drawing]) -> None:
    """Set where nouns find their drawings. The loader runs when a noun is first shown, so importing stays fast."""
    global _drawing
    _drawing = loader


class Noun:
    """Base of the frozen nouns."""

    __slots__ = ()

    derived: ClassVar[tuple[str, ...]] = ()
    """Names of the properties that belong in JSON beside the fields."""

    def __str__(self) -> str:
        drawn = _drawing()(self, "text") if _drawing else None
        return self._spell() if drawn is None else drawn

    def _spell(self) -> str:
        """Class and fields, for a noun that has no drawing."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        return _drawing()(self, "html") if _drawing else None

    def to_dict(self) -> dict[str, Any]:
        """This noun as plain data: the same numbers that the text shows, bytes as integers, unknown as None."""
        plain = to_plain(self)
        assert isinstance(plain, dict)
        return plain


def to_plain(value: Any) -> Any:
    """Nouns, enums, tuples and paths as JSON-ready data; infinity and NaN, which JSON lacks, become words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.repr]
        names += [name for name in getattr(value, "derived", ()) if name not in names]
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    return repr(value)
