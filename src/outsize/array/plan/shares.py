"""How a pass is shared out among the workers of a cluster, which its plan alone decides.

In: a sized pass, for how many workers it was planned, what a worker may hold. Out: tasks, each of a few whole tiles; or parts of
tiles, where tiles are fewer than workers and can be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outsize.array.passes.base import Sized
from outsize.array.plan.schedule import Schedule
from outsize.array.store.base import Region
from outsize.array.tuning import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How a pass is shared out, which its plan alone decides."""

    tiles: tuple[Sequence[int], ...] = ()
    """Tasks of whole tiles."""
    parts: tuple[tuple[int, Region, tuple[Region, ...]], ...] = ()
    """(number of a tile, the tile, its parts) where tiles are cut."""

    @property
    def tasks(self) -> int:
        """Tasks that may run at the same time."""
        return len(self.tiles) + sum(len(parts) for _, _, parts in self.parts)


def share_out(sized: Sized, tuning: Tuning, budget: int, done: set[int]) -> Shares:
    """The tasks of a pass, without the tiles that are done."""
    work: Any = sized.work
    wanted = max(1, tuning.spread) * tuning.tasks
    count, moved = len(sized.grid), work.reads(sized) + work.writes()
    if count < max(2, tuning.spread) and _apart(sized) and work.join_bytes(sized) <= budget:
        pieces = max(-(-wanted // max(1, count)), moved // max(1, count) // tuning.task_bytes)
        cut = [(number, tile, tuple(work.cut(sized, tile, pieces))) for number, tile in enumerate(work.tiles(sized))]
        if cut and all(parts for _, _, parts in cut):
            return Shares(parts=tuple(one for one in cut if one[0] not in done))
    if not _apart(sized):  # two workers would write one chunk
        left = [number for number, _ in enumerate(work.tiles(sized)) if number not in done]
        return Shares(tiles=(left,) if left else ())
    count = count or sum(1 for _ in work.tiles(sized))  # a reduction of nothing has a tile
    missing: Sequence[int] = [number for number in range(count) if number not in done] if done else range(count)
    step = max(1, min(len(missing) // wanted, tuning.task_bytes * count // max(1, moved)))
    return Shares(tiles=tuple(missing[low : low + step] for low in range(0, len(missing), step)))


def _apart(sized: Sized) -> bool:
    """True where no two tiles, and no two parts, write into one chunk of an output."""
    work: Any = sized.work
    for node, sink in work.outputs:
        box = (
            sized.chunk
            if (node, sink) in [(one, its) for _, one, its in getattr(work, "riders", ())]
            else sized.grid.box
        )
        for step, grain, length in zip(box, sink.granule, node.shape, strict=True):
            if grain > 1 and step % grain and step < length:
                return False
    return True


def useful_workers(schedule: Schedule, budget: int) -> int:
    """Workers beyond which one more is given nothing to do in the pass that moves most."""
    moved = [(one.sized.work.reads(one.sized) + one.sized.work.writes(), one.sized) for one in schedule.passes]
    if not moved:
        return 1
    sized = max(moved, key=lambda pair: pair[0])[1]
    return max(1, share_out(sized, schedule.tuning, budget, set()).tasks)
