"""Makes the helpers beside this file importable, and keeps every test's scratch away from the user's."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_scratch(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OUTSIZE_SCRATCH", str(tmp_path_factory.getbasetemp() / "scratch"))
