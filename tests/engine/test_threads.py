"""Threads are waited for whatever the interpreter says of them after Ctrl-C."""

import threading

import pytest

from outsize.engine.threads import Threads


def test_a_thread_that_runs_is_waited_for_although_join_takes_it_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does after Ctrl-C met an earlier join, in Python before 3.13."""
    go, ended = threading.Event(), []

    def life() -> None:
        go.wait()
        ended.append(True)

    threads = Threads("test", [life, life])
    threads.start()
    threading.Timer(0.2, go.set).start()
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: None)
    threads.wait()
    assert ended == [True, True]
