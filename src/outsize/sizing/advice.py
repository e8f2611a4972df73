"""What to do if a tensor does not fit, as sentences a user can act on."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.memory import Reading
from outsize.core.sizing import Sizing
from outsize.core.spec import may_be_low_rank
from outsize.core.units import format_bytes

SMALL = 0.01
"""Part of the available memory below which a tensor is not the reason that memory ran out."""

_LOSSY = ("int", "bool", "float8")


def choose_advice(sizing: Sizing, reading: Reading) -> tuple[str, ...]:
    """Empty if it fits easily; else what would make it fit, cheapest first."""
    if sizing.fits is False:
        return tuple(_ways_out(sizing, reading))
    available = reading.host.available or 0
    if 0 < sizing.bytes < SMALL * available:
        return ("this is too small to exhaust memory by itself; if an error named it, run: outsize explain error.txt",)
    return ()


def _ways_out(sizing: Sizing, reading: Reading) -> Iterator[str]:
    room = _room(sizing)
    smaller = [row for row in sizing.dtypes if row.bytes <= room and row.saves > 0 and not row.name.startswith(_LOSSY)]
    if smaller and len(sizing.parts) == 1:
        best = max(smaller, key=lambda row: row.bytes)
        yield (
            f"as {best.name} it is {format_bytes(best.bytes)} and fits; see what that costs in accuracy: "
            f"outsize convert x.npy --dtype {best.name} --check"
        )
    halves = [row for row in sizing.halved if row.bytes <= room]
    if halves and len(sizing.parts) == 1:
        names = ", ".join(row.name for row in halves)
        yield f"half of it fits ({format_bytes(halves[0].bytes)}): process it in two parts along one of {names}"
    disk = reading.disk.available
    asked = [place.capacity for place in sizing.places if place.name == "budget" and place.capacity is not None]
    if disk is not None and sizing.bytes <= disk:
        yield (
            f"keep it on disk ({format_bytes(disk)} free here) and stream it through "
            f"{format_bytes(min([reading.budget.host or 0, *asked]))}: outsize compute, or outsize.open(...) in Python"
        )
        if len(sizing.specs) == len(sizing.parts) == 1 and may_be_low_rank(sizing.specs[0]):
            yield (
                "where its values are low-rank (fields, video, simulations), a few factors may do, with a promised error: "
                "outsize decompose x.npy x.tucker --error 0.01"
            )
    cards = [place.name for place in sizing.places if place.where == "card" and place.fits]
    if cards:
        yield f"it fits whole on: {', '.join(cards)}"


def _room(sizing: Sizing) -> int:
    """The most bytes that would fit in the place that the verdict is about."""
    wanted = "asked" if any(place.where == "asked" for place in sizing.places) else "here"
    places = [place for place in sizing.places if place.where == wanted and place.name != "disk here"]
    return max((place.capacity or 0 for place in places), default=0)
