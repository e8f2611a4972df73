"""Draws a `Factoring`: what was kept and what it lost, and the singular values of each mode with the cut.

A panel is a few lines of blocks. `html/factoring.py` draws the same for pages and notebooks.
"""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outsize.core.noun import Known
from outsize.core.outcomes.factoring import Factoring, Spectrum
from outsize.core.units import format_bytes
from outsize.report.text.layout import ByWidth

HEIGHT = 6
"""Lines of a panel."""
LEAST, MOST = 22, 46
"""Columns of a panel."""
AXIS = 7
"""Columns left of a panel's picture: values and the axis."""
LOWEST = 1e-9
"""Singular values below this share of the largest are drawn at the bottom: they are rounding errors."""


def draw(factoring: Factoring) -> RenderableType:
    lines: list[RenderableType] = [title_of(factoring)]
    lines += [Text(f"{name} {words}") for name, words in facts_of(factoring)]
    spectra = [spectrum for spectrum in factoring.spectra if shown_values(spectrum)]
    if spectra:
        lines.append(ByWidth(lambda columns: _panels(spectra, columns)))
    return Group(*lines, *(Text(note, style="yellow") for note in factoring.notes))


def title_of(factoring: Factoring) -> Text:
    shape = " x ".join(map(str, factoring.shape)) or "a number"
    names = [name for name in (factoring.source, factoring.target) if name]
    ranks = f", {_counted(factoring)}" if factoring.ranks else ""
    return Text.assemble(
        (" -> ".join(names) + ": " if names else ""), (factoring.method, "bold"), f" of {shape}{ranks}"
    )


def _counted(factoring: Factoring) -> str:
    """`rank 40`, or `ranks 40 x 40 x 40`."""
    ranks = " x ".join(map(str, factoring.ranks))
    return f"rank {ranks}" if len(factoring.ranks) == 1 else f"ranks {ranks}"


def facts_of(factoring: Factoring) -> list[tuple[str, str]]:
    """(what, words) for each line."""
    before, after = format_bytes(factoring.bytes_before), format_bytes(factoring.bytes_after)
    rows = [("bytes", f"{before} -> {after}, {_times(factoring.ratio)} times smaller"), ("error", _error(factoring))]
    if factoring.seconds is not None:
        rate = "" if factoring.rate is None else f", {factoring.rate / 1e9:.3g} GB/s of data"
        read = "" if factoring.read is None else f", {format_bytes(factoring.read)} read"
        rows.append(("time ", f"{factoring.seconds:.3g} s{rate}{read}"))
    if factoring.projected is not None:
        held = (
            "" if factoring.measured is None else f"{format_bytes(factoring.measured)} measured (the whole process), "
        )
        budget = "" if factoring.budget is None else f", of a budget of {format_bytes(factoring.budget)}"
        rows.append(("peak ", f"{held}{format_bytes(factoring.projected)} projected{budget}"))
    return rows


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _error(factoring: Factoring) -> str:
    if factoring.error is None:
        return "unknown"
    sign = {Known.EXACT: "", Known.BOUND: "at most ", Known.ESTIMATE: "about "}[factoring.known]
    asked = "" if factoring.asked is None else f", {factoring.asked:.3g} asked"
    return f"{sign}{factoring.error:.3g} of the norm ({factoring.known}){asked}"


def shown_values(spectrum: Spectrum) -> list[float]:
    """The values that a panel shows, relative to the largest: those that stay and twice as many."""
    values = spectrum.values[: max(8, 3 * spectrum.kept)]
    top = max(values, default=0.0)
    return [max(LOWEST, value / top) for value in values] if top > 0 and math.isfinite(top) else []


def panel_title(spectrum: Spectrum) -> str:
    return f"{spectrum.name}: {spectrum.kept} of {spectrum.length:,} kept"


def _panels(spectra: list[Spectrum], columns: int) -> Table:
    """Side by side, as many as fit."""
    wide = max(LEAST, min(MOST, columns // len(spectra) - 2, columns - 2))
    across = max(1, columns // (wide + 2))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for start in range(0, len(spectra), across):
        grid.add_row(*(_panel(spectrum, wide - AXIS) for spectrum in spectra[start : start + across]))
    return grid


def _panel(spectrum: Spectrum, columns: int) -> Group:
    """Singular values from left to right, on a logarithmic scale; what was cut is dotted."""
    values = shown_values(spectrum)
    lowest = min(values)
    decades = max(1e-3, -math.log10(lowest))
    edges = [round(place * columns / len(values)) for place in range(len(values) + 1)]
    cells = [0] * columns  # which value each column shows: the first that reaches into it
    for place in range(len(values) - 1, -1, -1):
        for column in range(min(edges[place], columns - 1), max(edges[place + 1], edges[place] + 1)):
            if column < columns:
                cells[column] = place
    lines = [Text(panel_title(spectrum), no_wrap=True, overflow="ellipsis")]
    for level in range(HEIGHT):
        label = "1" if level == 0 else f"{lowest:.0e}" if level == HEIGHT - 1 else ""
        line = Text(f"{label:>{AXIS - 2}} │")
        for place in cells:
            depth = -math.log10(values[place]) / decades * (HEIGHT - 1)
            kept = place < spectrum.kept
            mark = ("█" if kept else "░") if depth <= level + 0.5 else " "
            line.append(mark, style="cyan" if kept else "dim")
        lines.append(line)
    return Group(*lines, Text(" " * (AXIS - 1) + "└" + "─" * columns))
