"""Every noun that has a drawing: inside 60, 80, 120 and 200 columns, without colour, without UTF-8, and as a notebook's card."""

import dataclasses
import importlib
import io
import re

import answers
import numpy as np
import pytest
from rich.console import Console

import outsize
from outsize import report
from outsize.cli.streams import prepare_streams
from outsize.core.answers import KINDS, parse_answer
from outsize.core.contents import Contents, StoredArray
from outsize.core.footprint import Amount, Moment, WayOut
from outsize.core.memory import HOST, Part
from outsize.core.noun import Known
from outsize.core.outcomes.measured_peak import MeasuredPeak
from outsize.core.outcomes.outcome import Outcome
from outsize.core.outcomes.program_run import ProgramRun

MiB = 2**20
ARRAY = StoredArray(
    key="a_long_name_of_one", shape=(3_075_200, 512), dtype="float32", bytes=6_298_009_600, chunks=(1024, 512)
)


def ways():
    peak = Amount(bytes=900 * MiB, bound=1000 * MiB, known=Known.ESTIMATE)
    names = ("bf16, activations again, batch of 1", "LoRA of rank 16 on 4-bit weights")
    found = tuple(
        WayOut(name=name, exactness="same up to rounding", how="--batch 1", peak=peak, fits=False) for name in names
    )
    return dataclasses.replace(answers.footprint(), ways=found, fits=False)


def conversion(folder):
    np.save(folder / "x.npy", np.linspace(0, 1, 999, dtype="float32"))
    return outsize.convert(folder / "x.npy", None, "float16")


NOUNS = {
    "Sizing": lambda _: outsize.size((1, 256, 1024, 1021), "float32", budget="100MiB"),
    "Reading": lambda _: outsize.memory(),
    "Diagnosis": lambda _: outsize.explain("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "Plan": lambda _: answers.array_plan(),
    "FitPlan": lambda _: answers.fit_plan(),
    "Footprint": lambda _: answers.footprint(),
    "ways out": lambda _: ways(),
    "Recording": lambda _: answers.recording(),
    "Conversion": conversion,
    "Contents": lambda _: Contents(path="a.zarr", format="zarr", on_disk=5 * MiB, arrays=(ARRAY,) * 3, count=9, available=2**34),
    "Outcome": lambda _: Outcome(plan=answers.array_plan(), seconds=3.2, measured=MiB, results=(ARRAY,), step_seconds=(1.0, 2.2)),
    "ProgramRun": lambda _: ProgramRun(
        command=("train.py", "--epochs", "3"), status=0, seconds=9.0, peak=9 * MiB, largest=10 * MiB, processes=1,
        timeline=tuple(Moment(time=float(n), bytes=n * MiB) for n in range(9)),
        lines=(Part(name="train.py:8 in load", bytes=99 * MiB, known=Known.ESTIMATE),),
    ),
    "MeasuredPeak": lambda _: MeasuredPeak(
        name="test_a_sum", pool=HOST, bytes=9 * MiB, bound=9 * MiB, started_with=MiB, known=Known.ESTIMATE, how="by looking",
        budget=8 * MiB, seen=9 * MiB, line="test_big.py:3", holders=(Part(name="x", bytes=8 * MiB, known=Known.EXACT),),
    ),
    "Factoring": lambda _: outsize.factor.from_factors([np.ones((1, 9, 1)), np.ones((1, 8, 1))]).summary(),
}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_no_line_is_longer_than_the_screen_and_no_number_is_broken(make, width, tmp_path):
    console = Console(
        file=io.StringIO(), width=width, color_system=None, legacy_windows=False, markup=False, highlight=False
    )
    console.print(report.renderable(make(tmp_path)))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert not re.search(r"\d\.\d\d\s*$\n\s*[KMG]iB", "\n".join(lines[:1]), re.M)


@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_without_utf_8_every_drawing_is_plain_ascii(make, tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    prepare_streams()
    report.show(make(tmp_path))
    stream.flush()
    assert len(stream.buffer.getvalue().decode("ascii")) > 40


@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_a_cell_of_a_notebook_shows_a_card_and_not_a_screen(make, tmp_path):
    text = make(tmp_path)._repr_html_()
    assert 'class="outsize' in text and "<pre" not in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert len(text) < 200_000


@pytest.mark.parametrize("make", NOUNS.values(), ids=NOUNS)
def test_what_a_verb_prints_as_json_is_read_back_by_report(make, tmp_path):
    noun = make(tmp_path)
    assert parse_answer(report.to_json(noun)) == noun


def test_every_noun_that_is_drawn_can_be_read_back():
    assert set(KINDS) == set(report.DRAWINGS)
    for name, module in KINDS.items():
        assert isinstance(getattr(importlib.import_module(f"outsize.core.{module}"), name), type)
