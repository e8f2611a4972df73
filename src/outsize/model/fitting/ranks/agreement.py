"""How ranks agree: each tells the others a few numbers or a small value, and all decide from the same table.

In: what this rank knows. Out: what all ranks know, in the order of their numbers. It goes through a group of its own over the
hosts' network, so that no card waits for it; a rank that does not answer in the time of the user's own group ends the wait.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outsize.core.errors import OutsizeError
from outsize.model.torch_port.ranked import group_timeout

LONGEST = timedelta(minutes=10)
"""So long a rank is waited for at most, whatever the user's group allows: steps are shorter, and a hang is not."""


class Ranks:
    def __init__(self) -> None:
        self.number = dist.get_rank()
        self.count = dist.get_world_size()
        self.timeout = min(LONGEST, group_timeout() or LONGEST)
        self._group = dist.new_group(backend="gloo", timeout=self.timeout)

    def tell(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks; whole ones are exact up to 2^53."""
        mine = torch.tensor(list(numbers), dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.count)]
        self._run(lambda: dist.all_gather(rows, mine, group=self._group))
        return [row.tolist() for row in rows]

    def share(self, value: Any) -> list[Any]:
        """A small value of every rank."""
        values: list[Any] = [None] * self.count
        self._run(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def from_first(self, value: Any) -> Any:
        """The first rank's value; what the others give is not looked at."""
        values = [value if self.number == 0 else None]
        self._run(lambda: dist.broadcast_object_list(values, src=0, group=self._group))
        return values[0]

    def _run(self, talk: Any) -> None:
        try:
            talk()
        except RuntimeError as error:
            raise OutsizeError(
                f"rank {self.number} of {self.count} waited for the others and one did not answer "
                f"({str(error).splitlines()[0]}): look at the log of the rank that ended first"
            ) from error


@functools.cache
def _all_ranks(world: int) -> Ranks:
    return Ranks()


def all_ranks() -> Ranks:
    """The ranks of the user's default group: one object for each such group, made by all ranks together."""
    return _all_ranks(id(dist.group.WORLD))
