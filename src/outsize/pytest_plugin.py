"""The pytest plugin: `@pytest.mark.outsize(budget="1GiB")` fails a test that holds more memory than that.

pytest loads this file wherever Outsize is installed, so it imports nothing but pytest. A test without the mark passes through one
look at its marks. What a marked test held is measured by `monitor.peak`; it stands in the report of a test that fails, in its
`user_properties` (JUnit files have them), and in a table at the end of `pytest -v`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

MARK = "outsize"
USAGE = (
    "outsize(budget=None, device=None): fail if the test holds more than `budget` of RAM, or more than `device` on a card, "
    "beyond what was held when it began"
)
PROPERTY = "outsize_peak"
"""Key of the test's property: (pool, bytes, budget)."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", USAGE)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Measure the body of a marked test; fixtures are made before and do not count."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        yield
        return
    try:
        meter = _make_meter(item, mark)
    except ValueError as error:
        outcome = yield
        outcome.force_exception(pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False))
        return
    with meter:
        outcome = yield
    over = []
    for peak in meter.peaks():
        item.user_properties.append((PROPERTY, (str(peak.pool), peak.bytes, peak.budget)))
        if not peak.fits:
            over.append(str(peak))
    if over and outcome.excinfo is None:
        outcome.force_exception(pytest.fail.Exception("\n".join(over), pytrace=False))
    elif over:
        item.add_report_section("call", "memory", "\n".join(over))


def _make_meter(item: pytest.Item, mark: pytest.Mark) -> Any:
    """The meter for a mark, or a ValueError that says what is wrong with it."""
    from outsize.core.errors import InputError
    from outsize.core.units import parse_bytes
    from outsize.failure.live import arrays_of_thread
    from outsize.monitor.peak import PeakMeter

    given = {**dict(zip(("budget", "device"), mark.args, strict=False)), **mark.kwargs}
    unknown = given.keys() - {"budget", "device"}
    if unknown or len(mark.args) > 2 or not given:
        raise InputError(
            f"the mark outsize takes budget= and device=, such as budget='1GiB', not {mark.args} {mark.kwargs}"
        )
    budget, device = (None if given.get(name) is None else parse_bytes(given[name]) for name in ("budget", "device"))
    made_before = tuple(getattr(item, "funcargs", {}).values())
    return PeakMeter(item.name, budget, device, look=lambda thread: arrays_of_thread(thread, without=made_before))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `-v`, what every marked test held."""
    if config.get_verbosity() < 1:
        return
    reports = [one for name in ("passed", "failed") for one in terminalreporter.stats.get(name, ())]
    rows = [
        (report.nodeid, *value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY and report.when == "call"
    ]
    if not rows:
        return
    from outsize.core.units import format_bytes

    terminalreporter.section("memory of marked tests")
    for nodeid, pool, peak, budget in sorted(rows, key=lambda row: -row[2]):
        terminalreporter.write_line(f"{format_bytes(peak):>12} of {format_bytes(budget):>12}  {pool:<8}  {nodeid}")
