"""Causes by rule, evidence kept apart, remedies that can help and no others."""

import json

import pytest
from failure_messages import CAPPED, CROWDED, FRAGMENTED, GRAPHS, HUGE, MESSAGES, V2

import outsize
from outsize import report
from outsize.core.units import parse_bytes
from outsize.machine.fake import FakeMachine

GiB = 2**30


def names(diagnosis):
    return [remedy.name for remedy in diagnosis.remedies]


def hows(diagnosis):
    return "\n".join(remedy.how for remedy in diagnosis.remedies)


@pytest.mark.parametrize(
    ("text", "cause", "certain"),
    [
        (V2, "true need", True),
        (FRAGMENTED, "fragmentation", True),
        (CROWDED, "other process", True),
        (CAPPED, "memory fraction", True),
        (GRAPHS, "CUDA graph pools", True),
        (HUGE, "request larger than the device", True),
        (
            "Unable to allocate 34.4 TiB for an array with shape (3075200, 3075200) and data type float32",
            "broadcast explosion",
            False,
        ),
        ("RuntimeError: DataLoader worker (pid 3) is killed by signal: Bus error.", "shared memory", True),
        ("Memory cgroup out of memory: Killed process 7 (python)", "limit", True),
        ("Out of memory: Killed process 7 (python) total-vm:1kB, anon-rss:1kB", "machine out of memory", True),
        ("Killed", "killed", False),
        ("failed to allocate 10.20G (10952166605 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY", "preallocation", False),
        ("Allocation of 617283072 exceeds 10% of free system memory.", "warning only", True),
        ("java.lang.OutOfMemoryError: Java heap space", "limit", True),
        ("Out of Memory Error: failed to allocate data of size 16.0 MiB (7.4 GiB/7.4 GiB used)", "limit", True),
        ("Memory limit of 512 MiB exceeded with 530 MiB used.", "limit", True),
    ],
)
def test_the_cause_is_named_by_rule(text, cause, certain):
    diagnosis = outsize.explain(text)
    assert (diagnosis.cause.name, diagnosis.cause.certain) == (cause, certain)


def test_fragmentation_offers_expandable_segments_with_the_bytes_it_gives():
    remedy = outsize.explain(FRAGMENTED).remedies[0]
    assert "expandable_segments:True" in remedy.how
    assert remedy.saves == round(10.70 * GiB)


def test_a_setting_that_is_already_on_is_not_offered():
    text = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + FRAGMENTED
    diagnosis = outsize.explain(text)
    assert "expandable_segments" not in hows(diagnosis)
    assert any("already on" in item.text for item in diagnosis.evidence)


def test_pytorchs_own_advice_is_not_taken_for_a_setting():
    diagnosis = outsize.explain(
        FRAGMENTED + " try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    assert "expandable_segments:True" in hows(diagnosis)


def test_pytorchs_advice_is_not_taken_for_a_setting_where_a_line_ends_in_it():
    hint = "\n# If reserved but unallocated memory is large try setting\n# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to"
    assert "expandable_segments:True" in hows(outsize.explain("# " + FRAGMENTED + hint + " avoid fragmentation."))


def test_a_small_victim_does_not_make_a_small_limit():
    text = "Memory cgroup out of memory: Killed process 7 (python) total-vm:4000kB, anon-rss:392kB, file-rss:0kB"
    assert "docker run --memory=16384m" in hows(outsize.explain(text))


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 86.89GiB.", "jax.checkpoint"),
        ("OpenBLAS error: Memory allocation still failed after 10 retries", "OPENBLAS_NUM_THREADS=1"),
        ("Out of memory: Killed process 16498 (java) total-vm:9kB, anon-rss:8kB, file-rss:0kB", "swapon"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12000000000 bytes.", "outsize.fit("),
        ("XPU out of memory. Tried to allocate 192.00 MiB. GPU 3 has a total capacity of 31.89 GiB of which 13.22 GiB is free.",
         "xpu-smi"),
    ],
)  # fmt: skip
def test_advice_belongs_to_the_program_that_failed(text, how):
    advice = hows(outsize.explain(text))
    assert how in advice
    assert "outsize.open" not in advice or how.startswith("OPENBLAS")


def test_expandable_segments_are_not_offered_where_the_slack_is_smaller_than_the_gap():
    diagnosis = outsize.explain(V2)
    assert "expandable_segments" not in hows(diagnosis)
    assert any("cannot help" in item.text for item in diagnosis.evidence)


@pytest.mark.parametrize("text", [row[1] for row in MESSAGES])
def test_what_cannot_help_is_never_offered(text):
    advice = hows(outsize.explain(text))
    for useless in ("empty_cache", "gc.collect", "file_system", "prune"):
        assert useless not in advice


def test_a_crowded_card_names_who_to_end_and_what_that_gives():
    first = outsize.explain(CROWDED).remedies[0]
    assert (first.how, first.saves) == ("kill 4711", round(30.25 * GiB))


def test_this_process_listed_under_a_foreign_pid_is_not_another_one():
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 "
        "GiB is free. Process "
        "991 has 78.00 GiB memory in use. Of the allocated memory 77.00 GiB is allocated by PyTorch, and 100.00 "
        "MiB is reserved by "
        "PyTorch but unallocated."
    )
    assert outsize.explain(text).cause.name == "true need"


def test_the_fraction_to_set_lets_the_request_through():
    remedy = outsize.explain(CAPPED).remedies[0]
    fraction = float(remedy.how.partition("(")[2].rstrip(")"))
    assert fraction * 79.10 >= 18.10 + 210 / 1024 + 3.0


