"""Every drawing fits the screen it is printed on: no line is longer, and no number or picture is broken."""

import io
import re

import pytest
from rich.console import Console
from test_footprint_drawing import footprint

from outsize import report
from outsize.core.memory import HOST, Allowance, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Plan, Step
from outsize.core.units import GiB, MiB
from outsize.machine.fake import FakeMachine

WIDTHS = (60, 80, 120, 200)


def lines(noun, width):
    console = Console(
        file=io.StringIO(), width=width, color_system=None, legacy_windows=False, markup=False, highlight=False
    )
    console.print(report.renderable(noun))
    return console.file.getvalue().splitlines()


def plan():
    steps = [
        Step(
            name=name, peaks=(Peak(pool=HOST, bytes=803 * MiB, known=Known.EXACT),), read=1021 * MiB, written=977 * MiB,
            floor=1998 * MiB, tiles=187, tile=(1072, 64), parts=(Part(name="tile", bytes=803 * MiB, known=Known.EXACT),),
        )
        for name in ("mean and std of measurements.npy", "write divide")
    ]  # fmt: skip
    budget = Allowance(pool=HOST, bytes=2 * GiB, reason="asked for")
    return Plan(name="save z.npy", steps=tuple(steps), budgets=(budget,), smallest=MiB)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_longer_than_the_screen(width):
    with FakeMachine(gpus=[("NVIDIA H200", "139GiB", "12GiB")]):
        import outsize

        nouns = [plan(), footprint(), outsize.memory(), outsize.size((3075200, 512), "float32")]
    for noun in nouns:
        assert max(map(len, lines(noun, width))) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_a_plan_stay_whole_and_its_header_is_not_cut(width):
    text = "\n".join(lines(plan(), width))
    table = text[: text.index("held at the peak")]
    assert len(re.findall(r"1,?021\.00 MiB", table)) == 2
    assert len(re.findall(r"803\.00 MiB", table)) >= 2
    assert "distance" in table
    assert "…" not in table
    assert ("floor" in table) == (width >= 96)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_picture_of_a_step_is_as_wide_as_there_is_room_and_keeps_its_peak(width):
    drawn = lines(footprint(timeline=tuple(many_moments())), width)
    start = next(number for number, line in enumerate(drawn) if line.startswith("memory over the steps"))
    rows = drawn[start + 1 : start + 13]
    assert all("│" in row for row in rows)
    assert drawn[start + 13].strip().startswith("└")
    assert len(drawn[start + 13].rstrip()) == min(width, 14 + 150)
    assert "T" in rows[0]


def many_moments():
    """150 moments of which one is far higher than the others."""
    from outsize.core.footprint import Layers

    for number in range(150):
        high = 7 * GiB if number == 77 else 0
        yield Layers(
            time=number, label=f"step {1 + number // 50} forward", bytes=(GiB, 0, 0, 0, 0, 0, high, 0), reserved=GiB
        )


def test_names_under_the_picture_do_not_run_into_each_other():
    timeline = [*many_moments()][:1] + [*many_moments()][50:]
    drawn = "\n".join(lines(footprint(timeline=tuple(timeline)), 80))
    assert "step 2" in drawn
    assert "step 3" in drawn
    assert "sstep" not in drawn
