"""Failures that are none of memory's: they are said to be another, and get that one's advice."""

import re

import pytest

from outsize.core.failure import CauseName
from outsize.failure.explain import explain
from outsize.failure.otherwise import find_otherwise, read_rows

KINDS = {
    "shared memory of a kernel": "OutOfResources: out of resource: shared memory, Required: 92160, Hardware limit: 65536.",
    "registers of a kernel": "RuntimeError: CUDA error: too many resources requested for launch",
    "an address that is not the program's": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "an index out of range": "RuntimeError: CUDA error: device-side assert triggered",
    "a fault of the hardware": "CUDA error: uncorrectable ECC error encountered",
    "the card or its driver": "CUDA error: no kernel image is available for execution on the device",
    "a library of the card": "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "an exchange between cards": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    "watches on files": "Error: ENOSPC: System limit for number of file watchers reached, watch 'src'",
    "disk space": "OSError: [Errno 28] No space left on device: 'model.safetensors'",
    "open files": "OSError: [Errno 24] Too many open files",
    "threads and processes": "RuntimeError: can't start new thread",
    "a shared file that is gone": (
        "RuntimeError: unable to open shared memory object </torch_12_34> in read-write mode: No such file or directory (2)"
    ),
    "locks of PostgreSQL": "ERROR:  out of shared memory\nHINT:  You might need to increase max_locks_per_transaction.",
    "the stack": "RangeError: Maximum call stack size exceeded",
    "the length of a text": "This model's maximum context length is 8192 tokens, you asked for 9001.",
    "a quota of a service": "ResourceExhausted: 429 Quota exceeded for requests per minute",
    "the size of a message": "RESOURCE_EXHAUSTED: Received message larger than max (6291456 vs. 4194304)",
    "a length of 32 bits": "Cholmod error 'problem too large' at file ../Core/cholmod_dense.c, line 105",
    "a capacity of TeX": "! TeX capacity exceeded, sorry [main memory size=5000000].",
    "a broken file": "PytorchStreamReader failed reading zip archive: failed finding central directory",
    "a crash": "Segmentation fault (core dumped)",
    "an end that was asked for": "command terminated with exit code 143",
    "shared memory of loaders": "RuntimeError: unable to open shared memory object </torch_12_34> in read-write mode",
    "a worker that was asked to end": "RuntimeError: DataLoader worker (pid 88) is killed by signal: Terminated.",
}


def test_every_kind_has_a_message():
    assert [row.what for row in read_rows()] == list(KINDS)


@pytest.mark.parametrize("what", KINDS)
def test_what_is_none_of_memorys_is_said_to_be_another(what):
    diagnosis = explain(f"step 12\n{KINDS[what]}\n")
    assert diagnosis.failure is None and diagnosis.cause.name == CauseName.NOT_MEMORY
    row = next(row for row in read_rows() if row.what == what)
    assert diagnosis.cause.text == row.cause and [way.name for way in diagnosis.remedies] == [row.do]
    assert diagnosis.cause.certain == (not row.decide)
    assert "cause: not a lack of memory" in str(diagnosis)
    for useless in ("batch_size=1", "outsize.fit", "expandable_segments", "empty_cache"):
        assert useless not in row.how


def test_memory_that_ran_out_is_told_first():
    text = "CUDA out of memory. Tried to allocate 2.00 GiB\nOSError: [Errno 24] Too many open files"
    assert explain(text).failure is not None


def test_a_text_without_a_failure_is_nothing():
    assert explain("epoch 3, loss 0.12, 4.1 it/s").cause is None


def test_of_a_long_log_the_end_is_looked_at():
    assert find_otherwise("Too many open files\n" + "step\n" * 50_000) is None
    assert find_otherwise("step\n" * 50_000 + "Too many open files") is not None


def test_the_line_is_shown():
    line = "RuntimeError: CUDA error: device-side assert triggered"
    assert re.search("device-side assert", explain(f"a\n{line}\nb").evidence[0].text) is not None


def test_a_site_of_questions_is_no_stack_that_is_full():
    assert explain("See https://stackoverflow.com/questions/1 or the badge |stackoverflow|").cause is None
    assert (
        explain("The best place to ask is [Stack Overflow](https://stackoverflow.com), or on Stack Overflow").cause
        is None
    )
    assert explain("fatal: stack overflow in main").cause.name == CauseName.NOT_MEMORY
    assert explain("java.lang.StackOverflowError").cause.name == CauseName.NOT_MEMORY
