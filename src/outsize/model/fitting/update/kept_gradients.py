"""Gradients of a model that visits a device, which wait on the host until all are there.

In: gradients at the proxies. Out: for clipping and a GradScaler, an update once all have been seen, by the optimizer on the host
or on the device (`UpdateOnCard.update_all`); for users who step themselves, gradients at their parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import HostTensors
from outsize.model.fitting.move.scratch_file import ScratchFile
from outsize.model.fitting.move.units import Cut, Place
from outsize.model.fitting.update.clip_and_scale import GradientCheck
from outsize.model.fitting.update.gradient_sink import Sink, add_gradient, flat_bytes
from outsize.model.fitting.update.update_on_card import UpdateOnCard


class Gradients(HostTensors):
    """Where gradients wait."""

    kind = "gradients"

    def _size(self, place: Place) -> int:
        return place.size if place.parameter.requires_grad else 0


class KeptGradients(Sink):
    """Gradients wait on the host, then parameters are updated."""

    def __init__(
        self, optimizer: Any, cut: Cut, mover: Mover, check: GradientCheck | None, on_card: UpdateOnCard | None,
        filed: Collection[int] = (), scratch: ScratchFile | None = None,
    ) -> None:  # fmt: skip
        """`on_card`: updates on the device, None: the optimizer steps on the host."""
        self.on_card = on_card
        self._optimizer = optimizer
        self._check = check
        self._mover = mover
        self._here: list[tuple[Any, Any]] = []
        """(parameter, its gradient's bytes)."""
        self._homes = Gradients(cut, filed, scratch)

    @property
    def half_updated(self) -> bool:
        return self._changed or (self.on_card is not None and self.on_card.half_updated)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        with super().rehearsal(), self.on_card.rehearsal() if self.on_card is not None else contextlib.nullcontext():
            yield

    def begin_step(self) -> None:
        """Gradients from before are no part of it."""
        if self.on_card is not None:
            self.on_card.begin_step()
        else:
            self._optimizer.zero_grad(set_to_none=True)

    def scale(self, loss: Any) -> Any:
        """As the user's scaler does."""
        return loss if self._check is None or self.rehearsing else self._check.scale(loss)

    def accumulated(self, parameter: Any, holder: Any) -> None:
        if self._check is not None and not self.rehearsing:
            self._check.see(parameter, holder)
        self.send(parameter, holder)

    def send(self, parameter: Any, holder: Any) -> None:
        """A gradient starts for the host."""
        gradient, holder.grad = holder.grad.detach().contiguous(), None
        home = self._homes.bytes_of(parameter) if self._mover.real else None
        self._mover.send(home, flat_bytes(gradient, self._mover), hold=True)
        self._here.append((parameter, home))

    def take_all(self) -> list[tuple[Any, Any]]:
        """Every parameter and its gradient's bytes, once all are on the host."""
        self._mover.drain()
        rows, self._here = self._here, []
        return rows

    def tensor(self, parameter: Any) -> Any:
        """The gradient of a parameter, in memory."""
        return self._homes.tensor(parameter, 0, tuple(parameter.shape), parameter.dtype)

    def finish(self, scale: Any) -> None:
        """Skip, or clip and update; in a rehearsal only what is updated on the device."""
        rows = self.take_all()
        factor = None
        if self._check is not None and not self.rehearsing:
            factor = self._check.factor()
            rows = self._leave_others(rows, self._check.mine, factor)
            if self._check.skips():
                return
        if self.on_card is not None:
            self.on_card.update_all(rows, factor)
        elif not self.rehearsing:
            self._update_here(rows, factor)

    def _update_here(self, rows: list[tuple[Any, Any]], factor: Any) -> None:
        for parameter, _ in rows:
            parameter.grad = self.tensor(parameter)
            if factor is not None:
                parameter.grad.mul_(factor.cpu())
        self._changed = True
        self._optimizer.step()
        self._changed = False
        self._optimizer.zero_grad(set_to_none=True)

    def _leave_others(self, rows: list[tuple[Any, Any]], mine: set[int], factor: Any) -> list[tuple[Any, Any]]:
        """Gradients of parameters that are not the optimizer's add up as without us; the other rows."""
        for parameter in (parameter for parameter, _ in rows if id(parameter) not in mine):
            gradient = self.tensor(parameter)
            add_gradient(parameter, gradient if factor is None else gradient.mul_(factor.cpu()))
        return [row for row in rows if id(row[0]) in mine]

    def roll_back(self) -> None:
        """Gradients of a failed step are let go."""
        self._mover.drain()
        self._here = []
        self._changed = False
        if self._check is not None:
            self._check.reset()
        if self.on_card is not None:
            self.on_card.roll_back()

    def close(self) -> None:
        """The memory is ordinary again."""
        self._homes.unlock()


class HandedOver(Sink):
    """Gradients go to the host and are added to those at their parameters; the user steps."""

    def __init__(self, kept: KeptGradients, scaler: Any) -> None:
        self._kept = kept
        self._scaler = scaler

    def scale(self, loss: Any) -> Any:
        """As the user's scaler does; the user does the rest."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def accumulated(self, parameter: Any, holder: Any) -> None:
        self._kept.send(parameter, holder)

    def finish(self, scale: Any) -> None:
        for parameter, _ in self._kept.take_all():
            add_gradient(parameter, self._kept.tensor(parameter))

    def roll_back(self) -> None:
        self._kept.roll_back()
