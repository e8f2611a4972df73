"""A store or a sink seen otherwise: through other axes, as a part, or in another dtype. What is not said anew is its own."""

from __future__ import annotations

from typing import Any

from outsize.array.store.base import Block, Buffer, Region, Sink, Store


def _translated(below: str, name: str) -> Any:
    """A method that asks the store or sink below, of the region there."""
    return lambda self, region: getattr(getattr(self, below), name)(self._under(region))


def _passed_on(below: str, name: str) -> Any:
    """A method that is that of the store or sink below."""
    return lambda self, **options: getattr(getattr(self, below), name)(**options)


class SeenStore(Store):
    """Translates regions with `_under`; how blocks are read is the store's own."""

    inner: Store
    """What is read from."""

    def _under(self, region: Region) -> Region:
        """A region of ours, in the store below."""
        return region

    def _beside(self, region: Region) -> int:
        """Bytes of buffer that a read takes beside those of the store below."""
        return 0

    @property
    def holds(self) -> int:
        return self.inner.holds

    packing, traffic, seeks = (_translated("inner", name) for name in ("packing", "traffic", "seeks"))

    def extent(self, region: Region) -> int:
        return self._beside(region) + self.inner.extent(self._under(region))

    def most(self, region: Region) -> int:
        return self._beside(region) + self.inner.most(self._under(region))

    close = _passed_on("inner", "close")


class SeenSink(Sink):
    """Translates regions with `_under`, and blocks with `_over` and `_below` where their axes differ."""

    sink: Sink
    """What is written into."""

    def _under(self, region: Region) -> Region:
        """A region of ours, in the sink below."""
        return region

    def _over(self, block: Block) -> Block:
        """A block of the sink below, with our axes."""
        return block

    def _below(self, block: Block) -> Block:
        """A block of ours, with the axes of the sink below."""
        return block

    extent, room, seeks, traffic = (_translated("sink", name) for name in ("extent", "room", "seeks", "traffic"))

    def sketch(self, region: Region) -> Block:
        return self._over(self.sink.sketch(self._under(region)))

    def lay(self, region: Region, buffer: Buffer) -> Block:
        return self._over(self.sink.lay(self._under(region), buffer))

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        self.sink.write(self._under(region), self._below(block), buffer)

    create, sync, commit, abort = (_passed_on("sink", name) for name in ("create", "sync", "commit", "abort"))
