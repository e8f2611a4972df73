"""The pytest plugin on projects of its own, in processes of their own."""

import os
import pathlib
import re
import subprocess
import sys
import types

from outsize.monitor import peak as peak_module
from outsize.monitor.peak import PeakMeter

ROOT = pathlib.Path(__file__).resolve().parent.parent
MiB = 2**20

PROJECT = """
import subprocess, sys
import numpy as np
import pytest

def double(x):
    y = x + 1
    return y * 2

@pytest.fixture
def large():
    return np.ones(10_000_000)

@pytest.mark.outsize(budget="64MiB")
def test_inside(large):
    assert double(np.ones(1_000_000)).size

@pytest.mark.outsize("64MiB")
def test_over():
    x = np.ones(12_000_000)
    assert double(x).size

@pytest.mark.outsize(budget="64MiB")
def test_what_was_freed_before_still_counts():
    total = (np.ones(6_000_000) + np.ones(6_000_000)).sum()
    assert total

@pytest.mark.outsize(budget="64MiB")
def test_a_child_counts():
    code = "import time; x = bytearray(b'1') * 120_000_000; time.sleep(0.4)"
    subprocess.run([sys.executable, "-c", code], check=True)

@pytest.mark.outsize(budget="1GiB")
def test_wrong():
    assert 1 == 2

@pytest.mark.outsize(budget="16")
def test_mark():
    pass
"""


def run_pytest(folder, *words):
    command = [sys.executable, "-m", "pytest", "-p", "outsize.pytest_plugin", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "src")}
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    return answer.stdout + answer.stderr


def test_a_project_passes_inside_its_budgets_and_fails_with_the_culprit_over_them(tmp_path):
    (tmp_path / "test_project.py").write_text(PROJECT)
    told = run_pytest(tmp_path, "-v", "--strict-markers", "--junitxml=junit.xml")
    results = dict(re.findall(r"::(\w+) (PASSED|FAILED)", told))
    failed = {name for name, result in results.items() if result == "FAILED"}
    assert failed == set(results) - {"test_inside"} and len(results) == 6, told
    peak = float(re.search(r"test_over: held ([\d.]+) MiB of RAM", told).group(1))
    assert 3 * 91.55 - 1 <= peak < 3 * 91.55 + 16  # x, x + 1 and the product, within a mebibyte; a look may add to it
    assert "over its budget of 64.00 MiB" in told and re.search(
        r"at test_project.py:(7|8|20|21) in (double|test_over)", told
    )
    assert "`x` in test_over" in told and "held then by" in told
    assert re.search(r"test_a_child_counts: held 1\d\d\.\d+ MiB", told) and "child process held" in told
    assert "assert 1 == 2" in told and "write 16MiB or 16GiB" in told
    assert "memory of marked tests" in told
    assert 'name="outsize_peak"' in (tmp_path / "junit.xml").read_text()


def test_the_plugin_imports_nothing_and_a_test_without_the_mark_starts_no_thread(tmp_path):
    (tmp_path / "test_light.py").write_text(
        "import sys, threading\n"
        "def test_light():\n"
        "    assert threading.active_count() == 1\n"
        "    rooms = {n for n in sys.modules if n.startswith('outsize.') and n != 'outsize.pytest_plugin'}\n"
        "    assert not {n for n in rooms if not n.startswith('outsize.core')}, rooms\n"
        "    assert not {'numpy', 'rich', 'psutil', 'torch'} & set(sys.modules)\n"
    )
    assert "1 passed" in run_pytest(tmp_path)


def test_the_entry_point_names_the_plugin():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"outsize": "outsize.pytest_plugin"}


def test_where_the_mark_cannot_be_reset_looking_is_said_to_be_all(monkeypatch):
    monkeypatch.setattr(peak_module, "_reset_high_water", lambda: False)
    monkeypatch.setattr(PeakMeter, "_read_children", lambda self: 0)  # those of other tests come and go
    with PeakMeter("block", budget=MiB) as meter:
        block = bytearray(b"1") * (64 * MiB)
        peak_module.threading.Event().wait(0.1)
        del block
    (host,) = meter.peaks()
    assert 40 * MiB < host.bytes < 120 * MiB and not host.fits  # the process of the tests has other work too
    assert "short peaks are missed" in host.how and "test_pytest_plugin.py" in host.line


class Cuda:
    """Counts as torch's allocator does."""

    def __init__(self):
        self.now, self.most = 5 * MiB, 900 * MiB

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def memory_allocated(self, index):
        return self.now

    def max_memory_allocated(self, index):
        return self.most

    def reset_peak_memory_stats(self, index):
        self.most = self.now

    def allocate(self, size):
        self.now += size
        self.most = max(self.most, self.now)


def test_a_cards_peak_is_what_its_allocator_counted_since_the_test_began(monkeypatch):
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with PeakMeter("step", device=50 * MiB, look=lambda thread: ()) as meter:
        cuda.allocate(70 * MiB)
        peak_module.threading.Event().wait(0.15)
        cuda.allocate(-60 * MiB)
    host, card = meter.peaks()
    assert (card.bytes, card.started_with, card.fits, card.known) == (70 * MiB, 5 * MiB, False, "exact")
    assert str(card.pool) == "device 0" and "device 0 at its peak, 20.00 MiB over its budget" in str(card)
    assert "test_pytest_plugin.py" in card.line
    assert host.budget is None


BLOCKS = """
from outsize.monitor.peak import PeakMeter
for size in (1, 3, 40):
    with PeakMeter("block") as meter:
        block = bytearray(size * 8 * 2**20)
        block[::4096] = b"1" * len(block[::4096])
        del block
    (host,) = meter.peaks()
    print(host.bytes, host.bound)
"""


def test_the_peak_of_a_block_is_measured_to_a_few_pages():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=True
    )  # nothing else runs
    for size, line in zip((1, 3, 40), done.stdout.splitlines(), strict=True):
        held, bound = map(int, line.split())
        assert size * 8 * MiB <= held + MiB // 2 and held <= size * 8 * MiB + 4 * MiB
        assert bound >= held
