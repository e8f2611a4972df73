"""Copies matrices between host and device: straight where the device reaches them. Else a stager takes them there, and they
come back through page-locked pieces that other threads empty.

The order of streams is the caller's: what is sent after `follow` stays after it. Bringing back does not wait as long as
there are free pieces: a copy's event is awaited by the thread that empties its piece.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from outsize.array.device.base import STREAMS, Device, Event
from outsize.array.device.transfer.pipeline import sendable
from outsize.array.device.transfer.staging import Stager
from outsize.array.store.base import Block, Buffer

Wait = Callable[[], None]


class MatrixCopies:
    """The copies of one product."""

    def __init__(
        self, device: Device, stager: Stager | None, pieces: list[Buffer], threads: ThreadPoolExecutor,
        reaches: Callable[[Block], bool],
    ) -> None:  # fmt: skip
        self.device, self.stager, self.threads, self.reaches = device, stager, threads, reaches
        self._pieces: queue.LifoQueue[Buffer] = queue.LifoQueue()
        """What was emptied last is filled first: it is in the processor's caches, and what is staged can stay there too."""
        for piece in pieces:
            self._pieces.put(piece)
        self._piece = pieces[0].nbytes if pieces else 0
        self._fetching: list[Future[None]] = []

    def send(self, block: Block, offset: int) -> Event:
        """Send a matrix to an offset; when it is there."""
        return self.arrival([self.start(block, offset)[1]])()

    def start(self, block: Block, offset: int) -> tuple[Any, Wait | None]:
        """Have a matrix sent to an offset: the array that it becomes there, with the block's own axes, and what waits until
        staging threads have put it on the stream; None where it is there already."""
        turned = abs(block.strides[0]) < abs(block.strides[1]) and block.shape[1] > 1
        source = block.T if turned else block
        target = self.device.view(offset, source.shape, source.dtype)
        if sendable(source) and self.reaches(source):
            wait = None
            self.device.submit("in", lambda: self.device.kernels.upload(target, source))
        else:
            assert self.stager is not None, "a matrix that the device does not reach, in a plan without staging threads"
            wait = self.stager.begin([(source, offset)])
        return (self.device.kernels.turn(target, (1, 0)) if turned else target), wait

    def arrival(self, waits: Sequence[Wait | None]) -> Callable[[], Event]:
        """What waits for matrices that were started last, and says when they are there."""
        staged = [wait for wait in waits if wait is not None]
        known = None if staged else self.device.record("in")

        def arrive() -> Event:
            for wait in staged:
                wait()
            return known or self.device.record("in")

        return arrive

    def fetch(self, block: Block, source: Any) -> None:
        """Bring a matrix back; it has arrived after `finish`."""
        if sendable(block) and self.reaches(block):
            self._bring(block, source)
            return
        rows = max(1, self._piece // max(1, block.shape[1] * block.itemsize))
        for low in range(0, block.shape[0], rows):
            part = block[low : low + rows]
            piece = self._pieces.get()
            staged: Block = np.ndarray(part.shape, part.dtype, piece.data)
            self._bring(staged, source[low : low + rows])
            self._fetching.append(self.threads.submit(self._empty, self.device.record("out"), part, staged, piece))

    def _bring(self, block: Block, source: Any) -> None:
        self.device.submit("out", lambda: self.device.kernels.download(block, source))

    def _empty(self, event: Event, part: Block, staged: Block, piece: Buffer) -> None:
        try:
            event.wait()
            np.copyto(part, staged)
        finally:  # whoever waits for a piece goes on after an error too; `finish` tells of it
            self._pieces.put(piece)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for job in self._fetching:
            job.result()
        self._fetching.clear()
        for stream in STREAMS:
            self.device.record(stream).wait()
