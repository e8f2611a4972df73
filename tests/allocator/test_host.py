"""Host memory: torch's pinned blocks, and glibc's malloc against the real one of this machine."""

import json
import os
import subprocess
import sys

import pytest

from outsize.allocator import CudaSettings, GlibcSettings, replay, take
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent
from outsize.core.noun import Known
from outsize.core.units import GiB, KiB, MiB


def run(allocator, *steps, **options):
    """Steps are (id, bytes) to allocate, a bare id to free, or `empty`."""
    events = []
    for step in steps:
        if step == "empty":
            events.append(AllocationEvent(0, False, EMPTY_CACHE, 0))
        elif isinstance(step, tuple):
            events.append(AllocationEvent(0, True, step[0], int(step[1])))
        else:
            events.append(AllocationEvent(0, False, step, 0))
    return replay(events, allocator, samples=True, **options)


def reserved(result):
    return [sample.reserved for sample in result.samples]


@pytest.mark.parametrize(
    ("asked", "got"), [(1, 1), (3, 4), (5 * GiB, 8 * GiB), (int(20.4 * GiB), 32 * GiB), (4096, 4096)]
)
def test_a_pinned_block_is_the_next_power_of_two(asked, got):
    assert take(asked, "pinned").reserved == got


def test_pinned_blocks_are_kept_and_reused_only_for_their_own_size():
    assert reserved(run("pinned", (0, 1000), 0, (1, 600), (2, 300), "empty", 1, "empty")) == [
        1024, 1024, 1024, 1536, 1536, 1536, 512,
    ]  # fmt: skip


def test_pinned_thresholds_stop_rounding_and_keeping():
    exact = CudaSettings(pinned_max_round_threshold=MiB, pinned_max_cached_size=MiB)
    assert reserved(run("pinned", (0, 3 * MiB), (1, 600 * KiB), 0, 1, settings=exact)) == [3 * MiB, 4 * MiB, MiB, MiB]


def test_a_pinned_segment_set_aside_serves_requests_while_it_lasts():
    aside = CudaSettings(pinned_reserve_segment_size=16 * KiB)
    assert reserved(run("pinned", (0, 5000), (1, 5000), (2, 5000), settings=aside)) == [16 * KiB, 16 * KiB, 24 * KiB]


def test_an_array_from_128_kib_is_mapped_in_whole_pages_and_goes_back_at_once():
    assert reserved(run("glibc", (0, MiB), 0)) == [MiB + 4096, 0]


def test_after_a_mapped_array_was_freed_those_up_to_its_size_stay_on_the_heap():
    result = run("glibc", (0, 8 * MiB), 0, (1, 4 * MiB), 1)
    assert [segment.pool for segment in result.segments] == ["heap"]
    assert result.samples[-1].reserved > 4 * MiB


def test_the_threshold_never_rises_above_32_mib_and_not_at_all_where_it_is_set():
    assert reserved(run("glibc", (0, 100 * MiB), 0, (1, 40 * MiB), 1))[-1] == 0
    fixed = GlibcSettings(mmap_threshold=64 * KiB)
    assert reserved(run("glibc", (0, 8 * MiB), 0, (1, 4 * MiB), 1, settings=fixed))[-1] == 0


def test_the_heap_is_returned_only_from_its_top():
    fixed = GlibcSettings(mmap_threshold=GiB)
    pinned_down = run("glibc", (0, 50 * MiB), (1, 1000), 0, settings=fixed)
    assert pinned_down.samples[-1].reserved > 50 * MiB
    from_the_top = run("glibc", (1, 1000), (0, 50 * MiB), 0, settings=fixed)
    assert from_the_top.samples[-1].reserved < MiB


def test_what_the_host_takes_is_a_bound_and_never_below_the_request():
    for asked in (1, 1000, 200_000, 1_070_596_096):
        one = take(asked, "host")
        assert one.known is Known.BOUND
        assert one.reserved >= one.allocated >= asked


REAL = """
import ctypes, json, random, sys
libc = ctypes.CDLL("libc.so.6")
class Info(ctypes.Structure):
    _fields_ = [(f"_{i}" if i not in (0, 4) else ("arena" if i == 0 else "mapped"), ctypes.c_size_t) for i in range(10)]
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
pick, steps, live, number = random.Random(int(sys.argv[1])), [], [], 0
for _ in range(300):
    if not live or pick.random() < 0.55:
        steps.append((number, int(2 ** pick.uniform(18, 26)))); live.append(number); number += 1
    else:
        steps.append((live.pop(pick.randrange(len(live))), 0))
at, out, before = {}, [0] * (2 * len(steps)), libc.mallinfo2()
for i, (id, size) in enumerate(steps):
    if size: at[id] = libc.malloc(size)
    else: libc.free(at.pop(id))
    now = libc.mallinfo2()
    out[2 * i], out[2 * i + 1] = now.mapped - before.mapped, now.arena - before.arena
json.dump([steps, out], sys.stdout)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is what Linux uses")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_model_follows_the_real_malloc_of_this_machine(seed):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", REAL, str(seed)], capture_output=True, text=True, env=plain)
    if "mallinfo2" in done.stderr:
        pytest.skip("this C library has no mallinfo2, so it is not a glibc that says what it holds")
    steps, real = json.loads(done.stdout)
    events = [AllocationEvent(i, size > 0, id, size) for i, (id, size) in enumerate(steps)]
    result = replay(events, "glibc", samples=True)
    totals = [real[2 * i] + real[2 * i + 1] for i in range(len(steps))]
    # An estimate: the interpreter's own heap lies below ours and takes part, and the model knows no per-thread caches.
    assert abs(result.peak.reserved - max(totals)) <= 0.1 * max(totals)


def test_a_stray_small_object_keeps_free_chunks_of_glibc_apart() -> None:
    sizes = [100_000] * 8
    events = [AllocationEvent(i, True, i, size) for i, size in enumerate(sizes)]
    events += [AllocationEvent(8 + i, False, i, size) for i, size in enumerate(sizes[:-1])]
    events += [AllocationEvent(16, True, 16, 120_000)]
    apart = replay(events, allocator="glibc", settings=GlibcSettings(strays=1)).peak.reserved
    joined = replay(events, allocator="glibc", settings=GlibcSettings()).peak.reserved
    assert apart > joined
