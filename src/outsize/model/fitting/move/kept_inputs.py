"""Inputs of units that wait in host memory for the backward pass.

In: the tensor that a unit was called with. Out: a function that gives it back on the device. The one before it starts to
come when one is asked for, since the backward pass goes from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import Mark, Mover


class KeptInput:
    """One tensor that waits for the backward pass."""

    __slots__ = ("block", "layout", "ready", "sent", "tensor")

    def __init__(self, block: Block | None, layout: tuple[Any, Any, Any], sent: Mark) -> None:
        self.block = block
        self.layout = layout
        self.sent = sent
        self.tensor: Any = None
        self.ready: Mark = None


class KeptInputs:
    """Keeps inputs on the host, in blocks that are used again in every pass."""

    def __init__(self, mover: Mover) -> None:
        self.held = 0
        """Bytes of host memory that it has taken."""
        self._mover = mover
        self._blocks: list[tuple[int, Block | None]] = []
        self._kept: list[KeptInput] = []

    def keep(self, tensor: Any) -> Callable[[], Any]:
        """Start the copy out; the tensor is dense, and comes back with the strides it has."""
        import torch

        size = tensor.numel() * tensor.element_size()
        block = self._block(len(self._kept), size)
        mark = None
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if block is not None:
            mark = self._mover.send(block.bytes[:size], flat.view(torch.uint8), hold=True)
        else:
            self._mover.send(None, flat, hold=True)
        kept = KeptInput(block, (tuple(tensor.shape), tensor.stride(), tensor.dtype), mark)
        number = len(self._kept)
        self._kept.append(kept)

        def bring() -> Any:
            self._start(number)
            mine, kept.tensor = kept.tensor, None
            self._mover.wait(kept.ready)
            if number:
                self._start(number - 1)
            return mine

        return bring

    def _block(self, number: int, size: int) -> Block | None:
        while len(self._blocks) <= number:
            self._blocks.append((-1, None))
        if self._blocks[number][0] < size:
            self.held += size - max(0, self._blocks[number][0])
            self._blocks[number] = (size, Block(size) if self._mover.real else None)
        return self._blocks[number][1]

    def _start(self, number: int) -> None:
        import torch

        kept = self._kept[number]
        if kept.tensor is not None or kept.ready is not None:
            return
        shape, strides, dtype = kept.layout
        kept.tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self._mover.device)
        if kept.block is not None:
            flat = kept.tensor.as_strided((kept.tensor.numel(),), (1,)).view(torch.uint8)
            kept.ready = self._mover.bring(flat, kept.block.bytes[: flat.numel()], [kept.sent, self._mover.mark()])

    def end_pass(self) -> None:
        """The backward pass is over."""
        self._kept.clear()

    def close(self) -> None:
        """The memory is ordinary again."""
        for _, block in self._blocks:
            if block is not None:
                block.unlock()
