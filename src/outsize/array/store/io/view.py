"""A sink seen through other axes or as a part: regions and blocks are translated, everything else is the sink's own."""

from __future__ import annotations

import abc

from outsize.array.store.base import Block, Buffer, Region, Sink, Store


class Seen(Sink):
    """Translates regions with `_under`, and blocks with `_over` and `_below` where their axes differ."""

    sink: Sink
    """What is written into."""

    @abc.abstractmethod
    def _under(self, region: Region) -> Region:
        """A region of ours, in the sink below."""

    def _over(self, block: Block) -> Block:
        """A block of the sink below, with our axes."""
        return block

    def _below(self, block: Block) -> Block:
        """A block of ours, with the axes of the sink below."""
        return block

    def extent(self, region: Region) -> int:
        return self.sink.extent(self._under(region))

    def room(self, region: Region) -> int:
        return self.sink.room(self._under(region))

    def seeks(self, region: Region) -> int:
        return self.sink.seeks(self._under(region))

    def lay(self, region: Region, buffer: Buffer) -> Block:
        return self._over(self.sink.lay(self._under(region), buffer))

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        self.sink.write(self._under(region), self._below(block), buffer)

    def traffic(self, region: Region) -> int:
        return self.sink.traffic(self._under(region))

    def sync(self) -> None:
        self.sink.sync()

    def commit(self) -> Store:
        return self.sink.commit()

    def abort(self) -> None:
        self.sink.abort()
