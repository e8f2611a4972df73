"""The stager that carries plain memory: pieces are filled and sent in turn, failures are told, and nobody stays behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples
from fakes import TINY, Carded, Runtime
from hypothesis import HealthCheck, given

import outsize
from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.base import Copier
from outsize.array.device.fake import FakeDevice
from outsize.array.device.transfer import staging
from outsize.array.device.transfer.staging import Stager, Staging, fill, pieces

torch_kernels = pytest.importorskip("outsize.array.device.torch_kernels", exc_type=ImportError)

QUICK = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def tiny_pieces(tune: Callable[..., None]) -> None:
    tune(**TINY)


@QUICK
@given(st.integers(0, 5000), st.integers(1, 700), st.sampled_from(["u1", "f4", ">f8"]), st.booleans())
def test_pieces_cover_a_block_once(count: int, limit: int, dtype: str, strided: bool) -> None:
    limit = max(np.dtype(dtype).itemsize, limit)
    whole = np.random.default_rng(count).integers(0, 200, 2 * count).astype(dtype)
    block = whole[::2] if strided else whole[:count]
    ring, got = np.zeros(limit, np.uint8), {}
    for before, size, source in pieces(block, limit):
        assert (before not in got and 0 < size <= limit) or count == 0
        fill(ring.ctypes.data, size, source)
        got[before] = ring[:size].tobytes()
    native = block.astype(block.dtype.newbyteorder("="))
    assert b"".join(got[before] for before in sorted(got)) == native.tobytes()


@pytest.mark.parametrize("kind", [FakeDevice, Carded])
def test_a_ring_that_is_filled_too_early_spoils_the_result(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended streams would show it: without the waiting, results differ from the processor's."""
    a = np.arange(20000, dtype=np.int64)
    device = kind(ArrayKernels(np), limit=1 << 18)
    with outsize.budget(device=device.size):
        assert outsize.open(a).sum().compute(device=device) == a.sum()
        made = kind.copier
        monkeypatch.setattr(kind, "copier", lambda self: hasty(made(self)))
        assert outsize.open(a).sum().compute(device=device) != a.sum()


def hasty(copier: Copier) -> Copier:
    """Has always arrived."""
    copier.come = lambda: True  # type: ignore[method-assign]
    return copier


