"""Draws a `Sizing`: the exact bytes first, then what allocators take, where it fits, and what would be smaller."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.core.sizing import Alternative, Place, Sizing
from outsize.core.units import format_bytes

_FITS = {True: ("fits", "green"), False: ("does not fit", "red"), None: ("unknown", "dim")}


def draw(sizing: Sizing) -> RenderableType:
    """One screen."""
    blocks: list[RenderableType] = [_headline(sizing)]
    if len(sizing.parts) > 1:
        blocks += [Text(), _parts(sizing)]
    blocks += [Text(), _takes(sizing), Text(), _places(sizing)]
    if sizing.dtypes:
        blocks += [Text(), _alternatives("in another dtype", sizing.dtypes)]
    if sizing.halved:
        blocks += [Text(), _alternatives("halving one axis", sizing.halved)]
    if sizing.advice:
        blocks += [Text(), Text("next", style="bold"), *(Padding(sentence, (0, 0, 0, 2)) for sentence in sizing.advice)]
    return Group(*blocks)


def _headline(sizing: Sizing) -> Text:
    names = " + ".join(map(str, sizing.specs[:3])) + (
        f" + {len(sizing.specs) - 3} more" if len(sizing.specs) > 3 else ""
    )
    times = f"{sizing.count} x " if sizing.count != 1 else ""
    verdict, style = _FITS[sizing.fits]
    where = ", ".join(place.name for place in sizing.places if place.where == "asked") or "here"
    decimal = f" = {sizing.bytes / 1e9:,.3f} GB" if sizing.bytes >= 10**7 else ""
    return Text.assemble(
        f"{times}{names}: ", (f"{sizing.bytes:,} bytes", "bold"), f" = {format_bytes(sizing.bytes)}{decimal} (exact)  ",
        (f"{verdict}: {where}", f"bold {style}"),
    )  # fmt: skip


def _table(*titles: str, left: int = 1) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 2), header_style="bold")
    for position, title in enumerate(titles):
        table.add_column(title, justify="left" if position < left or title in ("why", "fits") else "right")
    return table


def _parts(sizing: Sizing) -> Table:
    table = _table("part", "bytes", "")
    for part in sizing.parts:
        table.add_row(part.name, f"{part.bytes:,}", format_bytes(part.bytes))
    return table


def _takes(sizing: Sizing) -> Table:
    table = _table("allocator", "takes", "more than asked", "known", "why")
    for take in sizing.takes:
        more = take.reserved - take.requested
        table.add_row(
            take.allocator, format_bytes(take.reserved), format_bytes(more) if more else "-", take.known, take.note
        )
    return table


def _places(sizing: Sizing) -> Table:
    table = _table("place", "has", "needs", "fits", "why")
    for place in sizing.places:
        verdict, style = _FITS[place.fits]
        table.add_row(
            place.name,
            format_bytes(place.capacity),
            format_bytes(place.needed),
            Text(verdict, style=style),
            _why(place),
        )
    return table


def _why(place: Place) -> str:
    return place.reason if place.known == "exact" or not place.reason else f"{place.reason} ({place.known})"


def _alternatives(title: str, alternatives: tuple[Alternative, ...]) -> Table:
    table = _table(title, "bytes", "", "saves")
    for other in alternatives:
        table.add_row(
            other.name, f"{other.bytes:,}", format_bytes(other.bytes), format_bytes(other.saves) if other.saves else "-"
        )
    return table
