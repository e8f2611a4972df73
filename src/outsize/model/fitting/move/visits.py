"""Weights on a visit: a unit's weights are on the device while its module runs, and the next unit's are on their way.

In: a model cut into units and a source of their bytes. Out: the same modules, running on the device. While a step runs
every parameter of the model is stood in for by a proxy, a parameter on the device whose data is a stretch of the ring
while its unit is there, and not-a-number otherwise, so that a use outside of its unit cannot pass unseen. The user's own
parameters stay at home on the host, in memory or in its scratch file; gradients arrive at the proxies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.model.fitting.move.mover import Mark, Mover
from outsize.model.fitting.move.pinned_blocks import Weights
from outsize.model.fitting.move.ring import Lease, Ring, aligned
from outsize.model.fitting.move.units import Cut, Place, Unit
from outsize.model.torch_port.objects import (
    buffer_table,
    flat_weights,
    norm_with_statistics,
    parameter_table,
    set_flat_weights,
    sizeof,
    storage_key,
    version_of,
)

AHEAD = 3
"""Units that may be on their way at once."""

SAMPLED = 1024
"""Elements of a parameter that are looked at to see whether it has changed."""


Seen = tuple[int, int, bytes]
"""Version, address and some bytes of a tensor."""


class Nested(InputError):
    """A unit runs inside of another unit's turn, and there is no room for both."""

    def __init__(self, unit: str) -> None:
        super().__init__(
            f"{unit} runs inside of another unit's turn, which a plan does not foresee: fit the model again"
        )
        self.unit = unit


class Source:
    """Where the bytes of units come from; this one has none, for tensors without contents."""

    ahead = True
    """Ask for units before they are needed."""

    def bring(self, unit: Unit, into: Any, after: list[Mark]) -> Mark:
        """Start to fill a unit's memory on the device; the mark passes when it is there."""

    def close(self) -> None:
        """Nothing is read any more."""


class HostSource(Source):
    def __init__(self, weights: Weights, mover: Mover) -> None:
        self._weights = weights
        self._mover = mover

    def bring(self, unit: Unit, into: Any, after: list[Mark]) -> Mark:
        """One copy for what is at home in the unit, one for each guest and where some of it is in the scratch file."""
        marks = []
        whole = self._weights.whole(unit)
        if whole is not None:
            marks.append(self._mover.bring(into[: unit.own], whole, after))
        for place in (*(unit.places if whole is None else ()), *unit.guests):
            there = into[place.offset : place.offset + place.size]
            marks.append(self._mover.bring(there, self._weights.bytes_of(place.parameter), after))
        return self._mover.join(marks)


