"""The looks of the layers: a colour and a pattern each, so that no two depend on telling red from green.

Colours are those of Okabe and Ito, which people with any kind of colour vision tell apart, from dark to light and back; every
second layer is hatched too. A page prints them as they are.
"""

from __future__ import annotations

LOOKS = (
    ("#0072b2", ""), ("#e69f00", "M0 8L8 0"), ("#56b4e9", ""), ("#a03d00", "M0 4H8"), ("#009e73", ""), ("#cc79a7", "M4 0V8"),
    ("#f0e442", ""), ("#5e4fa2", "M0 0L8 8M0 8L8 0"), ("#9a9a9a", ""), ("#d0d0d0", "M0 8L8 0"),
)  # fmt: skip
"""(colour, strokes of the pattern) of each layer, from the bottom up; more layers begin again."""


def fill(number: int) -> str:
    """What a shape of this layer is filled with."""
    return f"url(#outsize-p{number % len(LOOKS)})"


def swatch(number: int) -> str:
    """A small square for a legend."""
    shape = f'<rect width="14" height="14" fill="{fill(number)}"/>'
    return f'<svg class="swatch" width="14" height="14" aria-hidden="true">{shape}</svg>'


def definitions() -> str:
    """The patterns, once a page."""
    made = [
        f'<pattern id="outsize-p{number}" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" '
        f'fill="{colour}"/>' + (f'<path d="{strokes}" stroke="#fff" stroke-opacity=".75" stroke-width="1.4"/>' if strokes else "")
        + "</pattern>"
        for number, (colour, strokes) in enumerate(LOOKS)
    ]  # fmt: skip
    return f'<svg width="0" height="0" class="defs" aria-hidden="true"><defs>{"".join(made)}</defs></svg>'
