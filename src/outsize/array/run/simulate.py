"""Work on a cluster that is not there: the plan's own tasks on a clock of their own.

In: an array, possibly one that exists on paper only, and `Machines`. The plan is made for so many workers with so much memory;
its passes are shared out, started, lost and joined by the lines that do it for real clusters. Out: a `Simulation`.
"""

from __future__ import annotations

import os
from typing import Any

from outsize.array.graph.node import Node, Source
from outsize.array.passes.base import Sized
from outsize.array.plan.prepare import prepare
from outsize.array.plan.residency import ScratchStore
from outsize.array.plan.shares import share_out
from outsize.array.run.distribute import Distribution
from outsize.array.run.side_files import SideFiles
from outsize.array.store.options import as_numpy
from outsize.array.store.registry import describe_sink
from outsize.core.simulation import SimulatedStep, Simulation
from outsize.core.spec import parse_shape
from outsize.engine.barrier import Patience
from outsize.engine.cluster import Cluster, WorkerFacts, use_cluster
from outsize.engine.simulated_engine import Machines, SimulatedEngine

_PAPER = "on paper"


def paper_node(shape: Any, dtype: Any) -> Node:
    """An array of any size that nobody has: plans and simulations take it, reading fails."""
    lengths, element = parse_shape(shape), as_numpy(dtype)
    return Source(shape=lengths, dtype=element, store=ScratchStore(lengths, element, _PAPER))


class _Paper(SideFiles):
    """A folder that nobody has."""

    def names(self) -> set[str]:
        return set()


class _OnPaper(Distribution):
    """A run of which only the tasks exist."""

    def __init__(self, cluster: Cluster, budget: int, tuning: Any) -> None:
        super().__init__(cluster, _PAPER, budget, tuning)
        self.files = _Paper(_PAPER)
        self.patience = Patience(look=30.0, empty=1e9)

    def _hand_over(self, number: int, sized: Sized, sinks: Any, bindings: Any) -> None:
        """Nothing: nobody runs it."""


def simulate_node(
    node: Node, machines: Machines, memory: int, *, cores: int = 1, path: str = "output.npy", price: float | None = None
) -> Simulation:  # fmt: skip
    """Save a node on these machines, whose workers may hold `memory` bytes each."""
    engine = SimulatedEngine(machines)
    facts = WorkerFacts(name=_PAPER, room=memory, reason=_PAPER, cores=cores)
    joined = Cluster(executor=engine, workers=(facts,), spread=machines.workers, cores=cores)
    with use_cluster(joined):
        sink = describe_sink(path, node.shape, node.dtype)
        prepared = prepare(node, sink, memory, name=f"save {os.path.basename(path)}")
    prepared.plan.check()
    tuning = prepared.schedule.tuning
    run = _OnPaper(joined, memory, tuning)
    steps: list[SimulatedStep] = []
    for number, one in enumerate(prepared.schedule.passes):
        began, sized = engine.now(), one.sized
        sinks = tuple(sink for _, sink in sized.work.outputs)
        run.run_pass(number, sized, sinks, sized.work.bindings, set(), None, lambda amount: None)
        tasks = share_out(sized, tuning, memory, set()).tasks
        steps.append(SimulatedStep(name=prepared.plan.steps[number].name, seconds=engine.now() - began, tasks=tasks))
    seconds, plan = max(engine.now(), 1e-9), prepared.plan
    return Simulation(
        name=plan.name, workers=machines.workers, seconds=engine.now(), steps=tuple(steps),
        peak=plan.peak(), read=plan.read, written=plan.written, moved=engine.moved, lost=run.faults.lost,
        taken_over=run.faults.taken_over, busy=engine.busy / (seconds * machines.workers), full=engine.full / seconds,
        price=price,
    )  # fmt: skip
