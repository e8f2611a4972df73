"""Lazy arrays in a pickle: files go by their paths, arrays in memory by their values, whatever the graph above them."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp

GRAPHS: dict[str, Callable[[Any], Any]] = {
    "expression": lambda x: xp.where(x > 0.5, np.round(x * 2, 1), -x).astype("float32") + 1j * x.T,
    "parts": lambda x: (xp.real(x + 1j), xp.imag(x + 1j), xp.clip(x, 0.2, 0.8)),
    "reductions": lambda x: ((x - x.mean(axis=0)) / x.std(axis=0), xp.cumulative_sum(x, axis=1), x.argmax()),
    "moves": lambda x: xp.roll(xp.concat([x, x[::2]], axis=0), 3, axis=1)[xp.asarray(np.array([3, 1, 2]))].reshape(-1),
    "sorted": lambda x: (xp.sort(x, axis=0, descending=True), xp.argsort(x, descending=True), xp.topk(x, 3)[0]),
    "ranks": lambda x: (xp.median(x, axis=0), xp.quantile(x, [0.1, 0.5])),
    "products": lambda x: (x @ x, xp.einsum("ij,kj->ik", x, x)),
    "fft": lambda x: (xp.fft.rfft(x), xp.fft.fftn(x)),
    "linalg": lambda x: (xp.linalg.solve(x, x[0]), *xp.linalg.svd(x), xp.linalg.det(x), *xp.linalg.qr(x)),
    "random": lambda x: x + xp.random.default_rng(7).normal(size=x.shape),
    "blocks": lambda x: xp.map_blocks(np.sqrt, x, memory=2),
}


@pytest.fixture
def x(tmp_path: Path) -> Any:
    np.save(tmp_path / "x.npy", np.random.default_rng(3).random((20, 20)))
    return outsize.open(tmp_path / "x.npy")


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_comes_out_of_a_pickle_as_it_went_in(name: str, x: Any) -> None:
    made = GRAPHS[name](x)
    for one in made if isinstance(made, tuple) else (made,):
        again = pickle.loads(pickle.dumps(one))
        assert (again.shape, again.dtype) == (one.shape, one.dtype)
        np.testing.assert_array_equal(again.compute(), one.compute())


def test_another_process_opens_the_file_again(x: Any) -> None:
    data = pickle.dumps(x + 1)
    assert len(data) < 5000, "the path is in it, not the values"
    code = "import pickle, sys; print(float(pickle.load(sys.stdin.buffer).sum()))"
    out = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout
    assert float(out) == float((x + 1).sum())


def test_a_graph_of_any_depth_can_be_pickled(x: Any) -> None:
    z = x
    for _ in range(2000):
        z = z * 0.5 + x
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(z)).compute(), z.compute())


def test_one_source_of_many_nodes_is_pickled_once() -> None:
    y = xp.asarray(np.zeros(10_000))
    assert len(pickle.dumps(y + y * 2 + xp.sqrt(y))) < 100_000


def test_a_copy_shares_its_sources(tmp_path: Path) -> None:
    with outsize.budget("1MiB", scratch=str(tmp_path)):
        scratch = outsize.empty((1024, 1024))
    assert copy.copy(scratch).node is scratch.node


def test_a_source_that_no_other_process_can_open_is_named(x: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with outsize.budget("1MiB", scratch=str(tmp_path)):
        scratch = outsize.empty((1024, 1024))
    with pytest.raises(outsize.InputError, match=r"cannot pickle .*outsize-array-.*: it is a scratch file"):
        pickle.dumps(scratch + 1)
    file = h5py.File(io.BytesIO(), "w")
    file["data"] = np.zeros(3)
    with pytest.raises(outsize.InputError, match=r"cannot pickle .*::/data: no other process can open"):
        pickle.dumps(outsize.open(file["data"]) + 1)
