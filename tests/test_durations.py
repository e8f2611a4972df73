"""The order of the tests: files with a long test come first, and what was noted of them is what is read."""

from types import SimpleNamespace

import durations


def test_files_are_ordered_by_the_longest_test_that_was_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(durations, "STORED", tmp_path / "durations.json")
    watch = durations.Stopwatch()
    for test, seconds in (("a.py::x", 0.1), ("b.py::x", 2.0), ("b.py::y", 1.0), ("c.py::x", 1.0), ("c.py::y", 3.0)):
        watch.pytest_runtest_logreport(SimpleNamespace(nodeid=f"tests/{test}", duration=seconds))
    watch.pytest_sessionfinish()
    tests = ["a.py::x", "b.py::y", "b.py::x", "new.py::x", "c.py::x", "c.py::y"]
    items = [SimpleNamespace(nodeid=f"tests/{test}") for test in tests]
    for workers, order in (
        ({}, ["c.py::x", "c.py::y", "b.py::y", "b.py::x", "a.py::x", "new.py::x"]),
        ({"workerinput": {"workercount": 2}}, ["c.py::x", "c.py::y", "a.py::x", "b.py::y", "b.py::x", "new.py::x"]),
    ):
        durations.pytest_collection_modifyitems(SimpleNamespace(**workers), items)
        assert [item.nodeid.removeprefix("tests/") for item in items] == order
