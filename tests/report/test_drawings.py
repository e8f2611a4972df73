"""Every noun with a drawing shows the same numbers in text and HTML, whatever is in its names."""

import ast
import importlib
import io
import subprocess
import sys

import pytest
from rich.console import Console

import outsize
from outsize import report
from outsize.allocator import replay
from outsize.core.allocation import AllocationEvent
from outsize.core.noun import Noun
from outsize.core.units import MiB
from outsize.machine.fake import FakeMachine


def test_every_registered_drawing_exists():
    for module in report.DRAWINGS.values():
        assert callable(importlib.import_module(module).draw)


def test_a_replay_shows_peaks_fragments_and_where_it_ran_out():
    events = [AllocationEvent(i, True, i, 8 * MiB) for i in range(6)]
    events += [AllocationEvent(9, False, i, 0) for i in (0, 2, 4)] + [AllocationEvent(10, True, 9, 60 * MiB)]
    result = replay(events, capacity=100 * MiB)
    text = str(result)
    assert result.out_of_memory is not None
    assert "ran out at event 9: 60.00 MiB asked for" in text
    assert "░" in text
    assert "█" in text
    assert "ran out at event 9" in result._repr_html_()


@pytest.mark.parametrize("name", ["[red]card[/red]", "<script>alert(1)</script>", "a\x1b[31mb"])
def test_a_hostile_name_is_shown_as_text(name):
    import outsize

    with FakeMachine(gpus=[(name, "1GiB", "1GiB")]):
        reading = outsize.memory()
    assert "<script>" not in reading._repr_html_()
    if name.startswith("[red]"):
        assert name in str(reading)


def test_a_noun_without_a_drawing_prints_its_fields():
    from outsize.core.memory import HOST

    assert isinstance(HOST, Noun)
    assert repr(HOST) == "Pool(kind='host', index=None)"


def test_a_plan_shows_its_verdict_steps_and_smallest_budget():
    from outsize.core.memory import HOST, Allowance, Part
    from outsize.core.noun import Known
    from outsize.core.plan import Peak, Plan, Step

    parts = (Part(name="tile of x", bytes=3 * MiB, known=Known.EXACT),)
    step = Step(
        name="sum", peaks=(Peak(pool=HOST, bytes=3 * MiB, known=Known.EXACT),), parts=parts, read=8 * MiB, floor=4 * MiB,
        tiles=2, tile=(512, 7), notes=("both ride on one read",),
    )  # fmt: skip
    small = (Allowance(pool=HOST, bytes=2 * MiB, reason="set by you"),)
    text = str(Plan(name="sum of x", steps=(step,), budgets=small, smallest=MiB))
    for piece in (
        "does not fit",
        "3.00 MiB of 2.00 MiB host",
        "2 of 512x7",
        "2.00x",
        "tile of x",
        "smallest",
        "both ride",
    ):
        assert piece in text


def test_the_first_drawing_leaves_pythons_random_numbers_alone():
    told = "import random, outsize; before = random.getstate(); str(outsize.size((2, 2), 'float32'))"
    subprocess.run([sys.executable, "-c", f"{told}; assert random.getstate() == before"], check=True)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_code_of_a_remedy_can_be_copied_from_a_narrow_terminal(width):
    text = "Unable to allocate 5.87 GiB for an array with shape (3075200, 512) and data type float32"
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False)
    console.print(report.renderable(outsize.explain(text)))
    lines = [line[14:].rstrip() for line in console.file.getvalue().splitlines()]
    begin = next(number for number, line in enumerate(lines) if "outsize.open" in line)
    end = next(number for number, line in enumerate(lines) if "y.save" in line)
    shown = lines[max(0, begin - 1) : end + 1]
    ast.parse("\n".join(line for line in shown if line[:1] in "xy#"))
    assert all(line[:1] in ("x", "y", "#") for line in shown[1:]), shown
    assert "nothing is loaded" in " ".join(shown) and "any array expression" in " ".join(shown)
