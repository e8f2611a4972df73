"""What drawings share: tables of plain rows, folded lines, and drawings that depend on how wide the screen is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text

Rows = tuple[tuple[str, ...], Sequence[Sequence[str]]]
"""Titles and rows of a table of plain text, which a page shows as well."""


def make_table(
    titles: Sequence[str], rows: Iterable[Sequence[RenderableType]], padding: tuple[int, int, int, int] = (0, 1, 0, 2)
) -> Table:
    """Rows under bold titles; a column whose title ends in `>` holds numbers and ends at the right."""
    columns = (Column(title.rstrip(">"), justify="right" if title.endswith(">") else "left") for title in titles)
    return _fill(Table(*columns, box=None, padding=padding, header_style="bold"), rows)


def make_list(
    rows: Iterable[Sequence[RenderableType]], *columns: Column, padding: tuple[int, int, int, int] = (0, 2, 0, 0)
) -> Table:
    """Rows without titles. Columns that are not given are plain."""
    return _fill(Table(*columns, box=None, show_header=False, padding=padding), rows)


def _fill(table: Table, rows: Iterable[Sequence[RenderableType]]) -> Table:
    for row in rows:
        table.add_row(*row)
    return table


def draw_fits(fits: bool | None, unsure: tuple[str, str] = ("may fit", "yellow"), weight: str = "") -> Text:
    """Whether something fits; `unsure` is said, in its colour, where that is not known."""
    word, colour = unsure if fits is None else ("fits", "green") if fits else ("does not fit", "red")
    return Text(word, style=f"{weight} {colour}".strip())


def draw_share(share: float, width: int = 12) -> Text:
    """A bar that is full to this share, in the colour of how near that is to the end."""
    taken = min(1.0, max(0.0, share))
    full = round(taken * width)
    style = "red" if taken > 0.9 else "yellow" if taken > 0.7 else "green"
    return Text.assemble(("█" * full, style), ("░" * (width - full), "dim"))


def fold(words: Iterable[str | Text], columns: int, gap: str = " ") -> Text:
    """Words in lines that fit so many columns, all but the first indented. A word that is longer is not cut."""
    folded, used = Text(), 0
    for word in words:
        if used and used + len(gap) + len(word) > columns:
            folded.append("\n    ")
            used = 4
        elif used:
            folded.append(gap)
            used += len(gap)
        folded.append(word)
        used += len(word)
    return folded


class ByWidth:
    """What `draw(columns)` gives for the console it is printed on: a picture uses the whole width, and a narrow table leaves
    out columns instead of breaking numbers."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._draw(options.max_width)
