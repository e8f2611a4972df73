"""What a decomposition made, drawn: on every width, in a notebook, as JSON."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from outsize.core.noun import Known
from outsize.core.outcomes.factoring import Factoring, Spectrum
from outsize.report import draw, renderable, to_json


def spectrum(name: str = "mode 0", kept: int = 4, values: int = 40, last: float = 1e-6) -> Spectrum:
    step = last ** (1 / max(1, values - 1))
    return Spectrum(name=name, values=tuple(7.0 * step**place for place in range(values)), kept=kept, length=1536)


def made(**more: object) -> Factoring:
    said: dict[str, object] = {
        "method": "tucker", "shape": (1536, 1024, 1024), "dtype": "float32", "ranks": (4, 5, 6), "error": 0.0099,
        "known": Known.BOUND, "asked": 0.01, "bytes_before": 6442450944, "bytes_after": 1100000,
        "spectra": tuple(spectrum(f"mode {mode}", 4 + mode) for mode in range(3)), "seconds": 12.5, "read": 6442450944,
        "projected": 500 << 20, "measured": 400 << 20, "budget": 512 << 20, "source": "x.npy", "target": "x.tucker",
        "notes": ("a note",),
    }  # fmt: skip
    return Factoring(**said | more)  # type: ignore[arg-type]


def printed(noun: Factoring, columns: int) -> list[str]:
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    console.print(renderable(noun))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_picture_fits_the_screen_and_shows_the_cut(columns):
    lines = printed(made(), columns)
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    for mode in range(3):
        assert f"mode {mode}: {4 + mode} of 1,536 kept" in text
    assert (
        "5,857 times smaller" in text and "at most 0.0099 of the norm (bound), 0.01 asked" in text and "a note" in text
    )
    assert "12.5 s, 0.515 GB/s of data, 6.00 GiB read" in text
    assert "400.00 MiB measured (the whole process), 500.00 MiB projected" in " ".join(text.split())
    bottom = next(line for line in reversed(lines) if "█" in line)
    share = bottom.count("█") / (bottom.count("█") + bottom.count("░"))
    assert 0.2 < share < 0.5  # a third of what is shown is kept


@pytest.mark.parametrize("columns", [20, 60, 200])
@pytest.mark.parametrize(
    "spectra",
    [
        (), (spectrum(kept=1, values=1),), (spectrum(kept=40, values=40),), (spectrum(kept=1, values=2000),),
        (spectrum(last=1.0),), (spectrum(last=1e-300),),
        (Spectrum(name="mode 0", values=(0.0, 0.0), kept=1, length=2),), tuple(spectrum(f"mode {k}") for k in range(9)),
        (Spectrum(name="mode 0", values=(), kept=0, length=0),),
    ],
)  # fmt: skip
def test_every_spectrum_can_be_drawn(spectra, columns):
    noun = made(spectra=spectra)
    assert printed(noun, columns)
    assert draw(noun, "html")


def test_a_notebook_gets_svg_that_reads_on_light_and_dark():
    page = draw(made(notes=("<b>",)), "html")
    root = ElementTree.fromstring(page)  # well formed
    panels = [svg for svg in root.iter("svg") if svg.get("role") == "img"]
    assert "&lt;b&gt;" in page and len(panels) == 3
    assert all(svg.get("fill") == "currentColor" for svg in panels)  # text in the page's own colour
    colours = {rect.get("fill") for svg in panels for rect in svg.iter("rect")}
    assert len(colours) == 2
    for colour in colours:  # neither white nor black: a contrast of 2.5 and more with both
        light = sum(
            weight * (int(colour[at : at + 2], 16) / 255) ** 2.2
            for weight, at in ((0.2126, 1), (0.7152, 3), (0.0722, 5))
        )
        assert 1.05 / (light + 0.05) > 2.5 and (light + 0.05) / 0.05 > 2.5


def test_json_has_the_same_numbers():
    found = json.loads(to_json(made()))
    assert found["ratio"] == 6442450944 / 1100000 and found["rate"] == 6442450944 / 12.5
    assert found["spectra"][2]["kept"] == 6 and len(found["spectra"][2]["values"]) == 40
    assert found["known"] == "bound" and found["error"] == 0.0099
    unknown = json.loads(to_json(made(error=None, seconds=None)))
    assert unknown["error"] is None and unknown["rate"] is None


def test_what_is_unknown_is_not_drawn_as_known():
    text = "\n".join(printed(made(error=None, seconds=None, projected=None), 100))
    assert "error unknown" in text and "time  " not in text and "peak  " not in text
    assert "about 0.0099" in "\n".join(printed(made(known=Known.ESTIMATE), 100))
