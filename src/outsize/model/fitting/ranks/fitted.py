"""A step that stays inside its budget on every rank, as the user holds it.

In: a plan that all ranks agreed on. Out: `RankedFitted`, the same object as without ranks; what a step held is the most that any
rank held, so that all come to the same conclusions.
"""

from __future__ import annotations

from typing import Any

from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.ranks.agreement import Ranks
from outsize.model.torch_port.sharding import local_part


class RankedFitted(Fitted):
    """What `outsize.fit` returns on each rank."""

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self.rank_peaks: list[int] = []
        """Peak of the last step on each rank, by number."""
        if self._used.runner is not None:
            self._used.runner.spread.pausing = self._meter.apart
        self._faster.watched = 0  # by times, which every rank would measure otherwise

    def _held(self, batch: Any) -> list[Any]:
        return [local_part(tensor) for tensor in super()._held(batch)]

    def _judge(self) -> None:
        """The highest of all ranks counts."""
        table = self._ranks.tell([max(self._windows, default=0)])
        self.rank_peaks = [int(peak) for (peak,) in table]
        self._windows = [max(self.rank_peaks)] if max(self.rank_peaks) else []
        super()._judge()
