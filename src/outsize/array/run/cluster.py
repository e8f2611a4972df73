"""`outsize.cluster(...)`: from now on, or inside a `with` block, work runs on the workers of a cluster.

In: the address of a scheduler of Dask, a `distributed.Client`, or the address of a cluster of Ray. Joining looks at every worker:
which versions it has, what memory is left there. Out: a `Cluster` in use, which plans and runs find (`engine/cluster.py`).
Budgets are then those of one worker.
"""

from __future__ import annotations

import contextvars
import math
import os
import platform
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.run.task import call
from outsize.core.errors import ClusterError, InputError
from outsize.core.units import format_bytes, parse_bytes
from outsize.engine.barrier import Faults, run_tasks
from outsize.engine.cluster import Cluster, WorkerFacts, current_cluster, reset_cluster, set_cluster
from outsize.engine.executor import Executor, Task
from outsize.engine.local_engine import LocalEngine

_SHARE = 0.8
"""Part of a worker's limit that is used: Dask pauses a worker there, and stops it a little further."""


class cluster:
    """Run array work on a cluster: `with outsize.cluster("tcp://host:8786"): z.save("/shared/z.zarr", budget="2GiB")`.

    `where` is the address of a Dask scheduler (`tcp://`, `tls://`, `ucx://`), a `distributed.Client`, a Ray address
    (`ray://host:10001`, or `ray` for the cluster of this machine), or `local` for this process. Budgets are bytes of one worker.
    `scratch` is a folder that all workers reach; without it, what passes leave to each other lies beside the output.
    `workers` plans for so many workers instead of those that are there now.
    """

    def __init__(
        self, where: Any, *, scratch: str | os.PathLike[str] | None = None, workers: int | None = None
    ) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers={workers}: a plan needs at least one")
        self.executor = find_engine(where)
        try:
            facts = look_at_workers(self.executor)
        except BaseException:
            self.executor.close()
            raise
        folder, cores = None if scratch is None else os.fspath(scratch), min(worker.cores for worker in facts)
        self.joined = Cluster(
            executor=self.executor, workers=facts, spread=workers or len(facts), cores=cores, scratch=folder
        )  # fmt: skip
        self._token: contextvars.Token[Cluster | None] | None = set_cluster(self.joined)

    @staticmethod
    def on_paper(shape: Any, dtype: Any = "float32") -> Any:
        """An array of any size that nobody has, for plans and for `simulate`."""
        from outsize.array.run.simulate import paper_node

        return sys.modules["outsize"].array.Array(paper_node(shape, dtype))

    @staticmethod
    def simulate(
        array: Any, path: str = "output.npy", *, workers: int, memory: int | str, link: int | str | float,
        storage: int | str | float | None = None, cores: int = 1, price: float | None = None, **rates: float,
    ) -> Any:  # fmt: skip
        """What saving an array would take on a cluster that is not there: a `Simulation`. `memory` is the budget of a worker,
        `link` what one moves and works through in a second, `storage` what all move together. `rates` are those of `Machines`:
        begin, dispatch, failures (an hour), restart, slow, slowness, seed."""
        from outsize.array.run.simulate import simulate_node
        from outsize.engine.simulated_engine import Machines

        shared = math.inf if storage is None else _rate(storage)
        machines = Machines(workers=workers, link=_rate(link), storage=shared, **rates)  # type: ignore[arg-type]
        return simulate_node(array.node, machines, parse_bytes(memory), cores=cores, path=path, price=price)

    def close(self) -> None:
        """Work in this process again."""
        if self._token is not None:
            reset_cluster(self._token)
            self._token = None
            self.executor.close()

    def __enter__(self) -> cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tightest = self.joined.tightest
        return (f"outsize.cluster({self.executor.name!r}): {len(self.joined.workers)} workers, at least "
                f"{format_bytes(tightest.room)} and {self.joined.cores} cores each")  # fmt: skip


def _rate(text: int | str | float) -> float:
    """Bytes a second: a number, or text such as `2GB`."""
    return float(text) if isinstance(text, int | float) else float(parse_bytes(text.removesuffix("/s")))