def test_a_tensor_too_small_to_exhaust_anything_is_said_to_be_so():
    diagnosis = outsize.explain(
        "OOM when allocating tensor with shape[384,192] and type float on /job:x/device:GPU:0 by allocator GPU_0_bfc"
    )
    assert diagnosis.cause.name == "memory already full"
    assert "294,912 bytes" in diagnosis.cause.text
    assert {cause.name for cause in diagnosis.candidates} >= {"other process", "leak"}


def test_remedies_for_a_known_shape_are_exact():
    diagnosis = outsize.explain(
        "OOM when allocating tensor with shape[1,256,1024,1021] and type float on /job:x/device:GPU:0"
    )
    saves = {remedy.name.split(":")[0]: remedy.saves for remedy in diagnosis.remedies}
    assert saves["float16 instead of float32"] == 535_298_048
    assert saves["half of axis 2 at a time"] == 535_298_048
    assert "1,070,596,096" in " ".join(item.text for item in diagnosis.evidence)
    assert "outsize.open(" in hows(diagnosis) and '.save("y.zarr", budget="255MiB")' in hows(diagnosis)


def test_the_exploded_broadcast_says_how_to_write_it():
    first = outsize.explain(
        "Unable to allocate 34.4 TiB for an array with shape (3075200, 3075200) and data type float32"
    ).remedies[0]
    assert "ravel" in first.how
    assert first.saves == 3075200 * 3075200 * 4 - 3075200 * 4


def test_remedies_are_ranked_by_bytes():
    for _, text, _ in MESSAGES:
        saves = [remedy.saves or 0 for remedy in outsize.explain(text).remedies]
        assert saves == sorted(saves, reverse=True)


def test_an_exception_is_judged_on_the_machine_it_happened_on():
    with FakeMachine(total="16GiB", available="10GiB", container="2GiB", container_used="1500MiB"):
        diagnosis = outsize.explain(
            MemoryError("Unable to allocate 1.00 GiB for an array with shape (134217728,) and data type float64")
        )
    assert diagnosis.cause.name == "limit"
    assert "2.00 GiB" in diagnosis.cause.text
    assert {item.kind for item in diagnosis.evidence} == {"message", "machine", "inferred"}


def test_what_this_process_holds_is_told_once():
    with FakeMachine(total="16GiB", available="10GiB"):
        evidence = outsize.explain(
            MemoryError("Unable to allocate 1.00 GiB for an array with shape (134217728,)")
        ).evidence
    (now,) = (item.text for item in evidence if item.kind == "machine" and item.text.startswith("now:"))
    assert now.count("iB") == 3


def test_the_address_space_limit_is_told_from_the_machines_size():
    with FakeMachine(total="16GiB", address_space="4GiB"):
        diagnosis = outsize.explain(
            MemoryError("Unable to allocate 8.00 GiB for an array with shape (1073741824,) and data type float64")
        )
    assert diagnosis.cause.name == "address space"
    assert "ulimit -v unlimited" in hows(diagnosis)


def test_a_smaller_dtype_that_would_not_fit_either_is_not_offered():
    with FakeMachine(total="16GiB", available="2GiB"):
        diagnosis = outsize.explain(
            MemoryError("Unable to allocate 80.0 GiB for an array with shape (10737418240,) and data type float64")
        )
    assert not any("float32 instead" in name for name in names(diagnosis))


def test_the_cause_of_an_exception_is_found_behind_another():
    try:
        try:
            raise MemoryError("Unable to allocate 9.00 TiB for an array with shape (3, 3) and data type float32")
        except MemoryError as error:
            raise RuntimeError("training failed") from error
    except RuntimeError as error:
        assert outsize.explain(error).failure.framework == "numpy"


def test_an_exception_of_another_kind_has_no_failure():
    assert outsize.explain(ValueError("operands could not be broadcast together")).failure is None


def test_something_that_cannot_be_explained_is_an_input_error():
    with pytest.raises(outsize.InputError, match="cannot explain a int"):
        outsize.explain(3)


def test_text_and_json_show_the_same():
    for _, text, _ in MESSAGES:
        diagnosis = outsize.explain(text)
        plain = json.loads(report.to_json(diagnosis))
        assert plain["cause"]["name"] == diagnosis.cause.name
        assert str(diagnosis).startswith("cause: ")
        assert len(plain["remedies"]) == len(diagnosis.remedies)


def test_the_budget_of_a_streaming_remedy_can_be_read_back():
    for remedy in outsize.explain(
        "Unable to allocate 5.87 GiB for an array with shape (3075200, 512) and data type float32"
    ).remedies:
        if "budget=" in remedy.how and "save" in remedy.how:
            assert parse_bytes(remedy.how.partition('budget="')[2].partition('"')[0]) <= GiB * 2


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("OSError: Can't read data (memory allocation failed for raw data chunk)", "h5repack"),
        (
            "Out of Memory Error: failed to allocate data of size 16.0 MiB (7.4 GiB/7.4 GiB used)",
            "SET memory_limit = '11367MiB'",
        ),
        ("Requested 90000x90000 (60.3GB) array exceeds maximum array size preference (16.0GB)", "Maximum array size"),
        (
            '"State": {"OOMKilled": true, "ExitCode": 137}, "HostConfig": {"Memory": 1073741824}',
            "docker run --memory=1536m",
        ),
        ("Allowed memory size of 134217728 bytes exhausted (tried to allocate 20480 bytes)", "memory_limit = 192M"),
        ("Cuda failure 'out of memory'", "set_per_process_memory_fraction"),
    ],
)
def test_a_programs_own_limit_is_raised_where_that_program_sets_it(text, how):
    assert how in hows(outsize.explain(text))
