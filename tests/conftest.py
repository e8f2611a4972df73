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


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Steps and failures collect garbage again and again: what was there before the module is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def base_of_torch_alone(monkeypatch):
    """What a process holds before a step is measured once, without the libraries that earlier tests happened to load."""
    host_memory = sys.modules.get("outsize.model.estimation.host_memory")
    if host_memory and not effort.long():
        measure = host_memory._measure_base
        monkeypatch.setattr(host_memory, "_measure_base", lambda names: measure(()))


@pytest.fixture(autouse=True)
def own_scratch_and_budget(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OUTSIZE_SCRATCH", str(tmp_path_factory.getbasetemp() / f"scratch-{next(NUMBERS)}"))
    with outsize.budget():  # what a test sets for good ends with it
        yield
