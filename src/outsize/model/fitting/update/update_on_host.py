"""The update of a model that visits a device, on the host.

In: the user's own optimizer over parameters in host memory, gradients at the proxies on the device. Out: the same update by the
same code: a gradient goes to the host, through a little page-locked memory, and the optimizer steps there.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.ring import aligned
from outsize.model.fitting.move.units import sizeof
from outsize.model.fitting.update.gradient_sink import Sink, flat_bytes
from outsize.model.fitting.update.optimizer_subset import step_only


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
        """Gradients from before are no part of it."""
        self.optimizer.zero_grad(set_to_none=True)

    def accumulated(self, parameter: Any, holder: Any) -> None:
        """The gradient starts for the host; the update follows when it is there."""
        gradient, holder.grad = holder.grad, None
        start, memory = self._room.take(sizeof(gradient))
        here = memory.tensor(start, tuple(gradient.shape), gradient.dtype)
        mark = self._mover.send(
            flat_bytes(here, self._mover), flat_bytes(gradient.detach().contiguous(), self._mover), hold=True
        )
        if self.rehearsing:
            self._mover.sync(mark)
            self._room.give(start)
            return
        self._changed = True
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
                    step_only(self.optimizer, [(parameter, parameter)])
            except BaseException as error:
                self._failure = error
            parameter.grad = None
            self._room.give(start)

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
        """What is under way ends."""
        self._join()
        self._failure = None
        self._changed = False

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
        """A stretch may be taken again."""
        with self._change:
            del self._taken[start]
            self._change.notify_all()
