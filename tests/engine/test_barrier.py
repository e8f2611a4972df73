"""Tasks on a cluster with a clock of its own: every task is done once, whatever is lost, slow or passing on the way."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from outsize.core.errors import ClusterError, StoreError
from outsize.engine.barrier import Faults, Patience, is_passing, run_tasks
from outsize.engine.executor import Outcome, Task
from outsize.engine.simulated_engine import Machines, SimulatedEngine


def tasks(number: int, moved: int = 100) -> list[Task]:
    return [Task(key=f"t{place}", function=max, arguments=(), bytes=1, moved=moved) for place in range(number)]


def run(engine: SimulatedEngine, number: int, patience: Patience | None = None) -> tuple[list[str], Faults]:
    done: list[str] = []
    faults = Faults()
    run_tasks(engine, tasks(number), lambda task, _: done.append(task.key), faults, patience or Patience())
    return done, faults


@examples(40)
@given(
    st.integers(1, 9), st.integers(1, 60), st.sampled_from([0.0, 40.0, 400.0]), st.sampled_from([0.0, 0.3]), st.integers(0, 9)
)  # fmt: skip
def test_every_task_is_done_once(workers: int, number: int, failures: float, slow: float, seed: int) -> None:
    machines = Machines(workers=workers, link=50, storage=200, failures=failures, slow=slow, restart=3, seed=seed)
    done, _ = run(SimulatedEngine(machines), number, Patience(losses=10_000))
    assert sorted(done) == sorted(task.key for task in tasks(number))


def test_time_is_bytes_over_links_and_storage() -> None:
    engine = SimulatedEngine(Machines(workers=4, link=50, begin=0, dispatch=0))
    run(engine, 8)
    assert engine.now() == pytest.approx(8 * 100 / (4 * 50))
    engine = SimulatedEngine(Machines(workers=4, link=50, storage=100, begin=0, dispatch=0))
    run(engine, 8)
    assert engine.now() == pytest.approx(8 * 100 / 100) and engine.full == pytest.approx(8)


def test_a_slow_task_is_taken_over() -> None:
    machines = Machines(workers=4, link=50, slow=0.03, slowness=1000, seed=3)
    engine = SimulatedEngine(machines)
    _, faults = run(engine, 40)
    assert faults.taken_over > 0 and engine.now() < 100, "one slow task alone takes 2000 s"
    assert "taken over" in faults.told()


def test_a_task_that_kills_its_workers_is_named() -> None:
    class Deadly(SimulatedEngine):
        def wait(self, seconds: float) -> list[Outcome]:
            found = super().wait(seconds)
            return [Outcome(key=one.key, worker=one.worker, lost=True) if one.key == "t3" else one for one in found]

        def workers(self) -> list[str]:
            return [*super().workers()]

    with pytest.raises(ClusterError, match=r"8 workers of a simulated cluster died with t3"):
        run(Deadly(Machines(workers=2, link=50)), 6)


def test_no_worker_at_all_is_waited_for_and_then_told() -> None:
    with pytest.raises(ClusterError, match="no worker has been left at a simulated cluster for 60 s"):
        run(SimulatedEngine(Machines(workers=1, link=1, failures=1e6, restart=1e9)), 3)


class Failing(SimulatedEngine):
    """Tasks fail so many times first."""

    def __init__(self, error: BaseException, times: int) -> None:
        super().__init__(Machines(workers=2, link=50))
        self.error, self.left = error, times

    def wait(self, seconds: float) -> list[Outcome]:
        found = super().wait(seconds)
        if found and self.left:
            self.left -= 1
            return [Outcome(key=found[0].key, worker=found[0].worker, error=self.error)]
        return found


def test_a_passing_error_is_tried_again_and_named() -> None:
    done, faults = run(Failing(StoreError("s3://b/x cannot be read: ReadTimeoutError: timed out"), 3), 5)
    assert len(done) == 5 and "tried again 3 times: StoreError: s3://b/x cannot be read" in faults.told()
    engine = Failing(TimeoutError("no answer"), 10**9)
    with pytest.raises(TimeoutError):
        run(engine, 5)
    assert engine.now() > 0.25 * (2**6 - 1), "pauses double"


def test_another_error_is_raised_at_once() -> None:
    engine = Failing(ZeroDivisionError("a mistake"), 1)
    with pytest.raises(ZeroDivisionError):
        run(engine, 5)


@pytest.mark.parametrize(("error", "passes"), [
    (OSError(errno.ESTALE, "stale"), True), (OSError(errno.ENOSPC, "full"), False), (ConnectionResetError(), True),
    (StoreError("x.npy is cut off"), False), (ValueError("timed out"), False),
])  # fmt: skip
def test_which_errors_pass(error: BaseException, passes: bool) -> None:
    assert is_passing(error) is passes
    wrapped: Any = StoreError("a store")
    wrapped.__context__ = error
    assert is_passing(wrapped) is passes
