"""No diagnosis contradicts itself or its facts, whatever a message says: over all frameworks, causes and numbers."""

import re

import hypothesis.strategies as st
import pytest
from effort import examples
from hypothesis import given

from outsize.core.failure import CauseName, Exactness, Failure, Remedy
from outsize.core.memory import Limit
from outsize.core.noun import Known
from outsize.core.units import parse_bytes
from outsize.failure.case import Case
from outsize.failure.explain import diagnose, explain
from outsize.failure.framework import read_frameworks
from outsize.failure.message.read import FORMATS
from outsize.failure.program import read_programs
from outsize.failure.remedies.find import REMEDIES
from outsize.failure.remedies.in_use import left_to_do
from outsize.machine import memory
from outsize.machine.fake import FakeMachine

GiB, MiB = 2**30, 2**20
FRAMEWORK_NAMES = sorted({*read_frameworks(), *(row.framework for row in FORMATS)})
SIZES = st.none() | st.integers(1, 200 * GiB) | st.sampled_from([20 * MiB, 2 * GiB, 24 * GiB])
EXTRA = {
    "reserved_unallocated_bytes": SIZES,
    "process_in_use_bytes": SIZES,
    "private_pool_bytes": SIZES,
    "anon_rss_bytes": SIZES,
    "asked_bytes": SIZES,
    "scope": st.sampled_from([None, "cgroup", "machine"]),
    "signal": st.sampled_from([None, "Killed", "Bus error"]),
    "used_bytes": SIZES,
    "sparsecore_used_bytes": SIZES,
    "max_seq_len": st.none() | st.integers(1, 10**6),
    "kv_tokens": st.none() | st.integers(1, 10**6),
    "max_model_len": st.none() | st.integers(1, 10**6),
    "gpu_memory_utilization": st.none() | st.floats(0.1, 1.0),
}


@st.composite
def failures(draw):
    framework = draw(st.sampled_from(FRAMEWORK_NAMES))
    names = [row.name for row in FORMATS if row.framework == framework] or ["snapshot"]
    extra = {name: value for name, values in EXTRA.items() if (value := draw(values)) is not None}
    if draw(st.booleans()):
        extra["processes"] = ({"pid": 4711, "bytes": draw(st.integers(1, 80 * GiB))},)
    return Failure(
        framework=framework,
        requested_bytes=draw(SIZES),
        shape=draw(st.none() | st.lists(st.integers(1, 10**5), min_size=1, max_size=4).map(tuple)),
        dtype=draw(st.sampled_from([None, "float32", "float64", "int64"])),
        device=draw(st.sampled_from([None, "cpu", "cuda:0", "cuda", "hip:1", "mps", "tpu", "metal"])),
        total_bytes=draw(SIZES),
        free_bytes=draw(SIZES),
        allocated_bytes=draw(SIZES),
        reserved_bytes=draw(SIZES),
        limit_bytes=draw(SIZES),
        process=draw(st.sampled_from([None, "python", "DataLoader worker"])),
        pid=draw(st.none() | st.just(12)),
        extra={"format": draw(st.sampled_from(names))} | extra,
    )


def machines():
    return st.sampled_from(
        [
            None,
            {"total": "16GiB", "available": "10GiB"},
            {"total": "16GiB", "available": "10GiB", "container": "400MiB", "container_used": "380MiB"},
            {"total": "16GiB", "available": "10GiB", "address_space": "2GiB"},
        ]
    )