def find_engine(where: Any) -> Executor:
    """The engine that an address, or a client, belongs to."""
    if isinstance(where, str):
        if where == "local":
            return LocalEngine()
        if where == "ray" or where.startswith(("ray://", "ray+")):
            from outsize.engine.ray_engine import RayEngine

            return RayEngine(where)
        if where.startswith(("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")):
            from outsize.engine.dask_engine import DaskEngine

            return DaskEngine(where)
        raise InputError(
            f"{where!r} is no address of a cluster: use tcp://host:8786 (a scheduler of Dask), ray://host:10001 (Ray), or give a "
            "distributed.Client"
        )
    if type(where).__module__.partition(".")[0] == "distributed":
        from outsize.engine.dask_engine import DaskEngine

        return DaskEngine(getattr(where, "get_client", lambda: where)() if type(where).__name__ != "Client" else where)
    raise InputError(f"a {type(where).__name__} is no cluster: give an address, or a distributed.Client")


def tell_of_worker() -> dict[str, Any]:
    """What a worker says of itself; runs there."""
    import psutil

    from outsize.machine import memory

    host = memory().host
    biting = host.biting
    return {
        "versions": {"outsize": sys.modules["outsize"].__version__, "numpy": np.__version__, "python": platform.python_version()},
        "host": platform.node(), "available": host.available, "limit": biting.name if biting else None,
        "cores": len(os.sched_getaffinity(0)), "resident": int(psutil.Process().memory_info().rss),
    }  # fmt: skip


def look_at_workers(executor: Executor) -> tuple[WorkerFacts, ...]:
    """What is known of every worker; an `InputError` where they cannot work together."""
    try:
        told = executor.ask_all(tell_of_worker)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the workers of {executor.name} lack {error.name}: pip install the same outsize there as here"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"{executor.name} does not answer any more ({type(error).__name__}): start it again"
        ) from None
    if not told:
        raise InputError(f"{executor.name} has no workers: start some first")
    _refuse_versions(executor, told)
    hosts = Counter(facts["host"] for facts in told.values() if not facts["limit"])
    return tuple(_facts(executor, name, facts, hosts[facts["host"]]) for name, facts in told.items())


def _refuse_versions(executor: Executor, told: dict[str, dict[str, Any]]) -> None:
    here = tell_of_worker()["versions"]
    for name, facts in told.items():
        for package, version in facts["versions"].items():
            mine = here[package]
            if package == "python":
                version, mine = (".".join(text.split(".")[:2]) for text in (version, mine))
            if version != mine:
                raise InputError(
                    f"worker {name} has {package} {version} and this process {mine}: install the same version on all, since a "
                    "pass that is planned here must take the same memory and give the same bytes there"
                )


def _facts(executor: Executor, name: str, told: dict[str, Any], sharing: int) -> WorkerFacts:
    """What a task may hold on a worker: what the engine's limit leaves, and what its machine or container leaves."""
    available = told["available"]
    rows: list[tuple[int, str]] = []
    if available is not None:
        share = available // max(1, sharing)
        why = f"{format_bytes(share)}, a share of its machine for {max(1, sharing)} workers"
        if told["limit"]:
            why = f"the {format_bytes(share)} that the {told['limit']} leaves it"
        rows.append((int(share * _SHARE), f"{_SHARE:.0%} of {why}"))
    limit = executor.limit(name)
    if limit is not None:
        left, held = max(0, int(limit * _SHARE) - told["resident"]), format_bytes(told["resident"])
        rows.append((left, f"{_SHARE:.0%} of its limit of {format_bytes(limit)}, less {held} that it holds"))
    room, reason = min(rows, default=(0, "nothing is known of its memory"))
    return WorkerFacts(name=name, room=room, reason=reason, cores=executor.threads(name) or told["cores"])


def local_cluster(spread: int, cores: int) -> Cluster:
    """This process in place of a cluster that work was planned for."""
    engine = LocalEngine()
    return Cluster(executor=engine, workers=look_at_workers(engine), spread=spread, cores=cores)


def on_one_worker(function: Callable[..., Any], budget: Any, *arguments: Any, **options: Any) -> Any:
    """A verb that is not shared out: all of it on one worker of the cluster in use, inside that worker's budget; on another if
    that one is lost."""
    from outsize.array.plan.prepare import resolve_budget

    joined = current_cluster()
    assert joined is not None
    host, results = resolve_budget(budget).host or 0, []
    work = (function, arguments, {"budget": host, **options})
    task = Task(key=f"one-{uuid.uuid4().hex[:12]}", function=call, arguments=work, bytes=host)
    run_tasks(joined.executor, [task], lambda _, told: results.append(told), Faults())
    return results[0]
