"""Work on a cluster that is not there: the plan's own tasks, without data."""

from __future__ import annotations

import json
from typing import Any

import effort
import pytest

import outsize
import outsize.array as xp
from outsize.core.answers import read_answer


def z_score(rows: int) -> Any:
    x = outsize.cluster.on_paper((rows, 512))
    return (x - x.mean(axis=0)) / x.std(axis=0)


def test_more_workers_are_faster_until_storage_is_full() -> None:
    made = [
        outsize.cluster.simulate(z_score(20_000_000), workers=workers, memory="1GiB", link="1GB", storage="20GB")
        for workers in (1, 8, 64)
    ]
    assert made[0].seconds > 6 * made[1].seconds and made[1].seconds < 12 * made[2].seconds
    assert [one.limited_by for one in made[::2]] == ["workers", "storage"]
    assert made[2].seconds >= (made[2].read + made[2].written) / 20e9
    assert all(one.peak <= 1 << 30 for one in made)


def test_failures_cost_time_and_are_counted() -> None:
    options = {"workers": 50, "memory": "1GiB", "link": "1GB"}
    plain = outsize.cluster.simulate(z_score(50_000_000), **options)
    unlucky = outsize.cluster.simulate(z_score(50_000_000), failures=20, slow=0.02, price=0.5, **options)
    assert unlucky.seconds > plain.seconds and unlucky.lost > 0 and unlucky.moved > plain.moved
    assert unlucky.cost == pytest.approx(0.5 * 50 * unlucky.seconds / 3600) and plain.cost is None


def test_a_hundred_terabytes_on_a_thousand_workers_take_a_moment() -> None:
    bytes_ = 10**15 if effort.long() else 10**14
    x = outsize.cluster.on_paper((bytes_ // 2048, 512), "float32")
    made = outsize.cluster.simulate(
        x.mean(axis=0), workers=1000, memory="64GiB", link="2GB", storage="500GB", failures=0.02, slow=0.005
    )
    assert made.read >= bytes_ and made.seconds > bytes_ / 500e9


@pytest.mark.parametrize(
    "work", [lambda x: x.T, lambda x: x.T @ x, lambda x: xp.sort(x.reshape(-1)), lambda x: xp.median(x)]
)
def test_every_kind_of_work_is_simulated(work: Any) -> None:
    made = outsize.cluster.simulate(
        work(outsize.cluster.on_paper((4_000_000, 256))), workers=6, memory="1GiB", link="1GB"
    )
    assert made.seconds > 0 and made.busy <= 1 and len(made.steps) >= 1


def test_a_simulation_is_drawn_and_read_back(tmp_path: Any) -> None:
    made = outsize.cluster.simulate(z_score(1_000_000), workers=3, memory="256MiB", link="1GB", price=1.0)
    assert "on 3 workers (estimate)" in str(made) and "limited by" in str(made)
    (tmp_path / "s.json").write_text(json.dumps(made.to_dict()))
    assert read_answer(tmp_path / "s.json") == made


def test_a_budget_that_does_not_fit_is_refused() -> None:
    with pytest.raises(outsize.BudgetError, match="the smallest budget that works"):
        outsize.cluster.simulate(z_score(1_000_000), workers=3, memory="4KiB", link="1GB")
