"""Drawings that depend on how wide the screen is.

In: a function from a number of columns to a renderable. Out: a renderable that asks the console for its width first.
So a picture uses the whole width, and a narrow table leaves out columns instead of breaking numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType


class ByWidth:
    """What `draw(columns)` gives for the console it is printed on."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._draw(options.max_width)
