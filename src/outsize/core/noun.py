"""What all nouns share: a readable text, an HTML picture for notebooks, and plain data for JSON.

`report` draws a noun, and `core` may not import `report`. So a noun looks its drawing up when it is shown. The top of
the package sets where to look (`set_drawing`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from outsize.core.errors import InputError, StoreError


class Known(enum.StrEnum):
    """How a number is known. Every projected number carries one of these."""

    EXACT = "exact"
    """Equal to what happens, to the byte."""
    BOUND = "bound"
    """Never below what happens."""
    ESTIMATE = "estimate"
    """Near what happens, on either side."""


Skin = Literal["text", "html", "page"]
"""Text for a terminal, HTML for a cell of a notebook, or a whole HTML page that needs no other file."""

Drawing = Callable[[Any, Skin], str | None]
"""(noun, skin) -> drawn text, or None where `report` has no drawing for this noun."""

_drawing: Callable[[], Drawing] | None = None


def set_drawing(loader: Callable[[], Drawing]) -> None:
    """Set where nouns find their drawings. The loader runs when a noun is first shown, so importing stays fast."""
    global _drawing
    _drawing = loader


class Noun:
    """Base of the frozen nouns."""

    __slots__ = ()

    said_twice: ClassVar[tuple[str, ...]] = ()
    """Names of the properties that are left out of JSON, because fields or other properties say the same."""

    def __str__(self) -> str:
        drawn = _drawing()(self, "text") if _drawing else None
        return self._spell() if drawn is None else drawn

    def __repr__(self) -> str:  # of nouns whose dataclass makes none: those that have a drawing
        return self.__str__()

    def _spell(self) -> str:
        """Class and fields, for a noun that has no drawing."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        return _drawing()(self, "html") if _drawing else None

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write this noun as one HTML page that needs no network: pictures, tables and their script in one file."""
        page = _drawing()(self, "page") if _drawing else None
        if page is None:
            raise InputError(f"there is no page for a {type(self).__name__}")
        write_text(path, page)

    def to_dict(self) -> dict[str, Any]:
        """This noun as plain data: the same numbers that the text shows, bytes as integers, unknown as None. `kind` is the
        noun's name, by which `outsize report` knows it again."""
        plain = to_plain(self)
        assert isinstance(plain, dict)
        return {"kind": type(self).__name__} | plain


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that is whole or not there: beside its place first, then renamed. A pipe or device is written to."""
    target = os.path.realpath(os.fspath(path))
    device = os.path.exists(target) and not os.path.isfile(target)
    beside = target if device else f"{target}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        if not device:
            os.replace(beside, target)
    except OSError as error:
        if not device:
            with contextlib.suppress(OSError):
                os.unlink(beside)
        raise StoreError(f"cannot write {os.fspath(path)}: {error.strerror or error}", path=os.fspath(path)) from error


def to_plain(value: Any) -> Any:
    """Nouns, enums, tuples and paths as JSON-ready data; infinity and NaN, which JSON lacks, become words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _names(type(value))}
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


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    """What plain data have of a dataclass: its fields, and of a noun its properties too."""
    names = [field.name for field in dataclasses.fields(kind) if field.repr]
    if issubclass(kind, Noun):
        found = [
            name for base in reversed(kind.__mro__) for name, one in vars(base).items() if isinstance(one, property)
        ]
        names += [name for name in dict.fromkeys(found) if name not in (*names, *kind.said_twice)]
    return tuple(names)


N = TypeVar("N", bound=Noun)


def from_plain(kind: type[N], data: Any) -> N:
    """A noun from what `to_plain` gave, as JSON keeps it: `from_plain(Footprint, json.loads(text))`. Fields that are missing
    take their defaults, or None; names that the noun does not have are ignored. Data of another type is a `TypeError`."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{kind.__name__} is a table, not {type(data).__name__}")
    values = {}
    for name, wanted, required in _fields(kind):  # type: ignore[arg-type]
        if name in data:
            values[name] = _read_value(wanted, data[name], name)
        elif required:
            values[name] = _read_value(wanted, _MISSING.get(typing.get_origin(wanted) or wanted), name)
    return kind(**values)


_MISSING: dict[Any, Any] = {tuple: [], str: "", dict: {}, Mapping: {}}
"""What a required field is where the data lack it, by its type: JSON lines leave empty values out."""


@functools.cache
def _fields(kind: type[Noun]) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, required) of every field."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        (field.name, hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.init
    )


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _read_value(wanted: Any, value: Any, name: str) -> Any:
    """One value as the type of its field."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or wanted is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _read_union(parts, value, name)
    if origin is Literal and value in parts:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        inner = parts[:1] * len(value) if parts[-1:] == (Ellipsis,) else parts
        if len(inner) == len(value):
            return tuple(_read_value(part, item, name) for part, item in zip(inner, value, strict=True))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: _read_value(parts[1], item, name) for key, item in value.items()}
    if isinstance(wanted, type):
        return _read_simple(wanted, value, name)
    raise TypeError(f"{name} is {wanted}, not {value!r:.60}")


def _read_union(parts: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and types.NoneType in parts:
        return None
    for part in parts:
        if part is not types.NoneType:
            try:
                return _read_value(part, value, name)
            except TypeError:
                continue
    raise TypeError(f"{name} is none of {parts}: {value!r:.60}")


def _read_simple(wanted: type, value: Any, name: str) -> Any:
    if issubclass(wanted, Noun):
        return from_plain(wanted, value)
    if issubclass(wanted, tuple) and hasattr(wanted, "_fields") and isinstance(value, Mapping):
        hints = typing.get_type_hints(wanted)
        return wanted(**{part: _read_value(hints[part], value.get(part), part) for part in wanted._fields})
    if issubclass(wanted, enum.Enum):
        return next((member for member in wanted if member.value == value), None) or _refuse(wanted, value, name)
    if wanted is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value) if not isinstance(value, str) else _WORDS.get(value) or _refuse(wanted, value, name)
    if isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool):
        return value
    return _refuse(wanted, value, name)


def _refuse(wanted: type, value: Any, name: str) -> Any:
    raise TypeError(f"{name} is {wanted.__name__}, not {value!r:.60}")
