"""Draws a `Footprint`: the verdict, the peaks with their bounds, what is alive at the peak, and a chart of memory over time;
and a `Receipt`: projected beside measured."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from outsize.core.footprint import Footprint, Growth, Layers, Loading, Receipt
from outsize.core.memory import Part
from outsize.core.units import format_bytes
from outsize.report.text.layout import ByWidth, Rows, draw_fits, make_list, make_table

MARKS = {
    "weights": ("W", "blue"), "buffers": ("B", "bright_blue"), "gradients": ("G", "magenta"), "optimizer state": ("O", "cyan"),
    "inputs": ("I", "white"), "activations": ("A", "green"), "temporaries": ("T", "yellow"), "workspace": ("w", "red"),
    "outputs": ("R", "green"), "KV cache": ("K", "bright_green"), "constants": ("C", "bright_blue"), "code": ("c", "magenta"),
}  # fmt: skip
"""Kind -> a letter, so that the chart can be read without colour, and a colour."""
HEIGHT = 12
"""Rows of the picture."""
NARROW = 96
"""Columns of a screen below which tables leave columns out."""
MARGIN = 14
"""Columns left of it: the bytes and the axis."""


def draw(footprint: Footprint | Receipt) -> RenderableType:
    if isinstance(footprint, Receipt):
        return _receipt(footprint)
    lines: list[RenderableType] = [_verdict(footprint), _peaks(footprint)]
    if footprint.phases:
        lines += [make_table(*phases_of(footprint))]
    if footprint.parts:
        lines += [Text(f"alive at the peak ({footprint.peak_label}):", style="bold"), _parts(footprint.parts)]
    if footprint.modules:
        lines += [Text("largest modules and lines then:", style="bold"), _pairs(footprint)]
    if footprint.timeline:
        lines += [ByWidth(lambda columns: _picture(footprint, columns))]
    if footprint.loading is not None:
        lines += [_loading(footprint.loading)]
    if footprint.growth:
        lines += [_growth(footprint)]
    if footprint.ways:
        lines += [_ways(footprint)]
    if footprint.fewest:
        lines += [Text("fewest cards that train it:", style="bold"), make_table(*fewest_of(footprint))]
    lines += [Padding(f"note: {note}", (0, 0, 0, 2)) for note in footprint.notes]
    return Group(*lines)


def _ways(footprint: Footprint) -> RenderableType:
    """What each change would make of the peak, all of them traced."""
    table = ByWidth(lambda columns: _table_of_ways(footprint, columns))
    if footprint.fits is not False:
        return table
    first = next((way for way in footprint.ways if way.fits), None)
    left = 'none of these fits: outsize.fit(..., device="cuda", host=...) keeps weights and state in RAM'
    return Group(table, Padding(left if first is None else f"gentlest that fits: {first.how}", (0, 0, 0, 2)))


def _table_of_ways(footprint: Footprint, columns: int) -> Table:
    left_out = {"at most>"} if columns < NARROW else set()
    left_out |= {"fits"} if footprint.capacity is None else set()
    rows: list[dict[str, RenderableType]] = [
        {
            "the same step with": way.name, "reserved>": format_bytes(way.peak.bytes), "at most>": format_bytes(way.peak.bound),
            "fits": draw_fits(way.fits), "results": way.exactness,
        }
        for way in footprint.ways
    ]  # fmt: skip
    titles = [title for title in rows[0] if title not in left_out]
    return make_table(titles, [[row[title] for title in titles] for row in rows])


def _receipt(receipt: Receipt) -> RenderableType:
    found = (
        ("allocated", receipt.projected_allocated, receipt.measured_allocated, receipt.allocated_error),
        ("reserved", receipt.projected_reserved, receipt.measured_reserved, receipt.reserved_error),
        ("in use", receipt.projected_use, receipt.measured_use, receipt.use_error),
    )
    rows = [
        (name, *map(format_bytes, (amount.bytes, amount.bound, measured)), "-" if error is None else f"{error:+.1%}")
        for name, amount, measured, error in found
        if amount is not None and measured is not None
    ]
    return make_table(("", "projected>", "bound>", "measured>", "error>"), rows)


def _verdict(footprint: Footprint) -> Text:
    peak = footprint.peak_reserved
    where = f" on each of {footprint.ranks} ranks ({footprint.sharding})" if footprint.ranks > 1 else ""
    need = f"{format_bytes(peak.bytes)} reserved at the peak{where}, at most {format_bytes(peak.bound)}"
    if footprint.capacity is None:
        return Text.assemble((f"{footprint.name}: ", "bold"), need)
    verdict = draw_fits(footprint.fits, ("may fit" if footprint.guesses else "may not fit", "yellow"), "bold")
    place = "in the budget" if footprint.card is None else f"on the {footprint.card.name}"
    room = f", of {format_bytes(footprint.capacity)} {place}"
    if footprint.fits and peak.bytes > footprint.capacity:
        room += ", by giving back cached blocks in between"
    return Text.assemble((f"{footprint.name}: ", "bold"), verdict, f": {need}{room}")


def _peaks(footprint: Footprint) -> Table:
    rows = [
        (name, format_bytes(one.bytes), format_bytes(one.bound), one.known) for name, one in footprint.amounts.items()
    ]
    return make_table(("peak", "likely>", "at most>", "known"), rows)


def phases_of(footprint: Footprint) -> Rows:
    """The peaks of each phase."""
    rows = [(phase.name, format_bytes(phase.allocated), format_bytes(phase.reserved)) for phase in footprint.phases]
    return ("phase", "allocated>", "reserved>"), rows


def _parts(parts: tuple[Part, ...]) -> Table:
    total, rows = max(1, sum(part.bytes for part in parts)), []
    for part in sorted(parts, key=lambda part: -part.bytes):
        bar = Text("█" * round(40 * part.bytes / total), style="cyan")
        rows.append((format_bytes(part.bytes), part.name, bar, f"{part.bytes / total:.1%}"))
    return make_list(rows, Column(justify="right"), padding=(0, 1, 0, 2))


def _pairs(footprint: Footprint) -> Table:
    pairs = zip(footprint.modules[:5], footprint.lines[:5], strict=False)
    rows = [(format_bytes(one.bytes), one.name, format_bytes(line.bytes), line.name) for one, line in pairs]
    columns = [Column(justify="right"), Column(overflow="fold"), Column(justify="right"), Column(overflow="fold")]
    return make_list(rows, *columns, padding=(0, 1, 0, 2))


def _picture(footprint: Footprint, columns: int) -> Group:
    """Time from left to right, bytes upwards, one colour and letter per kind; `·` is reserved and not used."""
    timeline = _squeezed(footprint.timeline, max(1, columns - MARGIN))
    top = max(max(layers.total, layers.reserved) for layers in timeline) or 1
    rows = []
    for level in range(HEIGHT, 0, -1):
        floor = top * (level - 0.5) / HEIGHT
        text = Text(f"{format_bytes(round(top * level / HEIGHT)):>12} │")
        for layers in timeline:
            mark, colour = _cell(footprint.kinds, layers, floor)
            text.append(mark, style=colour)
        rows.append(text)
    axis = Text(" " * (MARGIN - 1) + "└" + "─" * len(timeline))
    legend = Padding(_legend(footprint), (0, 0, 0, MARGIN))
    return Group(Text("memory over the steps:", style="bold"), *rows, axis, _phases(timeline), legend)


def _squeezed(timeline: tuple[Layers, ...], most: int) -> list[Layers]:
    """At most `most` columns. If several moments share one, the highest is shown."""
    count = len(timeline)
    if count <= most:
        return list(timeline)
    runs = (timeline[count * i // most : count * (i + 1) // most] for i in range(most))
    return [max(run, key=lambda layers: (layers.total, layers.reserved)) for run in runs]


def _cell(kinds: tuple[str, ...], layers: Layers, floor: float) -> tuple[str, str]:
    reached = 0
    for kind, size in zip(kinds, layers.bytes, strict=True):
        reached += size
        if reached >= floor:
            return MARKS[kind]
    return ("·", "dim") if layers.reserved >= floor else (" ", "")


def _phases(timeline: list[Layers]) -> Text:
    """Where each step begins, under the picture; a name without room before the next one is left out."""
    names = [layers.label.rpartition(" ")[0] or layers.label for layers in timeline]
    begins = [place for place, name in enumerate(names) if place == 0 or name != names[place - 1]]
    text = ""
    for place, end in zip(begins, [*begins[1:], len(names)], strict=True):
        if len(names[place]) <= end - place - (end < len(names)):
            text = text.ljust(place) + names[place]
    return Text(" " * MARGIN + text)


def _legend(footprint: Footprint) -> Text:
    seen = [any(layers.bytes[i] for layers in footprint.timeline) for i in range(len(footprint.kinds))]
    kinds = [kind for kind, there in zip(footprint.kinds, seen, strict=True) if there]
    entries = [Text(f"{MARKS[kind][0]} {kind}".replace(" ", "\N{NO-BREAK SPACE}"), MARKS[kind][1]) for kind in kinds]
    return Text("  ").join([*entries, Text("·\N{NO-BREAK SPACE}reserved", style="dim")])


def _growth(footprint: Footprint) -> Group:
    rows: list[RenderableType] = [
        Text("growth: ", style="bold").append(_law(growth), style="not bold") for growth in footprint.growth
    ]
    if footprint.largest:
        found = [
            (row.place, f"{row.size} {row.largest}", f"of {format_bytes(row.capacity)}", row.known)
            for row in footprint.largest
        ]
        rows += [Text("largest batch:", style="bold"), make_list(found, padding=(0, 1, 0, 2))]
    return Group(*rows)


def fewest_of(footprint: Footprint) -> Rows:
    """How many cards train it, by sharding."""
    rows = [
        (
            row.sharding, str(row.cards) if row.cards is not None else f"more than {row.most}" if row.most > 2 else "no number",
            format_bytes(row.peak), row.known,
        )
        for row in footprint.fewest
    ]  # fmt: skip
    return ("spread as", "cards>", "reserved on each>", "known"), rows


def _law(growth: Growth) -> str:
    """The line or parabola in words, with how it was checked."""
    sizes = ", ".join(str(size) for size, _ in growth.traced)
    each = f"memory = {format_bytes(growth.fixed)} + {format_bytes(growth.each)} x {growth.size}"
    if growth.square:
        each = f"{format_bytes(growth.at(growth.traced[-1][0]))} at a {growth.size} of {growth.traced[-1][0]}, with its square"
    return f"{each} (traced at {sizes}; {growth.error:.1%} off where it was checked)"


def _loading(loading: Loading) -> Text:
    words = f"{format_bytes(loading.total)} on the host: {loading.ahead} batches of {format_bytes(loading.batch)} ahead"
    if loading.pinned:
        words += f", {format_bytes(loading.pinned)} pinned"
    if loading.workers:
        words += f", {loading.workers} workers of {format_bytes(loading.processes // loading.workers)}"
    return Text("loader: ", style="bold").append(words, style="not bold")
