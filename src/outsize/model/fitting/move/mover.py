"""The way between a device and where bytes wait: copies in, copies out, and what waits for what.

In: flat byte tensors on both sides. Out: `Mark`s, moments that later copies, kernels or the host can wait for. On a card
there is a stream for each direction, so that both directions of the link and the kernels run at once; nothing here makes the
host wait but `sync`, `drain` and a `Leaving` that is told to. On a CPU a copy is done when the call returns. What has no
contents is not copied, and held for as long as a card would hold it. `scratch_file.FileMover` adds a file to any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

Mark = Any
"""A moment on a device; None: it has passed already."""

Landed = Callable[[], None]
"""What is done when a copy out has ended for all that follows."""

LEAVING = 2
"""Tensors that are held at once while they are copied out, where the host waits for them."""


class Leaving:
    """What is copied out, oldest first: it is held until its copy has ended, and not too much of it at once.

    Where `tensors` are counted, the host waits for the oldest, and lets go of what it sees ended. Where bytes are counted,
    what is computed next waits for it: so memory is used again in the order of that stream, at a moment that does not depend
    on how far the host is ahead.
    """

    def __init__(self, tensors: int | None = None, size: int = 0) -> None:
        self.size = size
        """Most bytes; of copies that run beside kernels one is left, however large."""
        self._tensors = tensors
        self._on_way = 0
        self._rows: deque[tuple[Any, Mark, Landed | None, int]] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def hold(self, mover: Mover, source: Any, mark: Mark, landed: Landed | None = None) -> None:
        """A copy has begun, which ends at `mark`; the oldest ones are waited for where there are too many."""
        size = source.numel() * source.element_size()
        self._rows.append((source, mark, landed, size))
        self._on_way += size
        while self._rows and self._is_too_much():
            self._land_oldest(mover)

    def _is_too_much(self) -> bool:
        if self._tensors is None:
            return self._on_way > self.size and len(self._rows) > (self.size > 0)
        mark = self._rows[0][1]
        return len(self._rows) > self._tensors or (mark is not None and mark.query())

    def _land_oldest(self, mover: Mover) -> None:
        _, mark, landed, size = self._rows.popleft()
        self._on_way -= size
        (mover.wait if self._tensors is None else mover.sync)(mark)
        if landed is not None:
            landed()

    def land(self, mover: Mover) -> None:
        """All of it has ended, for what follows."""
        while self._rows:
            self._land_oldest(mover)

    def clear(self) -> None:
        """All of it has ended, as the host knows."""
        self._rows.clear()
        self._on_way = 0


class Mover:
    """The way to a device; this one is the host itself, so that a copy is made in the call."""

    real = True
    """False where tensors have no contents: nothing is copied."""

    def __init__(self, device: Any, leaving: Leaving | None = None) -> None:
        self.device = device
        """The torch device on which modules run."""
        self.leaving = Leaving() if leaving is None else leaving
        """What is held until it has been copied out."""

    def empty(self, size: int) -> Any:
        """A flat byte tensor on the device, of torch's allocator."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """Host to device, once `after` have passed; the mark passes when it is there."""
        self.copy(into, source)

    def send(
        self, into: Any, source: Any, hold: bool = False, after: Iterable[Mark] = (), landed: Landed | None = None
    ) -> Mark:
        """Device to host, once `after` and what is computed so far have ended; the mark passes when it is there.

        `hold`: the source is not anybody's any more, keep it until it is there, then call `landed()`.
        """
        self.copy(into, source)
        if hold:
            self.leaving.hold(self, source, None, landed)

    def copy(self, into: Any, source: Any) -> None:
        """Host to host, at once."""
        into.copy_(source)

    def join(self, marks: list[Mark]) -> Mark:
        """Passes when all copies in, given in the order they were begun, are there: they end in that order."""
        return marks[-1] if marks else None

    def mark(self) -> Mark:
        """Passes when what is computed so far has ended."""

    def wait(self, mark: Mark) -> None:
        """What is computed from now on waits for a mark."""

    def sync(self, mark: Mark) -> None:
        """The host waits for a mark."""

    def drain(self) -> None:
        """The host waits for everything."""
        self.leaving.clear()


class NoMover(Mover):
    """For tensors without contents: the same calls, nothing is copied; what a card would hold is held."""

    real = False

    def __init__(self, device: Any, leaving: Leaving | None = None) -> None:
        super().__init__(device, Leaving(LEAVING) if leaving is None else leaving)

    def copy(self, into: Any, source: Any) -> None:
        """There is nothing to copy."""


class CardMover(Mover):
    """A CUDA device, whose neighbour is page-locked host memory.

    A copy out begins after all that the kernels' stream was given before it, so what it reads is written. A copy in begins
    after the marks that it is given; the memory that it fills must be nobody's by then.
    """

    def __init__(self, device: Any, leaving: Leaving | None = None) -> None:
        super().__init__(device, Leaving(LEAVING) if leaving is None else leaving)
        self._in = torch.cuda.Stream(self.device)
        self._out = torch.cuda.Stream(self.device)

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """On the stream of copies in; the host memory has to be page-locked to run beside the kernels."""
        return self._start(self._in, into, source, after)

    def send(
        self, into: Any, source: Any, hold: bool = False, after: Iterable[Mark] = (), landed: Landed | None = None
    ) -> Mark:
        """On the stream of copies out.

        What is held is let go in an order that the allocator knows, so it need not know of the other stream.
        """
        mark = self._start(self._out, into, source, (self.mark(), *after))
        if hold:
            self.leaving.hold(self, source, mark, landed)
        return mark

    def _start(self, stream: Any, into: Any, source: Any, after: Iterable[Mark]) -> Mark:
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        return stream.record_event()

    def mark(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def sync(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)
        self.leaving.clear()


def open_mover(device: Any) -> Mover:
    """The way to a device from the memory of its host."""
    if device.type != "cuda":
        return Mover(device)
    return CardMover(torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))
