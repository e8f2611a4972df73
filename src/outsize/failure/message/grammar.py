"""How a format of message is written down: templates with named holes, compiled to linear regular expressions.

In: a template such as `Tried to allocate {requested}`. Out: a `Pattern` that finds it in cleaned text and gives the fields
of `Failure` as numbers. A space in a template is optional in the text, so that a line wrapped in the middle of a word or of
a number still reads; the text of a template is a regular expression, so `capaci?ty` reads both spellings. Every repetition
is bounded and no two neighbouring ones can eat the same characters: a hostile text costs no more than an honest one.

Holes: `{field}` or `{field:kind}`; a name that is no field of `Failure` goes to its `extra`. Kinds are in `KINDS`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

SIZED = {"requested", "total", "free", "allocated", "reserved", "limit"}
"""Holes that fill the byte field of the same name."""

_COUNT = r"(?<![0-9.])(?:[0-9]{1,3}(?:,[0-9]{3}){1,10}(?![0-9])|[0-9]{1,30})"
_NUMBER = rf"{_COUNT}(?:\.[0-9]{{0,20}})?"
_UNIT = r"(?:[KMGTPE]iB|[KMGTPE]B|bytes?|B|[KMGTPE]i|[KMGTPE])"
_TYPES = (
    r"(?:bfloat16|float8_\w{1,12}|q?u?int(?:4|8|16|32|64)|float(?:16|32|64|96|128)|complex(?:64|128|192|256)|bool_?|half|float|"
    r"double|object|string|str_?|bytes_?|void[0-9]{0,6}|(?:datetime|timedelta)64(?:\[\w{1,4}\])?|[<>=|][a-zA-Z][0-9]{0,12})"
)
_DTYPE = rf"(?:{_TYPES}(?!(?-i:[a-z0-9_]))|\[.{{1,300}}?\](?= ?$| ?[\n'\"])|[a-zA-Z]\w{{0,40}})"
_IS_DTYPE = re.compile(rf"{_TYPES}|\[.*\]", re.IGNORECASE)
_SCALES = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50, "E": 60}
_WORD = r"[^\s,;:'\"()\[\]{}]{1,120}"
_TASK = r"[^\s,;'\"()]{1,120}"


def is_dtype(text: str) -> bool:
    """True for the name of a type of element that some library has."""
    return _IS_DTYPE.fullmatch(text) is not None


def read_size(text: str) -> int | None:
    """`7.15 GiB`, `13.76G`, `1,600,000,000 bytes`, `18.3 Mb` -> bytes; every prefix is a power of 1024, as these
    programs print it."""
    digits = re.match(r"[0-9][0-9,]*(?:\.[0-9]*)?", text)
    if digits is None:
        return None
    number = digits.group().replace(",", "")
    unit = text[digits.end() :].strip()[:1].upper()
    return round(Fraction(number.rstrip(".")) * (1 << _SCALES.get(unit, 0)))


@dataclass(frozen=True, slots=True)
class Kind:
    """What may stand in a hole and how it is read."""

    pattern: str
    read: Callable[[str], Any]


KINDS: Mapping[str, Kind] = {
    "size": Kind(f"{_NUMBER} ?{_UNIT}", read_size),
    "count": Kind(_COUNT, lambda text: int(text.replace(",", ""))),
    "kb": Kind(r"[0-9]{1,24}", lambda text: int(text) * 1024),
    "gib": Kind(r"[0-9]{1,12}(?:\.[0-9]{1,12})?", lambda text: round(Fraction(text) * 2**30)),
    "int": Kind(r"[0-9]{1,20}", int),
    "float": Kind(r"[0-9]{1,12}(?:\.[0-9]{1,12})?", float),
    "shape": Kind(r"[\[(] ?(?:[0-9]{1,20} ?(?:, ?[0-9]{1,20} ?){0,32},? ?)?[\])]",
                  lambda text: tuple(int(axis) for axis in re.findall(r"[0-9]+", text))),
    "dtype": Kind(_DTYPE, str),
    "word": Kind(_WORD, str),
    "task": Kind(_TASK, str),
    "command": Kind(r"[\w./-]{1,32}", str),
    "name": Kind(r"\(?[^()\n]{1,64}?\)?", str),
}  # fmt: skip
"""Hole kind -> pattern and reader. `size` has a unit, `count` is a plain number of bytes, `kb` a kernel's kB, `gib` a number
whose GiB stands further on."""

_DEFAULT_KINDS = dict.fromkeys(SIZED, "size") | {
    "index": "int", "pid": "int", "shape": "shape", "dtype": "dtype", "process": "word",
}  # fmt: skip
_HOLE = re.compile(r"\{([a-z]\w*)(?::(\w+))?\}")
_LITERAL_SPACE = re.compile(r"(\[(?:\\.|[^\]])*\]|\\.)| (?![?*+]|\{[0-9])")


def _loosen(template: str) -> str:
    """Every plain space made optional; those inside a class or with their own count stay."""
    return _LITERAL_SPACE.sub(lambda match: match.group(1) or " ?", template)


_ESCAPED = re.compile(r"(?:\\.|\[(?:\\.|[^\]\\])*\]|\{[^}]*\})[?*+]?")
_NESTED = re.compile(r"\([^()]*\)[?*+]?")
_SINGLE = re.compile(r".[?*+]|[.^$]")


def _literals(template: str) -> tuple[str, ...]:
    """Text of which every match holds one piece, in lower case without spaces; an empty piece where nothing is sure."""
    rest, before = _ESCAPED.sub("\x00", template), ""
    while before != rest:
        before, rest = rest, _NESTED.sub("\x00", rest)
    return tuple(
        max(("".join(piece.lower().split()) for piece in _SINGLE.sub("\x00", way).split("\x00")), key=len)
        for way in rest.split("|")
    )


class Pattern:
    """A template, compiled when it is first looked for: of hundreds a message needs a few."""

    def __init__(self, template: str, **constants: Any) -> None:
        self.constants = constants
        """Fields that this pattern settles by being there at all, such as `device="cpu"`."""
        self._template = template

    @functools.cached_property
    def _literals(self) -> tuple[str, ...]:
        return _literals(self._template)

    @functools.cached_property
    def holes(self) -> dict[str, Kind]:
        """Hole -> what stands in it."""
        found = _HOLE.finditer(self._template)
        return {hole.group(1): KINDS[hole.group(2) or _DEFAULT_KINDS.get(hole.group(1), "size")] for hole in found}

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        """The template as an expression."""
        pieces, end = [], 0
        for hole in _HOLE.finditer(self._template):
            name = hole.group(1)
            pieces += [_loosen(self._template[end : hole.start()]), f"(?P<{name}>{self.holes[name].pattern})"]
            end = hole.end()
        pieces.append(_loosen(self._template[end:]))
        return re.compile("".join(pieces), re.IGNORECASE | re.MULTILINE)

    def may_be_in(self, key: str) -> bool:
        """False where no match is possible: asking for a plain piece of text costs next to nothing."""
        return any(literal in key for literal in self._literals)

    def find(self, text: str, start: int = 0, end: int | None = None) -> re.Match[str] | None:
        """The first place in `text[start:end]`."""
        return self.regex.search(text, start, len(text) if end is None else end)

    def find_all(self, text: str) -> Iterator[dict[str, Any]]:
        """The fields of every place, at most a hundred."""
        for count, match in enumerate(self.regex.finditer(text)):
            if count == 100:
                return
            yield self.read(match)

    def read(self, match: re.Match[str]) -> dict[str, Any]:
        """The fields that a match fills."""
        fields = dict(self.constants)
        for name, kind in self.holes.items():
            text = match.group(name)
            value = None if text is None else kind.read(text)
            if value is not None:
                fields[name] = value
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One wording of one program: a row of `formats.toml`."""

    name: str
    """Label of the format."""
    framework: str
    """Who says it."""
    anchor: Pattern
    """What makes a text a message of this format. Its holes are read first."""
    clauses: tuple[Pattern, ...] = ()
    """Further parts, each of which may be missing; the first that fills a field wins."""
    each: Mapping[str, Pattern] = field(default_factory=dict)
    """Name in `extra` -> a part that may come many times."""
    device: str | None = None
    """Device where the message does not say more, None for the framework's own; an `index` is added to it."""
    whole: bool = False
    """Clauses may also stand before the anchor."""
    fills: tuple[str, ...] = ()
    """Frameworks whose other formats may fill what this one leaves open."""
    unless: Pattern | None = None
    """What makes it a lookalike."""
    lines: bool = False
    """Read in text with its line breaks, for formats in which they mean something."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Readings that follow from the format itself."""
