"""The update of a model that visits a device, on the device.

In: the user's own optimizer over parameters in host memory, gradients at the proxies. Out: the same update by the same code: as
soon as a gradient is complete the parameter's state comes, the optimizer steps on the proxy, parameter and state go back. Where
something has to see all gradients first (clipping), they have waited on the host, and come once more with their parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.fitting.move.mover import Mark, Mover
from outsize.model.fitting.move.pinned_blocks import State, Weights, state_bytes
from outsize.model.fitting.move.ring import Lease, Ring, aligned
from outsize.model.fitting.move.units import Place
from outsize.model.fitting.move.visits import Visits
from outsize.model.fitting.update.gradient_sink import Sink, flat_bytes
from outsize.model.fitting.update.optimizer_subset import drop_gradients, step_only
from outsize.model.torch_port.objects import sizeof


class UpdateOnCard(Sink):
    """Updates proxies on the device."""

    eager = True

    def __init__(
        self, optimizer: Any, visits: Visits, weights: Weights | None, state: State, mover: Mover, room: int, few: int,
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.order: list[Any] = []
        """Parameters as their gradients came last time."""
        self.brought = 0
        """Bytes of state that were asked for so far."""
        self._visits = visits
        self._weights = weights
        self._state = state
        self._mover = mover
        self._ring = Ring(mover.empty(aligned(room)))
        self._real = mover.real
        self._few = few
        self._coming: dict[int, Lease] = {}
        self._waiting: list[tuple[Any, Any]] = []
        self._seen: list[Any] = []
        self._next = 0

    def begin_step(self) -> None:
        """State that the optimizer brought along, or that was loaded, goes home."""
        drop_gradients(self.optimizer)
        if self._real:
            self._state.move_in(self.optimizer)

    def begin(self) -> None:
        self._prefetch()

    def accumulated(self, parameter: Any, holder: Any) -> None:
        """Update now, or with the next ones where it is small."""
        if sizeof(holder) >= self._few:
            self.flush()
        self._waiting.append((parameter, holder))
        if sum(sizeof(proxy) for _, proxy in self._waiting) >= self._few:
            self.flush()

    def flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if rows:
            self._visit(rows)

    def finish(self, scale: Any) -> None:
        """Everything is back on the host when this returns."""
        self.flush()
        for lease in self._coming.values():
            lease.release(lease.ready)
        self._coming.clear()
        self.order, self._seen, self._next = self._seen, [], 0
        self._mover.drain()
        self._changed = False
        if self.rehearsing:
            self._visits.forget_held()  # it was updated, and nothing of that stays
        elif self._real:
            self._visits.remember_held()

    def roll_back(self) -> None:
        for _, proxy in self._waiting:
            proxy.grad = None
        for proxy in self._visits.proxies.values():
            self.optimizer.state.pop(proxy, None)
        self._waiting.clear()
        self._coming.clear()
        self._seen, self._next = [], 0
        self._ring.clear()
        self._changed = False

    # gradients that wait on the host because something had to see all of them

    def update_all(self, rows: list[tuple[Any, Any]], factor: Any) -> None:
        """Update every (parameter, its gradient's bytes): both visit, the next while one is updated. Gradients are multiplied by
        `factor` first."""
        self.begin()
        coming = self._start(*rows[0]) if rows else None
        for number, (parameter, _) in enumerate(rows):
            assert coming is not None
            here, mark = coming
            coming = self._start(*rows[number + 1]) if number + 1 < len(rows) else None
            self._mover.wait(mark)
            if not self._visits.is_here(parameter):
                place = Place("", parameter, aligned(sizeof(parameter)), sizeof(parameter))
                self._visits.show_alone(place, here)
            proxy = self._visits.proxies[id(parameter)]
            proxy.grad = here.view(0, tuple(parameter.shape), parameter.dtype)
            if factor is not None:
                proxy.grad.mul_(factor)
            self.accumulated(parameter, proxy)
            if not self._waiting:
                self._visits.hide_alone()
        self.finish(None)
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

    # one visit

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
        self._changed = not self.rehearsing
        step_only(optimizer, rows)
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
                mover.send(state.bytes_of(parameter), lease.bytes[: state_bytes(list(shapes.values()))])
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
        size = state_bytes(self._state.layout.get(id(parameter), []))
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
        size = state_bytes(self._state.layout.get(id(parameter), []))
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
