"""The optimizer's part of a hosted step: where gradients go, and where parameters are updated.

In: the user's own optimizer over parameters in host memory, gradients as they arrive at the proxies on the device.
Out: the same update by the same code. `card`: as soon as a gradient is complete the parameter's state comes, the
optimizer steps on the proxy, parameter and state go back. `host`: the gradient goes to the host and the optimizer steps
there, beside the backward pass. `kept`: gradients wait on the host, for clipping, for a GradScaler, for users who step
themselves; then the whole optimizer steps there, or parameters visit the device once more (`Later`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import Homes, State, Weights, stretch
from outsize.model.fitting.move.ring import Lease, Ring, aligned
from outsize.model.fitting.move.units import Cut, Place, sizeof
from outsize.model.fitting.move.visits import Visits

if TYPE_CHECKING:
    from outsize.model.fitting.move.scratch_file import ScratchFile
    from outsize.model.fitting.run.clip_and_scale import Judge


class Sink:
    """Where gradients go."""

    changed = False
    """Some parameters have been updated in this step."""

    def begin(self) -> None:
        """A backward pass begins."""

    def accumulated(self, parameter: Any, proxy: Any) -> None:
        """A gradient is complete at its proxy."""
        raise AssertionError

    def flush(self) -> None:
        """What was put off is done now: the parameters leave the device."""

    def end(self) -> None:
        """The last backward pass of a step is over."""

    def reset(self) -> None:
        """A step has failed."""

    def close(self) -> None:
        """Give everything back."""


class Dropped(Sink):
    """Gradients go nowhere; a trace of a plan that updates on the host."""

    def __init__(self, mover: Mover | None = None) -> None:
        self._mover = mover

    def accumulated(self, parameter: Any, proxy: Any) -> None:
        """Nobody wants it; it is held for as long as its copy out would hold it."""
        if self._mover is not None and not self._mover.real:
            self._mover.send(None, proxy.grad, hold=True)
        proxy.grad = None


class OnCard(Sink):
    """Updates on the device, in the backward pass."""

    def __init__(
        self, optimizer: Any, visits: Visits, weights: Weights | None, state: State, mover: Mover, room: int, few: int,
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.rehearsing = False
        """Do everything and keep nothing."""
        self.order: list[Any] = []
        """Parameters as their gradients came last time."""
        self.brought = 0
        """Bytes of state that were asked for so far."""
        self._visits = visits
        self._weights = weights
        self._state = state
        self._mover = mover
        self._ring = Ring(mover, room)
        self._real = mover.real
        self._few = few
        self._coming: dict[int, Lease] = {}
        self._waiting: list[tuple[Any, Any]] = []
        self._seen: list[Any] = []
        self._next = 0

    def begin(self) -> None:
        """State of the first few starts to come."""
        self._prefetch()

    def accumulated(self, parameter: Any, proxy: Any) -> None:
        """Update now, or with the next ones where it is small."""
        if sizeof(proxy) >= self._few:
            self.flush()
        self._waiting.append((parameter, proxy))
        if sum(sizeof(proxy) for _, proxy in self._waiting) >= self._few:
            self.flush()

    @property
    def waits(self) -> bool:
        """Some parameters wait for others to be updated with."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Update those that wait."""
        rows, self._waiting = self._waiting, []
        if rows:
            self._visit(rows)

    def end(self) -> None:
        """Everything is back on the host when this returns."""
        self.flush()
        for lease in self._coming.values():
            lease.release(lease.ready)
        self._coming.clear()
        self.order, self._seen, self._next = self._seen, [], 0
        self._mover.drain()
        self.changed = False

    def reset(self) -> None:
        """What waits is let go."""
        for _, proxy in self._waiting:
            proxy.grad = None
        for proxy in self._visits.proxies.values():
            self.optimizer.state.pop(proxy, None)
        self._waiting.clear()
        self._coming.clear()
        self._seen, self._next = [], 0
        self._ring.clear()
        self.changed = False

    def _visit(self, rows: list[tuple[Any, Any]]) -> None:
        optimizer = self.optimizer
        leases = {}
        for parameter, proxy in rows:
            self._seen.append(parameter)
            self._visits.call_in(parameter)
            kept = optimizer.state.get(parameter)
            if kept:
                lease = leases[id(parameter)] = self._arrive(parameter)
                shapes = {s.name: s for s in self._state.layout.get(id(parameter), [])}
                optimizer.state[proxy] = {
                    name: self._bring_one(value, shapes.get(name), lease) for name, value in kept.items()
                }
        self.changed = not self.rehearsing
        standing(optimizer, rows)
        for parameter, proxy in rows:
            made = optimizer.state.pop(proxy, None)
            if not self.rehearsing:
                self._send(parameter, proxy, made, leases.get(id(parameter)))
            elif id(parameter) in leases:
                leases[id(parameter)].release(self._mover.mark())
            proxy.grad = None
        self._prefetch()

    def _bring_one(self, value: Any, shape: Any, lease: Lease) -> Any:
        """A state tensor on the device; what does not travel is the optimizer's own, or a copy of it in a rehearsal."""
        import torch

        if shape is not None:
            return lease.view(shape.offset, shape.shape, shape.dtype)
        return value.clone() if self.rehearsing and isinstance(value, torch.Tensor) else value

    def _send(self, parameter: Any, proxy: Any, made: Any, lease: Lease | None) -> None:
        """Parameter and state go back to the host."""
        mover, state = self._mover, self._state
        if self._weights is not None:
            home, alone = self._weights.bytes_of(parameter), self._visits.is_alone(parameter)
            self._visits.sent(mover.send(home, flat_bytes(proxy.detach(), mover), hold=alone))
        if not made:
            return
        shapes = {shape.name: shape for shape in state.layout.get(id(parameter), [])}
        if lease is None and shapes:  # the first time: from the ring, so that no other memory waits for a copy
            lease = self._room(parameter)
            for name, shape in shapes.items():
                lease.view(shape.offset, shape.shape, shape.dtype).copy_(made[name])
        if lease is not None:
            mark = (
                mover.send(state.bytes_of(parameter), lease.bytes[: stretch(list(shapes.values()))])
                if self._real
                else None
            )
            lease.release(mover.mark(), mark)
        if not self._real:
            self.optimizer.state[parameter] = {n: None if n in shapes else value for n, value in made.items()}
            return
        homes = state.tensors(parameter)
        self.optimizer.state[parameter] = {name: homes.get(name, value) for name, value in made.items()}

    # state on its way

    def _arrive(self, parameter: Any) -> Lease:
        lease = self._coming.pop(id(parameter), None) or self._fetch(parameter)
        if lease is None:
            self._make_room()
            lease = self._fetch(parameter)
        assert lease is not None, "the ring holds the state of any few parameters"
        self._mover.wait(lease.ready)
        return lease

    def _room(self, parameter: Any) -> Lease:
        """Room for a parameter's state, to be written by what is computed next."""
        size = stretch(self._state.layout.get(id(parameter), []))
        lease = self._ring.take(size)
        if lease is None:
            self._make_room()
            lease = self._ring.take(size)
        assert lease is not None, "the ring holds the state of any few parameters"
        for mark in lease.waits:
            self._mover.wait(mark)
        return lease

    def _make_room(self) -> None:
        """What was asked for ahead goes."""
        for key in list(self._coming):
            ahead = self._coming.pop(key)
            ahead.release(ahead.ready)
        self._next = len(self.order)

    def _fetch(self, parameter: Any) -> Lease | None:
        size = stretch(self._state.layout.get(id(parameter), []))
        lease = self._ring.take(size)
        if lease is not None and self._real:
            lease.ready = self._mover.bring(lease.bytes, self._state.bytes_of(parameter), lease.waits)
        if lease is not None:
            self.brought += size
        return lease

    def _prefetch(self) -> None:
        """As much as the ring takes, in the order of last time."""
        while self._next < len(self.order):
            parameter = self.order[self._next]
            known = id(parameter) in self._coming or any(parameter is seen for seen in self._seen[-64:])
            if self.optimizer.state.get(parameter) and not known:
                lease = self._fetch(parameter)
                if lease is None:
                    return
                self._coming[id(parameter)] = lease
            self._next += 1


