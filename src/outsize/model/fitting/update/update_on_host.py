"""Gradients of a model that visits a device, which go to the host.

In: the user's own optimizer over parameters in host memory, gradients at the proxies on the device. Out: the same update by the
same code. `UpdateOnHost` steps there as each gradient comes, through a little page-locked memory. With `KeptGradients` they wait
until all are there, for clipping and a GradScaler, and the update runs on the host or on the device
(`UpdateOnCard.update_all`); `HandedOver` leaves them at their parameters for users who step themselves.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection, Iterator
from typing import Any

from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import HostTensors
from outsize.model.fitting.move.ring import Lease, Ring, aligned
from outsize.model.fitting.move.scratch_file import ScratchFile
from outsize.model.fitting.move.units import Cut, Place
from outsize.model.fitting.update.clip_and_scale import GradientCheck
from outsize.model.fitting.update.gradient_sink import Sink, add_gradient, flat_bytes
from outsize.model.fitting.update.optimizer_subset import drop_gradients, step_only
from outsize.model.fitting.update.update_on_card import UpdateOnCard
from outsize.model.torch_port.objects import sizeof


class UpdateOnHost(Sink):
    """Updates by a thread of its own, beside the backward pass."""

    eager = True

    def __init__(self, optimizer: Any, mover: Mover, room: int) -> None:
        self.optimizer = optimizer
        self._mover = mover
        self._room = HostRing(room)
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin_step(self) -> None:
        drop_gradients(self.optimizer)

    def accumulated(self, parameter: Any, holder: Any) -> None:
        """The gradient starts for the host; the update follows when it is there."""
        gradient, holder.grad = holder.grad, None
        lease = self._room.take(sizeof(gradient))
        source = flat_bytes(gradient.detach().contiguous(), self._mover)
        mark = self._mover.send(lease.bytes[: sizeof(gradient)], source, hold=True)
        if self.rehearsing:
            self._mover.sync(mark)
            self._room.give(lease)
            return
        self._changed = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="outsize-update", daemon=True)
            self._thread.start()
        self._tasks.put((parameter, lease, mark))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            parameter, lease, mark = task
            try:
                if self._failure is None:
                    self._mover.sync(mark)
                    parameter.grad = lease.view(0, tuple(parameter.shape), parameter.dtype)
                    step_only(self.optimizer, [(parameter, parameter)])
            except BaseException as error:
                self._failure = error
            parameter.grad = None
            self._room.give(lease)

    def finish(self, scale: Any) -> None:
        """Every parameter is updated when this returns."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._changed = False

    def _join(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        self._mover.drain()

    def roll_back(self) -> None:
        self._join()
        self._failure = None
        self._changed = False

    def close(self) -> None:
        self._room.block.unlock()


class HostRing:
    """Page-locked memory through which gradients pass in turn; who finds no room waits."""

    def __init__(self, size: int) -> None:
        self.block = Block(aligned(size))
        self._ring = Ring(self.block.bytes)
        self._change = threading.Condition()

    def take(self, size: int) -> Lease:
        with self._change:
            while (lease := self._ring.take(size)) is None:
                self._change.wait()
            return lease

    def give(self, lease: Lease) -> None:
        with self._change:
            lease.release()
            self._change.notify_all()


class Gradients(HostTensors):
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
            drop_gradients(self._optimizer)

    def scale(self, loss: Any) -> Any:
        return loss if self._check is None or self.rehearsing else self._check.scale(loss)

    def accumulated(self, parameter: Any, holder: Any) -> None:
        if self._check is not None and not self.rehearsing:
            self._check.see(parameter, holder)
        self.send(parameter, holder)

    def send(self, parameter: Any, holder: Any) -> None:
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
        self._changed, self.done = False, True
        drop_gradients(self._optimizer)

    def _leave_others(self, rows: list[tuple[Any, Any]], mine: set[int], factor: Any) -> list[tuple[Any, Any]]:
        """Gradients of parameters that are not the optimizer's add up as without us; the other rows."""
        for parameter in (parameter for parameter, _ in rows if id(parameter) not in mine):
            gradient = self.tensor(parameter)
            add_gradient(parameter, gradient if factor is None else gradient.mul_(factor.cpu()))
        return [row for row in rows if id(row[0]) in mine]

    def roll_back(self) -> None:
        self._mover.drain()
        self._here = []
        self._changed = False
        if self._check is not None:
            self._check.reset()
        if self.on_card is not None:
            self.on_card.roll_back()

    def close(self) -> None:
        self._homes.unlock()


class HandedOver(Sink):
    """Gradients go to the host and are added to those at their parameters; the user steps."""

    def __init__(self, kept: KeptGradients, scaler: Any) -> None:
        self._kept = kept
        self.scaler = scaler

    def accumulated(self, parameter: Any, holder: Any) -> None:
        self._kept.send(parameter, holder)

    def roll_back(self) -> None:
        self._kept.roll_back()

    def finish(self, scale: Any) -> None:
        for parameter, _ in self._kept.take_all():
            add_gradient(parameter, self._kept.tensor(parameter))
