"""A pass that sorts runs of lanes: one run is one tile, and every so many-th element of it is kept for the merge."""

from __future__ import annotations

from outsize.array.graph.external_sort import Runs, index_of
from outsize.array.graph.frame import Frame
from outsize.array.passes.base import ANY, Effort, Job, Room, Sized
from outsize.array.passes.map import MapPass, State
from outsize.array.passes.tiling import Box
from outsize.array.store.base import Region


class RunsPass(MapPass):
    """Makes the sorted runs of lanes."""

    node: Runs

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Sized:
        box: Box = (*(1 for _ in self.node.shape[:-1]), self.node.run)
        return self._settle(box, box, effort.workers, effort.workers, room)

    def load(self, job: Job, tile: Region, chunk: Region, state: State, frame: Frame) -> None:
        super().load(job, tile, chunk, state, frame)
        store = getattr(job.sink, "reader", None)
        if store is not None:
            kept = state.block.reshape(-1)[:: self.node.step]
            index_of(store, self.node).keep(tile, (kept["value"] if self.node.dtype.names else kept).copy())
