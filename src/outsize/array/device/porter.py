"""Carries matrices between host and device: straight where the device reaches them, else through a ring of page-locked
pieces that several threads fill and empty.

A ring piece is filled by the host, sent, and filled again when the copy's event has come; on the way back the copy's
event is awaited by a thread of the crew, which empties the piece. The order of lanes is the caller's: what is sent after
`follow` stays after it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from outsize.array.device.base import LANES, Device, Event
from outsize.array.device.pipeline import sendable
from outsize.array.store.base import Block, Buffer

PIECES = 8
"""Pieces of the ring: half of them for each way."""


class Porter:
    """One product's carrier."""

    def __init__(
        self, device: Device, ring: Buffer, crew: ThreadPoolExecutor, reaches: Callable[[Block], bool]
    ) -> None:
        self.device, self.crew, self.reaches = device, crew, reaches
        size = ring.nbytes // PIECES
        pieces = [ring[number * size : (number + 1) * size] for number in range(PIECES)] if size else []
        self._ins: list[tuple[Buffer, Event | None]] = [(piece, None) for piece in pieces[: PIECES // 2]]
        self._outs: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for piece in pieces[PIECES // 2 :]:
            self._outs.put(piece)
        self._piece = size
        self._fetching: list[Future[None]] = []

    def send(self, block: Block, offset: int) -> Any:
        """Send a matrix to an offset; the array that it becomes there, with the block's own axes."""
        turned = abs(block.strides[0]) < abs(block.strides[1]) and block.shape[1] > 1
        source = block.T if turned else block
        target = self.device.view(offset, source.shape, source.dtype)
        if sendable(source) and self.reaches(source):
            self._submit("in", self.device.kernels.upload, target, source)
        else:
            self._send_pieces(source, target)
        return self.device.kernels.turn(target, (1, 0)) if turned else target

    def _submit(self, lane: Any, call: Callable[..., None], *args: Any) -> None:
        self.device.submit(lane, lambda: call(*args))

    def _send_pieces(self, source: Block, target: Any) -> None:
        rows = max(1, self._piece // max(1, source.shape[1] * source.itemsize))
        for low in range(0, source.shape[0], rows):
            part = source[low : low + rows]
            piece, event = self._ins.pop(0)
            if event is not None:
                event.wait()
            staged: Block = np.ndarray(part.shape, part.dtype, piece.data)
            self._copy(staged, part)
            self._submit("in", self.device.kernels.upload, target[low : low + rows], staged)
            self._ins.append((piece, self.device.record("in")))

    def _copy(self, target: Block, source: Block) -> None:
        """A copy by several threads."""
        hands = max(1, min(self.crew._max_workers, target.nbytes >> 21))
        step = -(-target.shape[0] // hands)
        jobs = [self.crew.submit(np.copyto, target[low : low + step], source[low : low + step])
                for low in range(step, target.shape[0], step)]  # fmt: skip
        np.copyto(target[:step], source[:step])
        for job in jobs:
            job.result()

    def fetch(self, block: Block, source: Any) -> None:
        """Bring a matrix back; it has arrived after `finish`."""
        if sendable(block) and self.reaches(block):
            self._submit("out", self.device.kernels.download, block, source)
            return
        rows = max(1, self._piece // max(1, block.shape[1] * block.itemsize))
        for low in range(0, block.shape[0], rows):
            part = block[low : low + rows]
            piece = self._outs.get()
            staged: Block = np.ndarray(part.shape, part.dtype, piece.data)
            self._submit("out", self.device.kernels.download, staged, source[low : low + rows])
            self._fetching.append(self.crew.submit(self._empty, self.device.record("out"), part, staged, piece))

    def _empty(self, event: Event, part: Block, staged: Block, piece: Buffer) -> None:
        try:
            event.wait()
            np.copyto(part, staged)
        finally:  # whoever waits for a piece goes on after an error too; `finish` tells of it
            self._outs.put(piece)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for job in self._fetching:
            job.result()
        self._fetching.clear()
        for lane in LANES:
            self.device.record(lane).wait()
