"""What every model of an allocator keeps: its counters, the blocks in use, and those that another stream still uses.

A model adds where a block comes from (`malloc`) and where it goes (`free`). `hold` and `let_go` do its counting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from typing import Generic, Protocol, TypeVar

from outsize.allocator.driver import Driver
from outsize.core.allocation import Segment
from outsize.core.noun import Noun


class AllocatorSettings(Noun):
    """Settings of an allocator, each with its default."""

    __slots__ = ()

    def changed(self) -> str:
        """The settings that differ from the default, as one short text; empty if none does."""
        plain, names = type(self)(), [field.name for field in fields(self)]  # type: ignore[arg-type]
        differ = [name for name in names if getattr(self, name) != getattr(plain, name)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in differ)


class UsedBlock(Protocol):
    """A block in use."""

    @property
    def size(self) -> int: ...
    @property
    def requested(self) -> int: ...


B = TypeVar("B", bound=UsedBlock)


class Model(ABC, Generic[B]):
    """An allocator on one device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.requested = self.allocated = self.active = self.reserved = self.reserved_peak = self.retries = 0
        self.guessed = False
        """True if a choice depended on addresses that are not known."""
        self.live: dict[int, B | None] = {}
        """Blocks in use; None for one of no bytes."""
        self.waiting: dict[int, B | None] = {}
        """Blocks that the program has freed and another stream still uses."""

    @abstractmethod
    def malloc(self, id: int, requested: int, stream: int) -> bool:
        """Hand out a block; False where memory ran out."""

    @abstractmethod
    def free(self, id: int) -> None:
        """Take a block back."""

    @abstractmethod
    def release(self) -> None:
        """Give the cache back (`empty_cache`)."""

    @abstractmethod
    def segments(self) -> Iterator[Segment]:
        """The segments that came from the system, by address."""

    def wait(self, id: int) -> None:
        """The program freed a block that another stream still uses: it is active until `free` is called for it."""
        block = self.waiting[id] = self.live.pop(id)
        if block is not None:
            self.allocated -= block.size

    def hold(self, id: int, block: B) -> bool:
        """Count a block that is handed out; True, for `malloc` to return."""
        self.live[id] = block
        size = block.size
        self.requested += block.requested
        self.allocated += size
        self.active += size
        return True

    def let_go(self, id: int) -> B | None:
        """The block that is freed, no longer counted."""
        block = self.live.pop(id, None)
        if block is not None:
            self.allocated -= block.size
        elif id in self.waiting:
            block = self.waiting.pop(id)
        if block is not None:
            self.requested -= block.requested
            self.active -= block.size
        return block

    def reserve(self, bytes: int) -> None:
        """Count bytes that came from the system."""
        self.reserved += bytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def give_to_system(self, address: int, bytes: int) -> None:
        self.driver.give(address, bytes)
        self.reserved -= bytes
