"""The wordings of out-of-memory messages: rows of `formats.toml` in, `Format`s out, in the order in which they are asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from outsize.failure.advice import read_table
from outsize.failure.message.grammar import Format, Pattern

_PIECE = re.compile(r"\{=(\w+)\}")


def read_formats() -> tuple[Format, ...]:
    """Every format, most telling first."""
    table = read_table("message/formats.toml")
    reader = _Reader(table["pieces"], table["clauses"])
    return tuple(map(reader.read, table["formats"]))


class _Reader:
    """Puts pieces and clauses that rows share where they are named."""

    def __init__(self, pieces: Mapping[str, Any], clauses: Mapping[str, list[Any]]) -> None:
        self.pieces, self.clauses = pieces, clauses

    def read(self, row: Mapping[str, Any]) -> Format:
        """A row as a format; a key that is no field is an error."""
        fields = dict(row)
        fields["anchor"] = Pattern(self._text(row["anchor"]))
        fields["clauses"] = tuple(self._patterns(row.get("clauses", ())))
        fields["each"] = {name: Pattern(self._text(part)) for name, part in row.get("each", {}).items()}
        fields["unless"] = Pattern(self._text(row["unless"])) if "unless" in row else None
        fields["fills"] = tuple(row.get("fills", ()))
        return Format(**fields)

    def _text(self, given: str | list[str]) -> str:
        return _PIECE.sub(lambda match: self._text(self.pieces[match.group(1)]), "".join(given))

    def _patterns(self, clauses: list[Any]) -> Iterator[Pattern]:
        for clause in clauses:
            if isinstance(clause, dict):
                yield Pattern(self._text(clause["find"]), **{key: clause[key] for key in clause if key != "find"})
            elif isinstance(clause, str) and clause.startswith("@"):
                yield from self._patterns(self.clauses[clause[1:]])
            else:
                yield Pattern(self._text(clause))
