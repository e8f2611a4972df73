"""Draws `Contents`: what a file is, a line for each array, and what to type next."""

from __future__ import annotations

import os

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from outsize.core.contents import Contents
from outsize.core.units import format_bytes
from outsize.report.text.layout import Rows, draw_fits, make_table


def draw(contents: Contents) -> RenderableType:
    disk = "" if contents.on_disk is None else f", {format_bytes(contents.on_disk)} on disk"
    many = f", {contents.count} arrays" if contents.count > 1 else ""
    head = Text.assemble((contents.path, "bold"), f": {contents.format}{many}{disk}")
    lines: list[RenderableType] = [head, make_table(*arrays_of(contents))]
    if contents.count > len(contents.arrays):
        lines.append(Padding(f"and {contents.count - len(contents.arrays)} more arrays", (0, 0, 0, 2)))
    if contents.fits is not None:
        have = f": {format_bytes(contents.bytes)} of {format_bytes(contents.available)} available"
        lines.append(Text.assemble("loaded whole, it ", draw_fits(contents.fits, weight="bold"), have))
    lines += [Text(note) for note in contents.notes]
    if contents.arrays:
        lines.append(Text(f"next: {_next(contents)}", style="dim"))
    return Group(*lines)


def arrays_of(contents: Contents) -> Rows:
    """A row for each array; chunks where any has them."""
    columns = ["array", "dtype", "shape", "in memory>", "chunks"][: 4 + any(one.chunks for one in contents.arrays)]
    rows = [
        (one.key or "-", one.dtype, _shape(one.shape), format_bytes(one.bytes), _shape(one.chunks) if one.chunks else "-")
        for one in contents.arrays
    ]  # fmt: skip
    return tuple(columns), [row[: len(columns)] for row in rows]


def _shape(lengths: tuple[int, ...]) -> str:
    return " x ".join(map(str, lengths)) or "scalar"


def _next(contents: Contents) -> str:
    key = contents.arrays[0].key
    path = contents.path if "::" in contents.path or contents.count == 1 else f"{contents.path}::{key}"
    quoted = f"'{path}'" if " " in path else path
    return f'outsize compute "x.mean(axis=0)" --in x={quoted} --budget 1GiB   ({os.path.basename(contents.path)} stays on disk)'