def standing(optimizer: Any, rows: list[tuple[Any, Any]]) -> None:
    """One `optimizer.step()` in which proxies stand for the parameters of `rows` and the others are out of sight."""
    proxies = {id(parameter): proxy for parameter, proxy in rows}
    before = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [proxies[id(p)] for p in parameters if id(p) in proxies]
    try:
        optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def flat_bytes(tensor: Any, mover: Mover) -> Any:
    """A dense tensor's elements as flat bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8) if mover.real else tensor


class OnHost(Sink):
    """Updates on the host by a thread of its own, beside the backward pass."""

    def __init__(self, optimizer: Any, mover: Mover, room: int) -> None:
        self.optimizer = optimizer
        self.rehearsing = False
        self._mover = mover
        self._room = HostRing(room)
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def accumulated(self, parameter: Any, proxy: Any) -> None:
        """The gradient starts for the host; the update follows when it is there."""
        gradient, proxy.grad = proxy.grad, None
        start, memory = self._room.take(sizeof(gradient))
        here = memory.tensor(start, tuple(gradient.shape), gradient.dtype)
        mark = self._mover.send(
            flat_bytes(here, self._mover), flat_bytes(gradient.detach().contiguous(), self._mover), hold=True
        )
        if self.rehearsing:
            self._mover.sync(mark)
            self._room.give(start)
            return
        self.changed = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="outsize-update", daemon=True)
            self._thread.start()
        self._tasks.put((parameter, here, mark, start))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            parameter, gradient, mark, start = task
            try:
                if self._failure is None:
                    self._mover.sync(mark)
                    parameter.grad = gradient
                    standing(self.optimizer, [(parameter, parameter)])
            except BaseException as error:
                self._failure = error
            parameter.grad = None
            self._room.give(start)

    def end(self) -> None:
        """Every parameter is updated when this returns."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.changed = False

    def _join(self) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        self._mover.drain()

    def reset(self) -> None:
        """What is under way ends."""
        self._join()
        self._failure = None
        self.changed = False

    def close(self) -> None:
        """The memory is ordinary again."""
        self._room.block.unlock()


