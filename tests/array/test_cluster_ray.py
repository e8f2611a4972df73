"""The same work on a cluster of Ray: two nodes on this machine. `scripts/ray_tests` runs it where Ray's wheel is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp

ray = pytest.importorskip("ray", reason="Ray is not installed: scripts/ray_tests makes an environment with it")

NODE = {"num_cpus": 1, "memory": 600 << 20, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE)
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}}
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR", runtime_env=here)
    yield made
    ray.shutdown()
    made.shutdown()


def test_nodes_make_what_one_process_makes(nodes: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(3, 2, (400_000, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    x = outsize.open(tmp_path / "x.npy")
    works = {
        "z": (x - x.mean(axis=0)) / x.std(axis=0), "gram": x.T @ x, "turned": x.T, "sorted": xp.sort(x.reshape(-1)),
        "median": xp.median(x, axis=0),
    }  # fmt: skip
    with outsize.cluster("ray") as joined:
        assert len(joined.joined.workers) == 2
        for name, work in works.items():
            work.save(tmp_path / f"{name}.npy", budget="64MiB")
    for name, work in works.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), work.compute(), rtol=1e-3, atol=1e-4)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_process_that_dies_costs_its_task_only(nodes: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((300_000, 32), np.float32))
    dying = xp.map_blocks(Once(str(tmp_path / "died")), outsize.open(tmp_path / "x.npy"), memory=1)
    with outsize.cluster("ray"), pytest.warns(UserWarning, match="tasks of lost workers ran again"):
        (dying * 2).save(tmp_path / "y.npy", budget="64MiB")
    assert (tmp_path / "died").exists()
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.full((300_000, 32), 2, np.float32))


class Once:
    """Kills the process that calls it, the first time of all."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.__name__ = "once"

    def __call__(self, block: Any) -> Any:
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return block
        os.kill(os.getpid(), 9)
        return block


@pytest.mark.parametrize(
    ("address", "words"),
    [("ray://127.0.0.1:9", "no cluster of Ray answers at ray://127.0.0.1:9 .*: check the address, and start it with"),
     ("ray+127.0.0.1:9", r"no cluster of Ray answers at ray\+127.0.0.1:9 "), ("ray://nobody.invalid:1", "no cluster of Ray")],
)  # fmt: skip
def test_a_wrong_address_is_one_sentence(address: str, words: str) -> None:
    code = f"import outsize; outsize.cluster({address!r})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.search(f"InputError: {words}", told.stderr)
    assert told.stderr.strip().splitlines()[-1].count(". ") == 0


def test_a_node_with_less_memory_than_the_budget_is_named(nodes: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((3000, 32), np.float32))
    with (
        outsize.cluster("ray"),
        pytest.raises(outsize.BudgetError, match=r"the budget of a worker is .* has room for .* limit of 600.00 MiB"),
    ):
        (outsize.open(tmp_path / "x.npy") + 1).save(tmp_path / "y.npy", budget="599MiB")


def test_a_version_that_differs_is_named(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outsize, "__version__", "9.9")
    with pytest.raises(
        outsize.InputError, match=r"worker [0-9a-f]{56} has outsize .* and this process 9\.9: install the same"
    ):
        outsize.cluster("ray")


def test_a_tensor_is_decomposed_and_converted_by_nodes(nodes: Any, tmp_path: Path) -> None:
    sides = [np.random.default_rng(side).random((n, 4)) for side, n in enumerate((260, 220, 200))]
    np.save(tmp_path / "t.npy", np.einsum("ia,ja,ka->ijk", *sides))
    with outsize.cluster("ray", scratch=str(tmp_path)):
        made = outsize.decompose(tmp_path / "t.npy", "tucker", error=1e-6, budget="64MiB")
        cost = outsize.convert(tmp_path / "t.npy", tmp_path / "t.zarr", "float32", budget="64MiB").precision
    assert made.plan.workers == 2 and made.plan.useful_workers > 2
    whole = np.load(tmp_path / "t.npy")
    assert np.linalg.norm(made.compute() - whole) <= 1e-6 * np.linalg.norm(whole)
    np.testing.assert_array_equal(outsize.open(tmp_path / "t.zarr").compute(), whole.astype(np.float32))
    assert cost.elements == whole.size
