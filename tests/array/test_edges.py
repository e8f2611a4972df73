"""Pages that two runs share: whole ones leave, halves survive a kill, and nothing is written twice or lost."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outsize.array.store.base import ALIGNMENT
from outsize.array.store.io.edges import Edges
from outsize.array.store.io.file import AlignedFile
from outsize.engine.pool import make_buffer


def test_two_halves_make_a_page_in_either_order(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, ALIGNMENT, dtype=np.uint8)
    for cuts in ([(0, 100), (100, ALIGNMENT)], [(100, ALIGNMENT), (0, 100)]):
        edges = Edges(str(tmp_path / "edges"))
        edges.allow(1)
        first, second = [edges.put(ALIGNMENT * 7 + low, data[low:high]) for low, high in cuts]
        assert first == (True, None)
        assert second[0] and second[1] is not None and second[1].whole
        assert np.array_equal(second[1].data, data)
        edges.written(second[1])
        assert not list(edges.rest())


def test_what_does_not_touch_or_finds_no_room_is_the_callers_to_write(tmp_path: Path) -> None:
    edges = Edges(str(tmp_path / "edges"))
    edges.allow(1)
    assert edges.put(0, np.ones(10, np.uint8))[0]
    assert not edges.put(50, np.ones(10, np.uint8))[0]
    assert not edges.put(ALIGNMENT, np.ones(10, np.uint8))[0]


class _Slow(Edges):
    """Edges in which the first to leave its half goes on only when the other half has come."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.halves = [threading.Event(), threading.Event()]
        self.reused = threading.Event()

    def put(self, offset: int, data: Any) -> Any:
        found = super().put(offset, data)
        first = threading.current_thread() is not threading.main_thread()
        self.halves[0 if first else 1].set()
        if first:
            assert self.halves[1].wait(20)
        return found


class _SlowFile(AlignedFile):
    """A file to which other threads write only when a page's memory has been used again."""

    edges: _Slow

    def _write_direct(self, *args: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.edges.reused.wait(20)
        super()._write_direct(*args, **options)


def test_a_page_that_two_threads_complete_is_written_by_one_of_them(tmp_path: Path) -> None:
    data = make_buffer(30 * ALIGNMENT)
    data[:] = np.random.default_rng(0).integers(0, 256, data.nbytes, dtype=np.uint8)
    file = _SlowFile(str(tmp_path / "f"), writable=True, create=True)
    file.allocate(data.nbytes)
    edges = file.edges = _Slow(str(tmp_path / "edges"))
    edges.allow(1)
    middle, last = 5 * ALIGNMENT + 100, 20 * ALIGNMENT - 7
    nothing = np.empty(0, np.uint8)
    other = threading.Thread(target=file.write, args=(0, data[:middle], nothing, edges))
    other.start()
    assert edges.halves[0].wait(20)
    file.write(middle, data[middle : 10 * ALIGNMENT], nothing, edges)
    file.write(10 * ALIGNMENT, data[10 * ALIGNMENT : last], nothing, edges)  # its end waits where the page was
    edges.reused.set()
    other.join()
    file.write(last, data[last:], nothing, edges)
    for offset, rest in edges.rest():
        file.write(offset, rest, nothing)
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_what_waits_at_a_sync_is_there_after_a_kill(tmp_path: Path) -> None:
    edges = Edges(str(tmp_path / "edges"))
    edges.allow(2)
    edges.put(100, np.full(10, 3, np.uint8))
    edges.put(ALIGNMENT * 5, np.full(20, 4, np.uint8))
    with edges.surviving():
        pass
    again = Edges(str(tmp_path / "edges"))
    found = sorted((offset, data.tobytes()) for offset, data in again.rest())
    assert found == [(100, bytes([3] * 10)), (ALIGNMENT * 5, bytes([4] * 20))]


@given(
    cuts=st.lists(st.integers(1, 20 * ALIGNMENT - 1), max_size=12, unique=True),
    room=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_runs_written_in_any_order_with_any_room_make_the_file(
    tmp_path_factory: object, cuts: list[int], room: int, seed: int
) -> None:
    folder: Path = tmp_path_factory.mktemp("edges")  # type: ignore[attr-defined]
    rng = np.random.default_rng(seed)
    data = make_buffer(20 * ALIGNMENT)  # on a page, as direct I/O wants it
    data[:] = rng.integers(0, 256, data.nbytes, dtype=np.uint8)
    file = AlignedFile(str(folder / "f"), writable=True, create=True)
    file.allocate(data.nbytes)
    edges = Edges(str(folder / "edges"))
    edges.allow(room)
    places = [0, *sorted(cuts), data.nbytes]
    runs = list(itertools.pairwise(places))
    rng.shuffle(runs)
    bounce = make_buffer(2 * ALIGNMENT)
    for low, high in runs:
        file.write(int(low), data[low:high], bounce, edges)
    for offset, rest in edges.rest():
        file.write(offset, rest, np.empty(0, np.uint8))
    file.sync()
    assert (folder / "f").read_bytes() == data.tobytes()
