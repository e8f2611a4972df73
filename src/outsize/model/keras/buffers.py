"""Tensors without contents that share and free buffers as TensorFlow's do: by counting who still reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from outsize.model.keras.graph import Node

Shape = tuple[int, ...]
UPDATES = {"AssignAddVariableOp", "AssignSubVariableOp"}
"""Operators that add to a variable, over its value where nobody else reads that."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Bytes that tensors share, or the elements of a list of tensors."""

    bytes: int
    node: Node | None
    """The operator that made it; None for variables and arguments."""
    name: str
    kind: str = ""
    refs: int = 0
    """Reads that are still to come."""
    items: list[Tensor | None] | None = None
    """Elements, where it is a list."""
    id: int = -1
    step: int = -1


@dataclass(slots=True, eq=False)
class Variable:
    """What a handle stands for."""

    shape: Shape
    width: int
    kind: str
    name: str
    buffer: Buffer | None = None


@dataclass(slots=True, eq=False)
class Tensor:
    """What an operator gives."""

    shape: Shape
    width: int
    buffer: Buffer | None = None
    value: Any = None
    """Elements, where they are few and known: sizes, counters, conditions."""
    variable: Variable | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.width


@dataclass(slots=True)
class Memory:
    """Who holds what, and every allocation and free in order."""

    events: list[tuple[bool, Buffer]] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    step: int = -1
    count: int = 0

    def take(self, size: int, node: Node | None, name: str, kind: str = "") -> Buffer:
        """A new buffer that nobody reads yet."""
        buffer = Buffer(size, node, name, kind, id=self.count, step=self.step)
        self.count += 1
        if size:
            self.events.append((True, buffer))
            self.held += size
            self.peak = max(self.peak, self.held)
        return buffer

    def keep(self, buffer: Buffer | None, times: int = 1) -> None:
        """Further reads are to come."""
        if buffer is not None:
            buffer.refs += times

    def drop(self, buffer: Buffer | None) -> None:
        """One reader is done; the last one frees it."""
        if buffer is None:
            return
        buffer.refs -= 1
        if buffer.refs == 0:
            self.free(buffer)

    def free(self, buffer: Buffer) -> None:
        """Give it back, with the elements that only this list holds."""
        if buffer.bytes:
            self.events.append((False, buffer))
            self.held -= buffer.bytes
        for item in buffer.items or ():
            if item is not None:
                self.drop(item.buffer)