def test_staging_threads_copy_and_workers_do_not(monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]) -> None:
    tune(stage_threads=3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    copying: set[str] = set()
    move = staging.fill

    def watched(*args: Any) -> None:
        copying.add(f"{threading.current_thread().name} {threading.get_ident()}")
        move(*args)

    monkeypatch.setattr(staging, "fill", watched)
    a = np.arange(200000, dtype=np.int64)
    device = FakeDevice(ArrayKernels(np), limit=1 << 18)
    with outsize.budget(device=device.size):
        made = outsize.open(a).sum()
        plan = made.plan("64MiB", device=device)
        assert made.compute("64MiB", device=device) == a.sum()
    assert len(copying) == 3 and all(name.startswith("outsize-staging") for name in copying)
    assert any("4 slots" in note and "3 staging threads" in note for note in plan.steps[-1].notes)
    assert {part.name: part.bytes for part in plan.steps[-1].parts}["what workers share"] == 4096  # 3 x 2 x 512
    assert not any(thread.name.startswith("outsize-staging") for thread in threading.enumerate())


@pytest.mark.parametrize("kind", [FakeDevice, Carded])
def test_a_staging_thread_that_fails_is_told_and_all_of_them_end(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, move = [0], staging.fill

    def failing(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 40:
            raise RuntimeError("the memory is gone")
        move(*args)

    monkeypatch.setattr(staging, "fill", failing)
    a = np.arange(200000, dtype=np.int64)
    device = kind(ArrayKernels(np), limit=1 << 18)
    with outsize.budget(device=device.size), pytest.raises(RuntimeError, match="the memory is gone"):
        outsize.open(a).sum().compute("64MiB", device=device)
    assert not any(thread.name.startswith("outsize-staging") for thread in threading.enumerate())
    monkeypatch.setattr(staging, "fill", move)
    with outsize.budget(device=device.size):
        assert outsize.open(a).sum().compute("64MiB", device=device) == a.sum()


def test_a_hand_that_fails_puts_its_piece_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device, a = FakeDevice(ArrayKernels(np), limit=1 << 18), np.arange(4096, dtype=np.int64)
    device.open(a.nbytes)
    stager, move = Stager(device, Staging(2, 512)), staging.fill
    stager.start()

    def failing(*args: Any) -> None:
        raise RuntimeError("the memory is gone")

    monkeypatch.setattr(staging, "fill", failing)
    for _ in range(9):  # more often than there are pieces
        with pytest.raises(RuntimeError, match="the memory is gone"):
            stager.carry([(a, 0)])
    monkeypatch.setattr(staging, "fill", move)
    stager.carry([(a, 0)])
    device.record("in").wait()
    stager.close()
    np.testing.assert_array_equal(device.view(0, a.shape, a.dtype), a)


def test_a_hand_fills_the_piece_that_was_sent_longest_ago_whoever_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one hand is held up, the other uses all the pieces that are left, in turn."""
    device, a, move = FakeDevice(ArrayKernels(np), limit=1 << 18), np.arange(4096, dtype=np.int64), staging.fill
    device.open(a.nbytes)
    filled: list[int] = []
    held, rest = threading.Event(), threading.Event()

    def watched(address: int, length: int, source: Any) -> None:
        if source == a.ctypes.data:  # the first hand's first
            held.set()
            rest.wait(30)
        elif not rest.is_set():
            held.wait(30)
            filled.append(address)
        if len(filled) == 32:
            rest.set()
        move(address, length, source)

    monkeypatch.setattr(staging, "fill", watched)
    stager = Stager(device, Staging(2, 512))
    stager.start()
    stager.carry([(a, 0)])
    device.record("in").wait()
    stager.close()
    assert len(set(filled)) == 3 and filled == [*filled[:3] * 10, *filled[:2]]
    np.testing.assert_array_equal(device.view(0, a.shape, a.dtype), a)


def test_the_pieces_of_a_stager_that_is_forgotten_at_work_last_as_long_as_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, a, move = FakeDevice(ArrayKernels(np), limit=1 << 18), np.arange(4096, dtype=np.int64), staging.fill
    device.open(a.nbytes)
    begun, forgotten = threading.Event(), threading.Event()

    def late(*args: Any) -> None:
        begun.set()
        forgotten.wait(30)
        move(*args)

    monkeypatch.setattr(staging, "fill", late)
    stager = Stager(device, Staging(3, 4096))
    stager.start()
    memory, threads = weakref.ref(stager._queues.memory), list(stager._threads._threads)
    load = staging._Load([(a, 0)], 8)
    for before, length, source in pieces(a, 4096):
        stager._queues.jobs.put((load, before, length, source))
    begun.wait(30)
    del stager
    gc.collect()
    assert memory() is not None and any(thread.is_alive() for thread in threads)
    forgotten.set()
    for thread in threads:
        thread.join(30)
    gc.collect()
    assert memory() is None and not any(thread.is_alive() for thread in threads)


def test_a_stager_whose_threads_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, started, start = FakeDevice(ArrayKernels(np), limit=1 << 18), [0], threading.Thread.start

    def few(self: threading.Thread) -> None:
        started[0] += 1
        if started[0] > 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", few)
    stager, before = Stager(device, Staging(4, 4096)), sys.getswitchinterval()
    with pytest.raises(RuntimeError, match="can't start"):
        stager.start()
    stager.close()
    assert sys.getswitchinterval() == before
    assert not any(thread.name.startswith("outsize-staging") for thread in threading.enumerate())


def test_the_interpreter_is_given_on_quickly_while_a_stager_is_at_work_and_as_before_afterwards() -> None:
    device, before = FakeDevice(ArrayKernels(np), limit=1 << 18), sys.getswitchinterval()
    first, second = Stager(device, Staging(1, 4096)), Stager(device, Staging(1, 4096))
    first.start()
    second.start()
    assert sys.getswitchinterval() < before
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


def test_events_are_made_once_a_piece_and_ended(monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]) -> None:
    tune(stage_threads=3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    a = np.arange(200000, dtype=np.int64)
    device = Carded(ArrayKernels(np), limit=1 << 18)
    with outsize.budget(device=device.size):
        outsize.open(a).sum().compute("64MiB", device=device)
    gc.collect()
    assert device.runtime.made == device.runtime.ended == 3 * 2


@pytest.mark.parametrize("early", [False, True])
def test_waiting_leaves_no_error_for_the_next_who_asks_the_runtime(early: bool) -> None:
    """An event that comes between two questions: "not ready" was the answer to the first, and torch would take it for its own."""
    from outsize.array.device.cuda import _QuickMoment

    device = FakeDevice(ArrayKernels(np), limit=1 << 18)
    device.open(1 << 12)
    runtime = Runtime(device)
    runtime.early = early
    moment = _QuickMoment(runtime)
    moment.record(0)
    moment.wait()
    assert runtime.last == 0


@pytest.mark.parametrize("when", ["at work", "at the end"])
def test_ctrl_c_leaves_no_hand_and_the_interpreter_as_it_was(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, before, join = FakeDevice(ArrayKernels(np), limit=1 << 18), sys.getswitchinterval(), threading.Thread.join
    a, calls, others = np.arange(200000, dtype=np.int64), [0], set(threading.enumerate())

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        calls[0] += self.name == "outsize-staging" or when == "at work"
        if calls[0] == 1:
            calls[0] += 1
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with outsize.budget(device=device.size), pytest.raises(KeyboardInterrupt):
        outsize.open(a).sum().compute("64MiB", device=device)
    assert not any(thread.name.startswith("outsize") for thread in set(threading.enumerate()) - others)
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("name", ["outsize-staging", "outsize"])
def test_ctrl_c_while_a_thread_is_being_started_is_told_as_such(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread has a number already and cannot be waited for yet."""
    others = set(threading.enumerate())  # a fitted model of another test may keep its own
    device, before, start = FakeDevice(ArrayKernels(np), limit=1 << 18), sys.getswitchinterval(), threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name == name:
            self._ident = 1  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with outsize.budget(device=device.size), pytest.raises(KeyboardInterrupt):
        outsize.open(np.arange(200000)).sum().compute("64MiB", device=device)
    monkeypatch.undo()
    assert not any(thread.name.startswith("outsize") for thread in set(threading.enumerate()) - others)
    assert sys.getswitchinterval() == before


def test_a_stager_that_nobody_closed_goes_as_it_is_forgotten() -> None:
    device, before = FakeDevice(ArrayKernels(np), limit=1 << 18), sys.getswitchinterval()
    stager = Stager(device, Staging(3, 4096))
    stager.start()
    threads = list(stager._threads._threads)
    del stager
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads) and sys.getswitchinterval() == before


class Refusing(Copier):
    """Fails once, at its n-th call of one kind."""

    def __init__(self, device: Any, what: str, at: int) -> None:
        super().__init__(device)
        self.what, self.left = what, at

    def _count(self, what: str) -> None:
        self.left -= what == self.what
        if self.left == 0 and what == self.what:
            raise RuntimeError("the card has fallen off")

    def send(self, address: int, size: int, offset: int) -> None:
        self._count("send")
        super().send(address, size, offset)

    def come(self) -> bool:
        self._count("come")
        return super().come()


@pytest.mark.parametrize("what", ["send", "come"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_device_that_refuses_a_piece_is_told_and_nobody_waits_for_ever(
    what: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, a = FakeDevice(ArrayKernels(np), limit=1 << 18), np.arange(8192, dtype=np.int64)
    monkeypatch.setattr(device, "copier", lambda: Refusing(device, what, at))
    device.open(a.nbytes)
    stager = Stager(device, Staging(2, 512))
    stager.start()
    with pytest.raises(RuntimeError, match="fallen off"):
        stager.carry([(a, 0)])
    stager.close()
    assert not any(thread.name.startswith("outsize-staging") for thread in threading.enumerate())


@QUICK
@given(
    st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(0, 999)
)
def test_loads_of_several_workers_arrive_whole(filling: int, spare: int, counts: list[int], seed: int) -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 20, seed=seed)
    device.open(sum(8 * count for count in counts) + 8)
    arrays = [np.random.default_rng(seed + n).integers(0, 1 << 60, count) for n, count in enumerate(counts)]
    places = np.cumsum([0, *(array.nbytes for array in arrays)]).tolist()
    carriers = Stager(device, Staging(filling, 512, spare))
    carriers.start()
    workers = [
        threading.Thread(target=carriers.carry, args=([(array, place)],))
        for array, place in zip(arrays, places, strict=False)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    device.record("in").wait()
    carriers.close()
    for array, place in zip(arrays, places, strict=False):
        np.testing.assert_array_equal(device.view(place, array.shape, array.dtype), array)
