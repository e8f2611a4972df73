"""The update after the backward pass, on the device: parameters and their gradients visit once more, with their state.

In: gradients that wait on the host because something had to see all of them (clipping). Out: updated parameters, by the
user's own optimizer a few at a time. The next parameter comes while one is updated.
"""

from __future__ import annotations

from typing import Any

from outsize.model.fitting.move.mover import Mark, Mover
from outsize.model.fitting.move.pinned_blocks import Weights
from outsize.model.fitting.move.ring import Lease, aligned
from outsize.model.fitting.move.units import Place, sizeof
from outsize.model.fitting.move.visits import Visits
from outsize.model.fitting.run.hosted_optimizer_step import OnCard


class Later:
    """Runs an `OnCard` update over gradients on the host."""

    def __init__(self, update: OnCard, visits: Visits, weights: Weights | None, mover: Mover) -> None:
        self.update = update
        self._visits = visits
        self._weights = weights
        self._mover = mover
        self._factor: Any = None

    def run(self, rows: list[tuple[Any, Any]], factor: Any) -> None:
        """Update every (parameter, its gradient's bytes); gradients are multiplied by `factor` first."""
        self.update.begin()
        self._factor = factor
        coming = self._start(*rows[0]) if rows else None
        for number, (parameter, _) in enumerate(rows):
            assert coming is not None
            here, mark = coming
            coming = self._start(*rows[number + 1]) if number + 1 < len(rows) else None
            self._mover.wait(mark)
            self._visit(parameter, here)
        self.update.end()
        self._visits.hide_alone()

    def _start(self, parameter: Any, gradient: Any) -> tuple[Lease, Mark]:
        """Gradient and parameter on their way."""
        mover, size = self._mover, sizeof(parameter)
        memory = mover.empty(2 * aligned(size))
        now = mover.mark()
        marks = []
        if gradient is not None:
            marks.append(mover.bring(memory[:size], gradient, [now]))
        if self._weights is not None and not self._visits.is_here(parameter):
            there = memory[aligned(size) : aligned(size) + size]
            marks.append(mover.bring(there, self._weights.bytes_of(parameter), [now]))
        return Lease(0, memory.numel(), memory, []), mover.join(marks)

    def _visit(self, parameter: Any, here: Lease) -> None:
        proxy = self._visits.proxies[id(parameter)]
        if not self._visits.is_here(parameter):
            self._visits.show_alone(Place("", parameter, aligned(sizeof(parameter)), sizeof(parameter)), here)
        proxy.grad = here.view(0, tuple(parameter.shape), parameter.dtype)
        if self._factor is not None:
            proxy.grad.mul_(self._factor)
        self.update.accumulated(parameter, proxy)
        if not self.update.waits:
            self._visits.hide_alone()