class HostRing:
    """Page-locked memory through which gradients pass in turn; who finds no room waits."""

    def __init__(self, size: int) -> None:
        self.block = Block(aligned(size))
        self._size = aligned(size)
        self._taken: dict[int, int] = {}
        self._head = 0
        self._change = threading.Condition()

    def take(self, size: int) -> tuple[int, Block]:
        """(where it begins, the memory) of a free stretch."""
        size = aligned(size)
        with self._change:
            found: list[int] = []
            self._change.wait_for(lambda: self._find(size, found))
            start = found[-1]
            self._taken[start] = start + size
            self._head = start + size
            return start, self.block

    def _find(self, size: int, found: list[int]) -> bool:
        for start in (self._head, 0):
            stop = start + size
            if stop <= self._size and not any(a < stop and start < b for a, b in self._taken.items()):
                found.append(start)
                return True
        return False

    def give(self, start: int) -> None:
        """The stretch is free."""
        with self._change:
            del self._taken[start]
            self._change.notify_all()


class Gradients(Homes):
    """Where gradients wait."""

    kind = "gradients"

    def _size(self, place: Place) -> int:
        return place.size if place.parameter.requires_grad else 0


class Kept(Sink):
    """Gradients wait at home until all are there."""

    def __init__(
        self,
        cut: Cut,
        mover: Mover,
        filed: Collection[int] = (),
        scratch: ScratchFile | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.judge = judge
        """Sees every gradient before it goes."""
        self._mover = mover
        self._here: list[tuple[Any, Any]] = []
        """(parameter, its gradient's bytes)."""
        self._homes = Gradients(cut, filed, scratch)

    def accumulated(self, parameter: Any, proxy: Any) -> None:
        """Out."""
        if self.judge is not None and self._mover.real:
            self.judge.see(parameter, proxy)
        gradient, proxy.grad = proxy.grad.detach().contiguous(), None
        if not self._mover.real:
            self._mover.send(None, gradient, hold=True)
            self._here.append((parameter, None))
            return
        home = self._homes.bytes_of(parameter)
        self._mover.send(home, flat_bytes(gradient, self._mover), hold=True)
        self._here.append((parameter, home))

    def hand_over(self) -> list[tuple[Any, Any]]:
        """Every parameter and its gradient's bytes, once all are at home."""
        self._mover.drain()
        rows, self._here = self._here, []
        return rows

    def tensor(self, parameter: Any) -> Any:
        """The gradient of a parameter, in memory."""
        return self._homes.tensor(parameter, 0, tuple(parameter.shape), parameter.dtype)

    def reset(self) -> None:
        """Gradients of a failed step are let go."""
        self._mover.drain()
        self._here = []
        self.changed = False
        if self.judge is not None:
            self.judge.reset()

    def close(self) -> None:
        """The memory is ordinary again."""
        self._homes.unlock()


class Collected(Sink):
    """Copies of all gradients, on the device: to compare a small model's with the plain ones."""

    def __init__(self) -> None:
        self.gradients: dict[int, Any] = {}

    def accumulated(self, parameter: Any, proxy: Any) -> None:
        """Keep it."""
        self.gradients[id(parameter)] = proxy.grad.detach().clone()
        proxy.grad = None