class Visits:
    """The proxies of a model and the ring they point into."""

    def __init__(self, model: Any, cut: Cut, source: Source, mover: Mover, room: int, order: list[str]) -> None:
        self.cut = cut
        self.mover = mover
        self.order = order
        """Units as a forward pass meets them."""
        self.brought = 0
        """Bytes of weights that were asked for so far."""
        self.autocast = False
        """Some unit has run under autocast."""
        self._model = model
        self._source = source
        self._ring = Ring(mover.empty(aligned(room))) if cut.units else None
        self._held = mover.empty(cut.held.size) if cut.held.size else None
        self._versions: list[Seen] = []
        self._blanks: dict[Any, Any] = {}
        self.proxies: dict[int, Any] = {}
        self.frozen = {id(place.parameter) for place in cut.places() if not place.parameter.requires_grad}
        """ids of parameters for which no gradient was planned."""
        for place in cut.places():
            parameter = place.parameter
            nothing = torch.empty(0, dtype=parameter.dtype, device=mover.device)  # its own version counter
            proxy = torch.nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            proxy.data = self._blank(parameter)
            self.proxies[id(parameter)] = proxy
        self._leases: dict[str, Lease] = {}
        """Units on their way."""
        self._running: dict[str, Lease] = {}
        """Units in their forward pass."""
        self._cold: dict[str, Lease] = {}
        """Units that were here; their bytes may still be."""
        self._open: dict[str, Lease] = {}
        """Units in their backward pass."""
        self._alone: dict[int, Place] = {}
        """Parameters that are here in memory of their own."""
        self._sent: Mark = None
        self._position = 0
        self._calls: list[str] = []
        self._buffers: dict[int, tuple[Any, Seen, Any]] = {}
        self.given: dict[int, Any] = {}
        """Contents of buffers that have none, by id."""
        self.written: set[int] = set()
        """ids of the model's buffers that forward passes write."""

    def _blank(self, parameter: Any) -> Any:
        """Shape and device of a parameter, and nothing that can be computed with."""
        key = parameter.dtype
        if key not in self._blanks:
            nothing = float("nan") if key.is_floating_point or key.is_complex else 0
            self._blanks[key] = torch.full((), nothing, dtype=key, device=self.mover.device)
        return self._blanks[key].expand(parameter.shape)

    @property
    def blanks(self) -> set[int]:
        """Identities of the memory behind absent parameters."""
        return {storage_key(blank) for blank in self._blanks.values()}

    def is_here(self, parameter: Any) -> bool:
        """True where a parameter's proxy has its data."""
        return storage_key(self.proxies[id(parameter)]) not in self.blanks

    # the model's tables

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Proxies and device copies of buffers in the places of the model's own."""
        changed: list[tuple[dict[str, Any], str, Any]] = []
        flats: list[tuple[Any, list[Any]]] = []
        copies: list[tuple[Any, Any, int]] = []
        self._refresh_held()
        for module in self._model.modules():
            for name, parameter in parameter_table(module).items():
                if parameter is not None and id(parameter) in self.proxies:
                    changed.append((parameter_table(module), name, parameter))
                    self.proxies[id(parameter)].requires_grad_(parameter.requires_grad)
            for name, buffer in buffer_table(module).items():
                if buffer is not None:
                    changed.append((buffer_table(module), name, buffer))
                    copy = self._buffer(buffer)
                    copies.append((buffer, copy, version_of(copy)))
            flat = flat_weights(module)
            if flat is not None:
                flats.append((module, flat))
        for table, name, tensor in changed:
            table[name] = self.proxies.get(id(tensor), None) if id(tensor) in self.proxies else self._buffer(tensor)
        for module, flat in flats:
            set_flat_weights(module, [self.proxies.get(id(tensor), tensor) for tensor in flat])
        try:
            yield
        finally:
            self._give_back_buffers(copies)
            for table, name, tensor in changed:
                table[name] = tensor
            for module, flat in flats:
                set_flat_weights(module, flat)

    def _buffer(self, buffer: Any) -> Any:
        """A buffer's copy on the device, made again only when the buffer has changed."""
        kept, seen, copy = self._buffers.get(id(buffer), (None, None, None))
        now = self._look_at(buffer)
        if kept is not buffer or seen != now:
            if self.mover.real:
                copy = self.given.get(id(buffer), buffer).detach().to(self.mover.device, copy=True)
            else:
                copy = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.mover.device)
            self._buffers[id(buffer)] = (buffer, now, copy)
        return copy

    def _give_back_buffers(self, copies: list[tuple[Any, Any, int]]) -> None:
        """What a forward pass has written goes into the model's own buffers."""
        statistics = _find_statistics(self._model)
        for buffer, copy, version in copies:
            if version_of(copy) == version and id(copy) not in statistics:
                continue
            self.written.add(id(buffer))
            if self.mover.real:
                buffer.copy_(copy)
                self._buffers[id(buffer)] = (buffer, self._look_at(buffer), copy)

    def _refresh_held(self) -> None:
        """What stays on the device is brought again only where the user's own has changed."""
        held = self.cut.held
        if self._held is None:
            return
        versions = self._look_at_held()
        if versions != self._versions:
            self.mover.wait(self._source.bring(held, self._held, [self.mover.mark()]))
            self.brought += held.size
            self._versions = versions
            lease = Lease(0, held.size, self._held, [])
            for place in held.places:
                self._show(place, lease)

    def _look_at_held(self) -> list[Seen]:
        return [self._look_at(place.parameter) for place in self.cut.held.places]

    def _look_at(self, tensor: Any) -> Seen:
        """What tells a change of the user's own: `tensor.data` changes bytes and counts no version."""
        if not self.mover.real or tensor.is_meta:
            return version_of(tensor), 0, b""
        return version_of(tensor), tensor.data_ptr(), _sample(tensor)

    def remember_held(self) -> None:
        """What stays on the device was updated there and sent: the host has the same."""
        if self._versions:
            self._versions = self._look_at_held()

    def forget_held(self) -> None:
        """What stays on the device is not what the host has: bring it again."""
        self._versions = []

    # units

    def wrap(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with the unit's weights here for as long as it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._meet(unit)
            self.autocast |= torch.is_autocast_enabled(self.mover.device.type)
            if torch.is_grad_enabled():
                self._calls.append(unit.name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave(unit)

        return run

    def hold(self, unit: Unit, forward: Callable[..., Any], flush: Callable[[], None]) -> Callable[..., Any]:
        """`forward` in the backward pass: the weights come and stay until another unit's turn, before which `flush` is called."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if unit.name not in self._open:
                for name in list(self._open):
                    self._finish(name, flush)
                self._open[unit.name] = self._arrive(unit)
                self._prefetch(reversed(self._come_back(unit)))
            return forward(*args, **kwargs)

        return run

    def _come_back(self, unit: Unit) -> list[str]:
        """Calls before this one: the backward pass goes through them from the last to the first."""
        while self._calls and self._calls.pop() != unit.name:
            pass
        return self._calls[-AHEAD:]

    def _meet(self, unit: Unit) -> None:
        self._running[unit.name] = self._arrive(unit)
        order, at = self.order, self._position
        if at >= len(order) or order[at] != unit.name:
            at = order.index(unit.name) if unit.name in order else len(order)
        self._position = at + 1
        self._prefetch(iter(order[at + 1 : at + 1 + AHEAD]))

    def _leave(self, unit: Unit) -> None:
        torch.clear_autocast_cache()  # it would keep a copy of every unit's weights in the lower precision
        lease = self._running.pop(unit.name)
        for place in (*unit.places, *unit.guests):
            self._hide(place)
        lease.release(self.mover.mark())
        self._cold[unit.name] = lease

    def call_in(self, parameter: Any) -> None:
        """A parameter by itself, for an update after its unit has gone."""
        if self.is_here(parameter):
            return
        place = Place("", parameter, 0, sizeof(parameter))
        memory = self.mover.empty(place.size)
        alone = Unit("", None, guests=[place], size=place.size)
        self.mover.wait(self._source.bring(alone, memory, [self.mover.mark()]))
        self.brought += place.size
        self.show_alone(place, Lease(0, place.size, memory, []))

    def show_alone(self, place: Place, memory: Lease) -> None:
        """A parameter is on the device in memory of its own."""
        self._alone[id(place.parameter)] = place
        self._show(place, memory)

    def is_alone(self, parameter: Any) -> bool:
        """True where a parameter is here in memory of its own, which nobody holds when it has gone."""
        return id(parameter) in self._alone

    def hide_alone(self) -> None:
        """Parameters in memory of their own have left the device."""
        for place in self._alone.values():
            self._hide(place)
        self._alone.clear()

    def sent(self, mark: Mark) -> None:
        """Weights of an open unit are on their way to the host: their place is taken until then."""
        self._sent = mark

    def _finish(self, name: str, flush: Callable[[], None]) -> None:
        """The backward pass of a unit is over."""
        flush()
        lease = self._open.pop(name)
        unit = self.cut.units[name]
        for place in (*unit.places, *unit.guests):
            self._hide(place)
        lease.release(self.mover.mark(), self._sent)

    def end_pass(self, flush: Callable[[], None]) -> None:
        """A forward or backward pass is over: nothing is in use any more."""
        for name in list(self._open):
            self._finish(name, flush)
        flush()
        self.hide_alone()
        for lease in self._leases.values():
            lease.release(self.mover.mark(), lease.ready)
        self._leases.clear()
        self._cold.clear()
        self._calls.clear()
        self._position = 0

    def reset(self) -> None:
        """After a failure: nothing is here, nothing is under way."""
        self.mover.drain()
        for unit in self.cut.units.values():
            for place in (*unit.places, *unit.guests):
                self._hide(place)
        self.hide_alone()
        for table in (self._leases, self._running, self._open, self._cold):
            table.clear()
        self._calls.clear()
        self._position = 0
        self._versions = []
        if self._ring is not None:
            self._ring.clear()

    def leave_device(self) -> None:
        self._ring = self._held = None
        self._buffers.clear()
        for place in self.cut.held.places:
            self._hide(place)

    def _arrive(self, unit: Unit) -> Lease:
        """The unit's weights, here for what is computed from now on."""
        lease = self._leases.pop(unit.name, None)
        if lease is None:
            cold = self._cold.pop(unit.name, None)
            assert self._ring is not None
            lease = cold if cold is not None and self._ring.reopen(cold) else self._fetch(unit)
        if lease is None:
            for name in list(self._leases):  # what was asked for ahead makes room
                ahead = self._leases.pop(name)
                ahead.release(ahead.ready)
            lease = self._fetch(unit)
        if lease is None:
            raise Nested(unit.name)
        self.mover.wait(lease.ready)
        for place in (*unit.places, *unit.guests):
            self._show(place, lease)
        return lease

    def _fetch(self, unit: Unit) -> Lease | None:
        assert self._ring is not None
        lease = self._ring.take(unit.size)
        if lease is not None:
            lease.ready = self._source.bring(unit, lease.bytes[: unit.size], lease.waits)
            self.brought += unit.size
        return lease

    def _prefetch(self, names: Iterator[str]) -> None:
        if not self._source.ahead:
            return
        for name in names:
            if name in self._leases or name in self._open or name in self._running:
                continue
            cold = self._cold.get(name)
            assert self._ring is not None
            if cold is not None and self._ring.reopen(cold):
                self._leases[name] = self._cold.pop(name)
                continue
            lease = self._fetch(self.cut.units[name])
            if lease is None:
                return
            self._leases[name] = lease

    def _show(self, place: Place, lease: Lease) -> None:
        parameter = place.parameter
        data = lease.view(place.offset, tuple(parameter.shape), parameter.dtype)
        self.proxies[id(parameter)].data = data

    def _hide(self, place: Place) -> None:
        self.proxies[id(place.parameter)].data = self._blank(place.parameter)


def _sample(parameter: Any) -> bytes:
    """Bytes of a small parameter, of a large one those of elements all over it."""
    flat = parameter.detach().reshape(-1)
    return bytes(flat[:: max(1, flat.numel() // SAMPLED)].contiguous().view(torch.uint8).numpy())


def _find_statistics(model: Any) -> set[int]:
    """ids of buffers that norms write in a forward pass without saying so: torch does not count these writes."""

    norms = [
        m for m in model.modules() if isinstance(m, norm_with_statistics()) and m.training and m.track_running_stats
    ]
    return {id(buffer) for norm in norms for buffer in buffer_table(norm).values() if buffer is not None}
