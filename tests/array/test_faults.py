"""Where things go wrong or are odd: infinite values, deep graphs, file systems that refuse."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp
from outsize.array.graph.rearrange import Concat


def test_means_beside_deviations_are_numpys_where_values_are_infinite() -> None:
    x = np.random.default_rng(0).normal(size=(400_000, 5))
    x[7, 0], x[350_000, 1], x[3, 2], x[:, 4] = np.inf, -np.inf, np.nan, 0
    x[5000:, 4] += 1e6  # the first slice's mean is a poor shift: the chunk is gone through again
    y = outsize.open(x)
    for budget in ("6MiB", "200MiB"):
        got = xp.stack([xp.mean(y, axis=0), xp.std(y, axis=0)]).compute(budget=budget)
        np.testing.assert_allclose(got, [x.mean(axis=0), x.std(axis=0)], rtol=1e-9)


def test_joins_of_joins_are_planned_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    x = outsize.open(np.zeros((50, 20)))
    joined = x + 0
    for _ in range(16):
        joined = xp.concat([joined, x[:2]])
    calls, evaluate = itertools.count(), Concat.evaluate

    def counted(node: Concat, region: Any, frame: Any, out: Any) -> Any:
        assert next(calls) < 20_000, "twice the work at every level"
        return evaluate(node, region, frame, out)

    monkeypatch.setattr(Concat, "evaluate", counted)
    joined.plan(budget="64MiB")


def test_a_file_system_that_refuses_direct_transfers_costs_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000.0))
    before, preadv = len(os.listdir("/proc/self/fd")), os.preadv

    def refusing(fd: int, *args: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", refusing)
    x = outsize.open(tmp_path / "x.npy")
    np.testing.assert_array_equal(x.compute(), np.arange(1000.0))
    x.node.store.close()
    assert len(os.listdir("/proc/self/fd")) == before
