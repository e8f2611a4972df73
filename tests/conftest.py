"""Makes the helpers beside this file importable, and keeps every test's scratch and budget to itself."""

import gc
import itertools
import os
import pathlib
import signal
import sys

import pytest

import outsize

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import effort  # chooses the normal profile; --hypothesis-profile=long comes after it

pytest_plugins = ["durations"]

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell without job control starts background jobs with SIGINT ignored, and their children inherit that."""

for name in ("COLUMNS", "LINES"):
    os.unsetenv(name)  # readline, which pytest imports, sets them for children behind Python's back

NUMBERS = itertools.count()

gc.disable()
"""What is imported stays: while the tests are collected, the collector would look through it again and again."""


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Steps and failures collect garbage again and again: what was there before the module is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def base_of_torch_alone(monkeypatch, tmp_path_factory):
    """What a process holds before a step is measured once, for all processes of a run, without the libraries that earlier tests
    happened to load."""
    host_memory = sys.modules.get("outsize.model.estimation.host_memory")
    if host_memory and not effort.long():
        measure, own = host_memory._measure_base, tmp_path_factory.getbasetemp()
        found = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "base-of-torch"

        def measure_once(names):
            if not found.exists():
                mine = found.with_name(f"{found.name}-{os.getpid()}")
                mine.write_text(str(measure(())))
                mine.rename(found)
            return int(found.read_text())

        monkeypatch.setattr(host_memory, "_measure_base", measure_once)


@pytest.fixture(autouse=True)
def own_scratch_and_budget(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OUTSIZE_SCRATCH", str(tmp_path_factory.getbasetemp() / f"scratch-{next(NUMBERS)}"))
    with outsize.budget():  # what a test sets for good ends with it
        yield
