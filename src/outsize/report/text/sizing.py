"""Draws a `Sizing`: the exact bytes first, then what allocators take, where it fits, and what would be smaller."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.core.sizing import Alternative, Place, Sizing
from outsize.core.units import format_bytes
from outsize.report.text.layout import Rows, draw_fits, make_table

SMALL = 2**20
"""Bytes below which no smaller form is shown: nothing is won by it."""
_UNKNOWN = ("unknown", "dim")


def draw(sizing: Sizing) -> RenderableType:
    blocks: list[RenderableType] = [_headline(sizing)]
    if len(sizing.parts) > 1:
        blocks += [Text(), _parts(sizing)]
    blocks += [Text(), make_table(*takes_of(sizing)), Text(), _places(sizing)]
    if sizing.dtypes and sizing.bytes >= SMALL:
        blocks += [Text(), _alternatives("in another dtype", sizing.dtypes)]
    if sizing.halved and sizing.bytes >= SMALL:
        blocks += [Text(), _alternatives("halving one axis", sizing.halved)]
    if sizing.advice:
        blocks += [Text(), Text("next", style="bold"), *(Padding(sentence, (0, 0, 0, 2)) for sentence in sizing.advice)]
    return Group(*blocks)


def _headline(sizing: Sizing) -> Text:
    names = " + ".join(map(str, sizing.specs[:3])) + (
        f" + {len(sizing.specs) - 3} more" if len(sizing.specs) > 3 else ""
    )
    times = f"{sizing.count} x " if sizing.count != 1 else ""
    where = ", ".join(place.name for place in sizing.places if place.where == "asked") or "here"
    decimal = f" = {sizing.bytes / 1e9:,.3f} GB" if sizing.bytes >= 10**7 else ""
    return Text.assemble(
        f"{times}{names}: ", (f"{sizing.bytes:,} bytes", "bold"), f" = {format_bytes(sizing.bytes)}{decimal} (exact)  ",
        draw_fits(sizing.fits, _UNKNOWN, "bold").append(f": {where}"),
    )  # fmt: skip


def _parts(sizing: Sizing) -> Table:
    rows = [(part.name, f"{part.bytes:,}", format_bytes(part.bytes)) for part in sizing.parts]
    return make_table(("part", "bytes>", ">"), rows)


def takes_of(sizing: Sizing) -> Rows:
    """What each allocator takes."""
    rows = [
        (take.allocator, format_bytes(take.reserved), _saved(take.reserved - take.requested), take.known, take.note)
        for take in sizing.takes
    ]
    return ("allocator", "takes>", "more than asked>", "known", "why"), rows


def places_of(sizing: Sizing) -> list[tuple[str, str, str, bool | None, str]]:
    """(place, what it has, what is needed, whether it fits, why); cards that all fit are one row, since they say one thing."""
    cards = [place for place in sizing.places if place.where == "card"]
    together = len(cards) > 2 and all(place.fits for place in cards)
    rows = [
        (place.name, format_bytes(place.capacity), format_bytes(place.needed), place.fits, _why(place))
        for place in sizing.places
        if not (together and place.where == "card")
    ]
    if together:
        least = min(cards, key=lambda card: card.capacity or 0)
        needed = max(card.needed for card in cards)
        named = f"from {least.name} on"
        rows.append(
            (f"{len(cards)} cards", f"{format_bytes(least.capacity)} or more", format_bytes(needed), True, named)
        )
    return rows


def _places(sizing: Sizing) -> Table:
    rows = [(name, has, needs, draw_fits(fits, _UNKNOWN), why) for name, has, needs, fits, why in places_of(sizing)]
    return make_table(("place", "has>", "needs>", "fits", "why"), rows)


def _why(place: Place) -> str:
    return place.reason if place.known == "exact" or not place.reason else f"{place.reason} ({place.known})"


def _alternatives(title: str, alternatives: tuple[Alternative, ...]) -> Table:
    rows = [(one.name, f"{one.bytes:,}", format_bytes(one.bytes), _saved(one.saves)) for one in alternatives]
    return make_table((title, "bytes>", ">", "saves>"), rows)


def _saved(size: int) -> str:
    return format_bytes(size) if size else "-"
