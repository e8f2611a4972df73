"""Seven pieces of advice that were wrong when a newcomer first tried them: none of them is given any more."""

import re

import outsize
from outsize.core.failure import CauseName, Failure
from outsize.core.units import parse_bytes
from outsize.failure.case import Case
from outsize.failure.explain import diagnose
from outsize.machine import memory
from outsize.machine.fake import FakeMachine

MiB, GiB = 2**20, 2**30
HUGE = "Unable to allocate 5.87 GiB for an array with shape (3075200, 512) and data type float32"


def ways(diagnosis):
    return "\n".join(remedy.how for remedy in diagnosis.remedies)


def budgets(text):
    return [parse_bytes(size) for size in re.findall(r'budget="([^"]+)"|--budget (\S+)', text) for size in size if size]


def test_an_array_that_cannot_exist_is_not_to_be_split_once_it_exists():
    assert "array_split" not in ways(outsize.explain(HUGE))


def test_a_program_under_outsize_run_is_not_told_to_use_it():
    failure = Failure(framework="linux", extra={"format": "killed", "signal": "Killed"})
    assert "outsize run" not in ways(diagnose(Case(failure=failure, watched=True)))


def test_no_budget_is_above_what_the_machine_or_its_container_can_give():
    seen = []
    for machine in (
        {"total": "2GiB", "available": "300MiB"},
        {"total": "16GiB", "available": "10GiB", "container": "400MiB", "container_used": "380MiB"},
        {"total": "16GiB", "available": "10GiB", "container": "400MiB", "container_used": "100MiB"},
    ):
        with FakeMachine(**machine):
            given = budgets(ways(outsize.explain(HUGE, here=True)))
        assert all(size <= parse_bytes(machine.get("container") or machine["available"]) for size in given)
        seen += given
    assert seen


def test_no_budget_is_above_the_one_that_was_given():
    with FakeMachine(total="64GiB", available="60GiB"):
        advice = outsize.size((3075200, 512), "float32", budget="4GiB").advice
    through = re.search(r"stream it through ([\d.]+ \w+)", " ".join(advice)).group(1)
    assert parse_bytes(through) <= 4 * GiB


def test_memory_that_rises_gets_advice_for_leaks_first():
    lines = [f"step {100 * n} loss 0.{n} memory allocated: {4 + 2 * n}.0 GiB" for n in range(1, 9)]
    text = "\n".join(lines) + "\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    found = outsize.explain(text)
    assert CauseName.LEAK in {found.cause.name, *(cause.name for cause in found.candidates)}
    assert "batch_size" not in found.remedies[0].how


def test_a_tensor_of_300_kilobytes_is_not_told_to_be_smaller():
    with FakeMachine(total="16GiB", available="10GiB"):
        advice = outsize.size((384, 192), "float32").advice
    assert advice and "float16" not in " ".join(advice) and "too small to exhaust memory" in advice[0]


def test_no_two_words_of_the_memory_screen_run_into_each_other():
    with FakeMachine(total="16GiB", available="10GiB", container="400MiB", container_used="380MiB"):
        text = str(memory())
    assert not re.search(r"available\d|total\d|use\d", text)
