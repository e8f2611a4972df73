"""A decomposition that is killed, between passes and inside them, is taken up by the same call and gives the same factors."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from effort import points
from test_decompose import low_rank

import outsize
from outsize.array.tuning import Tuning, use
from outsize.core.events import Advanced
from outsize.factor.algorithms import checkpoint, session

CHILD = Path(__file__).with_name("decompose_child.py")


def run(path: Path, method: str, scratch: Path, life: int, places: str = "memory") -> tuple[int, dict[str, Any]]:
    child = forks.start(CHILD, path, method, "8MiB", scratch, life, places)
    out, error = child.communicate()
    assert child.returncode in (0, 9), error
    return child.returncode, json.loads(out.splitlines()[-1]) if child.returncode == 0 else {}


@pytest.mark.parametrize(("method", "places"), [("tucker", "memory"), ("tucker", "disk"), ("tt", "memory")])
def test_killed_at_any_event_it_goes_on_to_the_same_factors(tmp_path: Path, method: str, places: str) -> None:
    x = low_rank((48, 60, 64), 4, 1e-3, "f4")
    x[40:42] += 3 * low_rank((2, 60, 64), 6, 0, "f4", seed=9)
    np.save(tmp_path / "x.npy", x)
    _, whole = run(tmp_path / "x.npy", method, tmp_path / "plain", 0, places)
    events, taken_up = whole["events"], 0
    for life in points(range(events // 4, events - 2, 3), 2):
        scratch = tmp_path / f"scratch-{life}"
        code, _ = run(tmp_path / "x.npy", method, scratch, life, places)
        assert code == 9
        code, after = run(tmp_path / "x.npy", method, scratch, 0, places)
        assert code == 0 and after["digest"] == whole["digest"] and after["error"] == whole["error"]
        taken_up += after["taken_up"]
        assert not [name for name in os.listdir(scratch) if "outsize" in name], "nothing stays in scratch"
    assert taken_up > 0, "some were taken up inside a pass"


def test_states_of_other_data_are_not_taken_up(tmp_path: Path) -> None:
    x = low_rank((48, 60, 64), 4, 1e-4, "f4")
    np.save(tmp_path / "x.npy", x)
    assert run(tmp_path / "x.npy", "tucker", tmp_path / "scratch", 40)[0] == 9
    np.save(tmp_path / "x.npy", 2 * x[::-1])
    _, fresh = run(tmp_path / "x.npy", "tucker", tmp_path / "other", 0)
    _, after = run(tmp_path / "x.npy", "tucker", tmp_path / "scratch", 0)
    assert after["digest"] == fresh["digest"]


def test_interrupted_by_hand_it_goes_on_with_what_is_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", 0)
    monkeypatch.setattr(session, "IN_MEMORY", 1 << 30)
    np.save(tmp_path / "x.npy", low_rank((48, 60, 64), 4, 1e-4, "f4"))
    left = [10**6]

    def listener(event: Any) -> None:
        left[0] -= isinstance(event, Advanced)
        if left[0] <= 0:
            left[0] = 10**6
            raise KeyboardInterrupt

    def work() -> Any:
        return outsize.decompose(tmp_path / "x.npy", "tucker", 0.01, budget="8MiB", listener=listener)

    with (
        outsize.budget(scratch=str(tmp_path / "scratch")),
        use(replace(Tuning(), small=0, chunk=1 << 14, largest=1 << 14, least_box=1 << 11)),
    ):
        expected = work()
        events = 10**6 - left[0]
        for life in points(range(2, events - 1), 4):
            left[0] = life
            with pytest.raises(KeyboardInterrupt):
                work()
            np.testing.assert_array_equal(work().compute(), expected.compute())
