"""The engine by itself: the pool refuses what is over its budget, tiles are folded in order, an error of one worker stops all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outsize.array.graph.frame import Frame
from outsize.core.errors import BudgetError, OutOfMemory
from outsize.engine.pool import MemoryPool, make_buffer, round_to_pages
from outsize.engine.threads import Sizes, Work, run_work


def test_a_pool_refuses_what_it_has_no_room_for_until_some_is_given_back() -> None:
    pool = MemoryPool(100)
    pool.take(80)
    with pytest.raises(BudgetError, match="of which 80 B are taken"):
        pool.take(60)
    pool.give(80)
    assert pool.take(60).nbytes == 60 and pool.peak == 80


def test_a_chunk_that_needs_more_than_its_plan_foresaw_is_an_error() -> None:
    frame = Frame(make_buffer(8192), {})
    frame.bytes(4096)
    with pytest.raises(OutOfMemory, match=r"its plan foresaw 8\.00 KiB"):
        frame.bytes(8192)


def test_a_request_larger_than_the_budget_is_refused_at_once() -> None:
    with pytest.raises(BudgetError):
        MemoryPool(100).take(101)


@pytest.mark.parametrize("size", [1, 4096, 5000, (2 << 20) + 1])
def test_buffers_begin_on_a_page(size: int) -> None:
    buffer = make_buffer(size)
    assert buffer.nbytes == size and buffer.ctypes.data % 4096 == 0
    assert round_to_pages(size) >= size


class Count(Work):
    """Work that records what happens; tiles are numbers, each with `tile + 1` chunks."""

    ordered = True

    def __init__(self, ahead: int = 0, fail_at: int | None = None) -> None:
        self.sizes = Sizes(workers=4, slots=2, worker_bytes=4096, slot_bytes=4096, outside_bytes=0, ahead=ahead)
        self.fail_at = fail_at
        self.folded: dict[int, list[int]] = {}
        self.closed: list[int] = []
        self.told: list[int] = []
        self.in_flight = self.most = 0
        self.written: dict[int, list[int]] = {}

    def chunks(self, job: Any, tile: int) -> Iterator[int]:
        return iter(range(tile + 1))

    def context(self, job: Any, buffer: Any) -> Any:
        return None

    def open(self, job: Any, tile: int, slot: Any) -> list[int]:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return self.folded.setdefault(tile, [])

    def load(self, job: Any, tile: int, chunk: int, state: list[int], context: Any) -> int:
        time.sleep(0.001 * ((chunk * 7 + tile) % 3))
        if self.fail_at == tile:
            raise RuntimeError("broken tile")
        return chunk

    def fold(self, job: Any, tile: int, chunk: int, state: list[int], payload: int) -> None:
        state.append(payload)

    def pieces(self, job: Any, tile: int, state: list[int]) -> Iterator[int]:
        assert state == list(range(tile + 1))
        return iter(range(tile % 4))

    def write(self, job: Any, tile: int, state: list[int], piece: int) -> None:
        time.sleep(0.001 * (piece % 2))
        self.written.setdefault(tile, []).append(piece)

    def close(self, job: Any, tile: int, state: list[int]) -> None:
        assert sorted(self.written.get(tile, [])) == list(range(tile % 4))
        self.closed.append(tile)
        self.in_flight -= 1


def run(work: Count, tiles: int, pool: MemoryPool) -> None:
    run_work(work, work.sizes, None, enumerate(range(tiles)), pool, work.told.append)


@pytest.mark.parametrize("ahead", [0, 3])
def test_chunks_are_folded_in_order_pieces_are_written_before_a_tile_closes_and_tiles_in_flight_keep_to_the_slots(
    ahead: int,
) -> None:
    work = Count(ahead)
    run(work, 20, MemoryPool(1 << 20))
    assert work.folded == {tile: list(range(tile + 1)) for tile in range(20)}
    assert sorted(work.closed) == sorted(work.told) == list(range(20)) and work.most <= 2


@pytest.mark.parametrize("ahead", [0, 3])
def test_the_error_of_one_worker_is_raised_after_all_have_stopped(ahead: int) -> None:
    work = Count(ahead, fail_at=5)
    pool = MemoryPool(1 << 20)
    with pytest.raises(RuntimeError, match="broken tile"):
        run(work, 20, pool)
    assert not [thread for thread in threading.enumerate() if thread.name == "outsize"]
    assert pool.take(1 << 20).nbytes == 1 << 20


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_workers_have_ended_where_another_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    start, begun = threading.Thread.start, []

    def failing(thread: threading.Thread) -> None:
        if begun:
            time.sleep(0.05)  # the first is at work by now
            raise error("can't start new thread")
        begun.append(thread)
        start(thread)

    class Slow(Count):
        def load(self, *args: Any) -> Any:
            time.sleep(0.3)
            return super().load(*args)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(error):
        run(Slow(), 8, MemoryPool(1 << 20))
    assert not begun[0].is_alive()
