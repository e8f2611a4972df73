"""The way between host memory and a device: copies in, copies out, and what waits for what.

In: flat byte tensors on both sides. Out: `Mark`s, moments that later copies, kernels or the host can wait for. On a card
there is a stream for each direction, so that both directions of the link and the kernels run at once; nothing here waits
on the host unless it is called `sync`. On a CPU a copy is done when the call returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

Mark = Any
"""A moment on a device; None: it has passed already."""


LEAVING = 2
"""Tensors that are held at once while they are copied out."""


class Lane(Protocol):
    """What streaming asks of a device."""

    device: Any
    """The torch device on which modules run."""
    real: bool
    """False where tensors have no contents: nothing is copied."""

    def empty(self, size: int) -> Any:
        """A flat byte tensor on the device."""

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """Host to device, once `after` have passed; the mark passes when it is there."""

    def send(self, into: Any, source: Any, hold: bool = False) -> Mark:
        """Device to host, once what is computed so far has ended; the mark passes when it is there.

        `hold`: the source is not anybody's any more, keep it until it is there. Few are held at a time: the host, which runs
        ahead of the device, waits for the one before the last, so that memory on its way out is bounded.
        """

    def join(self, marks: list[Mark]) -> Mark:
        """Passes when all copies in, given in the order they were begun, are there."""

    def mark(self) -> Mark:
        """Passes when what is computed so far has ended."""

    def wait(self, mark: Mark) -> None:
        """What is computed from now on waits for a mark."""

    def sync(self, mark: Mark) -> None:
        """The host waits for a mark."""

    def drain(self) -> None:
        """The host waits for everything."""


class PlainLane:
    """A device that is the host itself."""

    real = True

    def __init__(self, device: Any) -> None:
        self.device = device

    def empty(self, size: int) -> Any:
        """Ordinary memory."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """Copied at once."""
        into.copy_(source)

    def send(self, into: Any, source: Any, hold: bool = False) -> Mark:
        """Copied at once."""
        into.copy_(source)

    def join(self, marks: list[Mark]) -> Mark:
        """One after the other."""
        return marks[-1] if marks else None

    def mark(self) -> Mark:
        """Everything so far has ended."""

    def wait(self, mark: Mark) -> None:
        """It has passed."""

    def sync(self, mark: Mark) -> None:
        """It has passed."""

    def drain(self) -> None:
        """Nothing is under way."""


class NoLane(PlainLane):
    """For tensors without contents: the same calls, nothing moves."""

    real = False

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._leaving: deque[Any] = deque(maxlen=LEAVING)

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """There is nothing to copy."""

    def send(self, into: Any, source: Any, hold: bool = False) -> Mark:
        """There is nothing to copy; what a card would hold is held."""
        if hold:
            self._leaving.append(source)

    def drain(self) -> None:
        """Nothing is held any more."""
        self._leaving.clear()


class CardLane:
    """A CUDA device."""

    real = True

    def __init__(self, device: Any) -> None:
        import torch

        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._in = torch.cuda.Stream(self.device)
        self._out = torch.cuda.Stream(self.device)
        self._leaving: deque[tuple[Mark, Any]] = deque()

    def empty(self, size: int) -> Any:
        """A block of torch's allocator, kept for as long as it is used."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """On the stream of copies in; the host memory has to be page-locked to run beside the kernels."""
        import torch

        for mark in after:
            if mark is not None:
                self._in.wait_event(mark)
        with torch.cuda.stream(self._in):
            into.copy_(source, non_blocking=True)
        return self._in.record_event()

    def send(self, into: Any, source: Any, hold: bool = False) -> Mark:
        """On the stream of copies out, after the kernels queued so far.

        What is held is let go when the host has seen its copy end, so that the allocator need not know of the other stream.
        """
        import torch

        self._out.wait_event(self.mark())
        with torch.cuda.stream(self._out):
            into.copy_(source, non_blocking=True)
        mark = self._out.record_event()
        if hold:
            self._leaving.append((mark, source))
            while len(self._leaving) > LEAVING or self._leaving[0][0].query():
                self._leaving.popleft()[0].synchronize()
                if not self._leaving:
                    break
        return mark

    def join(self, marks: list[Mark]) -> Mark:
        """They are on one stream."""
        return marks[-1] if marks else None

    def mark(self) -> Mark:
        """An event on the stream that computes."""
        import torch

        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, mark: Mark) -> None:
        """The stream that computes waits."""
        import torch

        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def sync(self, mark: Mark) -> None:
        """Until the event has passed."""
        if mark is not None:
            mark.synchronize()

    def drain(self) -> None:
        """Both directions and the kernels."""
        import torch

        torch.cuda.synchronize(self.device)
        self._leaving.clear()


def open_lane(device: Any) -> Lane:
    """The lane to a device."""
    return CardLane(device) if device.type == "cuda" else PlainLane(device)