def check(case):
    """Every law that a diagnosis keeps."""
    diagnosis = diagnose(case)
    failure, causes = case.failure, [diagnosis.cause, *diagnosis.candidates]
    advice = "\n".join(remedy.how for remedy in diagnosis.remedies)
    assert len({cause.name for cause in causes}) == len(causes)
    assert all(cause.certain or cause.decide for cause in causes if cause is not diagnosis.cause)
    for cause in causes:
        assert ": 0 B are missing" not in cause.text and "held 0 B" not in cause.text and "None" not in cause.text
        assert not re.search(r"-[0-9.,]+ (?:[KMGT]i)?B\b", cause.text)  # nothing is missing by less than nothing
    assert diagnosis.remedies or diagnosis.cause.name == CauseName.WARNING
    for remedy in diagnosis.remedies:
        assert remedy.saves is None or remedy.saves > 0
    saves = [remedy.saves or 0 for remedy in diagnosis.remedies]
    assert saves == sorted(saves, reverse=True)
    for useless in ("empty_cache", "gc.collect", "file_system", "prune"):
        assert useless not in advice
    if CauseName.FRAGMENTATION in {cause.name for cause in causes} and failure.framework == "pytorch":
        assert case.slack and case.slack + (failure.free_bytes or 0) >= (case.need or 0)
    if "expandable_segments" in advice:
        assert case.on_torch_gpu and case.slack >= (case.gap or 0)
    for row in failure.extra.get("processes", ()):
        if (row["pid"], row["bytes"]) in case.strangers:
            assert f"pid {row['pid']}" in " ".join(item.text for item in diagnosis.evidence)
    check_numbers(case, advice)
    check_framework(case, advice)
    str(diagnosis)


def check_numbers(case, advice):
    """Memory to ask for covers what is known to be needed; budgets keep inside limits; lengths become shorter."""
    for word in re.findall(r"--memory=([0-9]+)m|limits: \{memory: ([0-9]+)Mi|sbatch --mem=([0-9]+)M", advice):
        mib = int("".join(word))
        assert mib * MiB >= (case.known_need or 0) and mib * MiB > (case.failure.limit_bytes or 0)
    for line in advice.splitlines():
        for text in re.findall(r'budget="([^"]+)"', line):
            rooms = [case.device_room] if "outsize.fit" in line and case.failure.device not in (None, "cpu") else []
            room = min((size for size in rooms or [case.host_room] if size is not None), default=None)
            assert room is None or parse_bytes(text) <= room
    for length in re.findall(r"--max-model-len ([0-9]+)(?!.*less than yours)", advice):
        assert int(length) < case.failure.extra.get("max_seq_len", 10**9) or case.failure.extra["max_seq_len"] == 1
    for share in re.findall(r"--gpu-memory-utilization ([0-9.]+)", advice):
        used = case.failure.extra.get("gpu_memory_utilization")
        if used and case.failure.free_bytes and case.failure.total_bytes and case.failure.free_bytes < (case.need or 0):
            assert float(share) * case.failure.total_bytes <= case.failure.free_bytes


def check_framework(case, advice):
    """Advice belongs to who failed, and to where."""
    name = case.failure.framework
    assert "torch." not in advice or name in ("pytorch", "nccl") or case.library == "pytorch"
    assert "TF_" not in advice or name == "tensorflow"
    assert "jax." not in advice or name == "jax"
    assert "--max-model-len" not in advice or name == "vllm"
    assert not (case.watched and "outsize run" in advice)
    if case.on_torch or not case.framework.python:
        assert 'outsize.open("x.npy")   # then' not in advice
    if not case.framework.python:
        assert "outsize run" not in advice
    if "outsize.fit" in advice:
        assert (case.failure.device or "cpu").partition(":")[0] in ("cpu", "cuda", "hip")


@examples(1600)
@given(failures(), machines(), st.booleans(), st.sampled_from([None, "pytorch"]))
def test_no_diagnosis_contradicts_its_facts(failure, machine, watched, library):
    reading = None
    if machine is not None:
        with FakeMachine(**machine):
            reading = memory()
    check(Case(failure=failure, reading=reading, watched=watched, library=library))


def test_every_cause_has_its_row_and_every_row_its_cause():
    assert set(REMEDIES) == set(CauseName)


def all_advice():
    """Every line with a setting that a table advises."""
    programs = [way for rows in read_programs().values() for row in rows for way in row.advice]
    frameworks = [way for row in read_frameworks().values() for way in row.advice]
    lines = {way.how: re.split(r"\s#", way.how, maxsplit=1)[0] for way in (*programs, *frameworks)}
    return {
        how: code for how, code in lines.items() if re.search(r"--[a-z][\w-]+[ =][0-9]+( |$)|\w=[0-9]+([,;) ]|$)", code)
    }


