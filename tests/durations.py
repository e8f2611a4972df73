"""Dear files first, dealt out to the processes: a long test that begins last keeps the others waiting.

Each process begins with an even share of the tests, as they stand in a row, and takes from the ends of the others' when it has
none left.

`durations.json` has the seconds of each file's longest test. `pytest --store-durations` writes it anew, on a machine that does
nothing else; a file that is not in it comes last.
"""

import json
import pathlib

STORED = pathlib.Path(__file__).with_suffix(".json")
LEAST = 0.5
"""Seconds under which the order of files does not matter."""


def pytest_addoption(parser):
    parser.addoption("--store-durations", action="store_true", help=f"write how long files take to {STORED.name}")


def pytest_configure(config):
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


def pytest_collection_modifyitems(config, items):
    stored = json.loads(STORED.read_text())
    files = {}
    for item in items:
        files.setdefault(file_of(item.nodeid), []).append(item)
    shares = [[] for _ in range(getattr(config, "workerinput", {}).get("workercount", 1))]
    for file in sorted(files, key=lambda file: -stored.get(file, 0.0)):
        min(shares, key=len).extend(files[file])
    items[:] = [item for share in shares for item in share]


def file_of(test):
    return test.partition("::")[0].removeprefix("tests/")


class Stopwatch:
    """Notes the longest test of each file."""

    def __init__(self):
        self.longest = {}

    def pytest_runtest_logreport(self, report):
        file = file_of(report.nodeid)
        self.longest[file] = max(self.longest.get(file, 0.0), round(report.duration, 1))

    def pytest_sessionfinish(self):
        kept = {file: seconds for file, seconds in sorted(self.longest.items()) if seconds >= LEAST}
        STORED.write_text(json.dumps(kept, indent=1) + "\n")
