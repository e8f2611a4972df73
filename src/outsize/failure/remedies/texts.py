"""The words of remedies, read from `texts.toml`: a name, bytes and what to fill in -> a `Remedy`."""

from __future__ import annotations

import functools
from typing import Any

from outsize.core.failure import Exactness, Remedy
from outsize.core.noun import Known
from outsize.failure.advice import read_table


@functools.cache
def read_texts() -> dict[str, dict[str, str]]:
    """Every row, by its name."""
    return read_table("remedies/texts.toml")


def remedy(name: str, saves: int | None = None, /, **words: Any) -> Remedy:
    """The remedy of a row, with the bytes that it gives back where they are known."""
    row = read_texts()[name]
    do, how, costs = (
        text.format(**words) if words else text for text in (row["do"], row["how"], row.get("costs", "nothing"))
    )
    known = Known[row.get("known", "estimate").upper()]
    exact = Exactness[row.get("exactness", "bitwise").upper()]
    return Remedy(name=do, saves=saves, known=known, costs=costs, exactness=exact, how=how)
