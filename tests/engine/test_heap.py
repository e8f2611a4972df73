"""What is freed goes back to the system while a run holds to its budget."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import os, threading, numpy as np
from outsize.engine import heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def work(ways):
    def take():
        for _ in range(3):
            np.ones(20 << 20, np.uint8)
    before = resident()
    with ways():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return resident() - before

class Usual:
    __enter__ = lambda self: heap._set(heap._USUAL)
    __exit__ = lambda self, *_: None

print(work(heap.lean_heap), work(Usual))
with heap.lean_heap():
    with heap.lean_heap():
        pass
    print(work(lambda: heap.contextlib.nullcontext()))
heap.keep_heap_lean()
with heap.lean_heap():
    pass
print(work(lambda: heap.contextlib.nullcontext()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library is left alone")
def test_blocks_that_a_thread_frees_are_given_back_inside_and_kept_outside() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    lean, usual, nested, for_good = map(int, done.stdout.split())
    assert usual >= 15, "otherwise there was nothing to cure"
    assert max(lean, nested, for_good) <= 4


CHURN = """
import contextlib, resource, threading, numpy as np
from outsize.engine import heap

def faults(keeping):
    def take():
        for _ in range(20):
            np.ones(2 << 20, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with heap.lean_heap(), keeping:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(contextlib.nullcontext()), faults(heap.keeping_blocks(4 << 20)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library is left alone")
def test_blocks_that_a_call_wants_again_and_again_are_fresh_only_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, check=True)
    fresh, kept = map(int, done.stdout.split())
    assert kept < fresh / 4
