"""How often a reading asks the operating system."""

from __future__ import annotations

import pytest

from outsize.machine import current_budget
from outsize.machine.system import LiveSystem


def test_a_reading_asks_for_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = LiveSystem.read_text

    def counted(system: LiveSystem, path: str) -> str | None:
        asked.append(path)
        return read(system, path)

    monkeypatch.setattr(LiveSystem, "read_text", counted)
    current_budget()
    assert asked and len(asked) == len(set(asked))
    before = len(asked)
    current_budget()  # a limit may have changed: nothing is kept from one reading to the next
    assert len(asked) == 2 * before