def test_no_table_advises_what_is_in_use():
    lines = all_advice()
    assert len(lines) > 100
    for how, code in lines.items():
        way = Remedy(name="", saves=None, known=Known.ESTIMATE, costs="", exactness=Exactness.BITWISE, how=how)
        found = left_to_do(way, f"$ {code}")
        assert found is None or found.how != how, how


TORCH = (
    "CUDA out of memory. Tried to allocate {need}. GPU 0 has a total capacity of 23.65 GiB of which 18.00 MiB is free. "
    "{others}Including non-PyTorch memory, this process has {mine} memory in use. Of the allocated memory {held} is allocated "
    "by PyTorch, and {slack} is reserved by PyTorch but unallocated."
)


def test_a_little_slack_is_not_fragmentation():
    text = TORCH.format(need="256.00 MiB", others="", mine="23.60 GiB", held="22.80 GiB", slack="310.00 MiB")
    diagnosis = explain(text)
    assert diagnosis.cause.name == CauseName.TRUE_NEED and "missing" not in diagnosis.cause.text
    assert any("expandable_segments" in remedy.how for remedy in diagnosis.remedies)


def test_other_processes_on_the_card_are_mentioned_whatever_the_cause():
    others = "Process 11 has 2.10 GiB memory in use. Process 12 has 1.40 GiB memory in use. "
    text = TORCH.format(need="9.00 GiB", others=others, mine="20.10 GiB", held="18.80 GiB", slack="300.00 MiB")
    diagnosis = explain(text)
    assert diagnosis.cause.name == CauseName.TRUE_NEED
    assert any("pid 11 2.10 GiB, pid 12 1.40 GiB" in item.text for item in diagnosis.evidence)
    assert any("outside PyTorch" in item.text for item in diagnosis.evidence)
    assert [cause.name for cause in diagnosis.candidates] == [CauseName.OTHER_PROCESS]
    assert "kill 11" in [remedy.how for remedy in diagnosis.remedies]


def test_tensorflows_library_failure_is_not_pytorchs():
    text = (
        "E tensorflow/stream_executor/cuda/cuda_blas.cc:226] failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED"
    )
    diagnosis = explain(text)
    assert diagnosis.failure.framework == "tensorflow"
    assert diagnosis.remedies[0].how.startswith(("TF_", "model.fit"))
    assert explain("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED").failure.framework == "pytorch"


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (
            "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (5440).",
            "--max-model-len 5440",
        ),
        (
            "Free memory on device cuda:0 (3.5/16.0 GiB) on startup is less than desired GPU memory utilization (0.9, 14.4 GiB).",
            "--gpu-memory-utilization 0.21",
        ),
    ],
)
def test_vllm_is_told_to_take_less_not_more(text, how):
    ways = [remedy.how for remedy in explain(text).remedies]
    assert how in ways and not any("0.95" in way for way in ways if "utilization" in how)


def test_a_limit_of_address_space_without_a_number_is_told_as_a_limit():
    with FakeMachine(total="16GiB", address_space="4GiB"):
        reading = memory()
    limit = Limit(name="ulimit -v", bytes=4 * GiB, used=4 * GiB - 30 * MiB, source="RLIMIT_AS")
    host = reading.host.__class__(
        pool=reading.host.pool, name="RAM", total=16 * GiB, available=limit.available, limits=(limit,)
    )
    from dataclasses import replace

    failure = Failure(framework="python", extra={"format": "python"})
    diagnosis = diagnose(Case(failure=failure, reading=replace(reading, host=host)))
    assert (diagnosis.cause.name, diagnosis.cause.certain) == (CauseName.ADDRESS_SPACE, False)
    assert "ulimit -v unlimited" in diagnosis.remedies[0].how
