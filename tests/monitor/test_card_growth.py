"""What torch's allocator reserves and no tensor asks for: pools of CUDA graphs are a leak, fragments are none."""

import sys
import types

import pytest

from outsize.core.outcomes.recording import AllocatorSample, Finding, HostSample, Note, Sample
from outsize.monitor.card_growth import CardGrowth, read_pools

MiB = 2**20


def follow(pools, reserved, requested, steps=True, count=200):
    growth = CardGrowth(lambda index: pools)
    said = []
    for number in range(count):
        card = AllocatorSample(
            pid=1, framework="torch", device="cuda:0", requested=requested(number), reserved=reserved(number)
        )
        host = HostSample(rss=0, anonymous=0, shared=0)
        sample = Sample(time=number / 10, host=host, allocators=(card,), step=number if steps else None)
        said += list(growth.add(sample))
    return said


def test_pools_of_graphs_that_grow_are_a_leak():
    pools = {(0, 0): 500 * MiB, **{(0, number): 4 * MiB for number in range(1, 200)}}
    found = follow(pools, lambda number: (500 + 4 * number) * MiB, lambda number: 300 * MiB)
    assert found and all(isinstance(one, Finding) for one in found)
    assert (found[0].kind, found[0].device, found[0].count) == ("CUDA graphs", "cuda:0", 199)
    assert "199 pools of CUDA graphs hold 796.00 MiB of cuda:0" in found[0].text
    assert "capture each shape once" in found[0].advice
    assert found[0].per_step == pytest.approx(4 * MiB, rel=0.05) and "more each step" in found[0].text


def test_without_steps_the_rate_is_by_time():
    pools = {(0, number): 4 * MiB for number in range(1, 200)}
    found = follow(pools, lambda number: 4 * number * MiB, lambda number: MiB, steps=False)
    assert found[0].per_step is None and found[0].per_second == pytest.approx(40 * MiB, rel=0.05)


def test_reserved_memory_that_grows_while_tensors_ask_for_no_more_is_called_fragmentation_and_no_leak():
    said = follow({(0, 0): 2000 * MiB}, lambda number: (500 + 4 * number) * MiB, lambda number: 300 * MiB)
    assert said and all(isinstance(one, Note) for one in said)
    assert said[0].text.startswith("fragmentation on cuda:0: the allocator has reserved") and "no leak" in said[0].text
    assert len(said) <= 3  # said again only when twice as much has grown


def test_tensors_that_grow_are_left_to_the_search_for_leaks():
    assert follow({}, lambda number: (500 + 4 * number) * MiB, lambda number: (300 + 4 * number) * MiB) == []


@pytest.mark.parametrize("reserved", [lambda number: 500 * MiB, lambda number: (500 + 20 * min(number, 30)) * MiB])
def test_a_cache_that_has_filled_up_says_nothing(reserved):
    assert follow({}, reserved, lambda number: 300 * MiB) == []


def test_pools_are_read_from_torchs_segments(monkeypatch):
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 20},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 2},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 3},
        {"device": 1, "segment_pool_id": (0, 2), "total_size": 9},
        {"device": 0, "total_size": 1},  # an older torch names no pool
    ]
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(memory_snapshot=lambda: segments))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert read_pools(0) == {(0, 0): 21, (0, 1): 5}
