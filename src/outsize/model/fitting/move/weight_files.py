"""Weights read from their file as they are needed, never the whole model in memory.

In: a safetensors or torch file (or a folder of such shards) and a model on the meta device. Out: a source of units. Several
threads read ahead, directly (past the page cache) and in large pieces, into a few page-locked blocks; from there a unit's
tensors go to their aligned places on the device. The order of units repeats, so reading goes on from the last to the first.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import pathlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from outsize.array.store.base import ALIGNMENT, round_up
from outsize.array.store.formats.safetensors import _NAMES, read_table
from outsize.array.store.formats.safetensors import recognise as is_safetensors
from outsize.array.store.formats.torchfile import read_tensors
from outsize.array.store.io.file import AlignedFile
from outsize.core.errors import InputError, StoreError
from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import Mark, Mover
from outsize.model.fitting.move.units import Cut, Unit
from outsize.model.fitting.move.visits import Source
from outsize.model.torch_port.patches import registering_parameters

READERS = 8
"""Threads that read."""
PIECE = 16 * 2**20
"""Bytes of one read."""
GAP = 2**16
"""Tensors of a unit that lie no further apart are read in one go."""
KINDS = (".safetensors", ".bin", ".pt", ".pth")
"""How the names of weights files end."""


@dataclass(frozen=True, slots=True)
class Extent:
    path: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Files:
    """Where every parameter and buffer of a model lies."""

    extents: dict[int, Extent]
    """By id of the model's own tensor."""
    tensors: list[Any]
    """These tensors, so that their ids stay theirs."""
    opened: dict[str, AlignedFile] = field(default_factory=dict)

    def file(self, path: str) -> AlignedFile:
        if path not in self.opened:
            self.opened[path] = AlignedFile(path)
        return self.opened[path]

    def read(self, extent: Extent) -> Any:
        """A small tensor in ordinary memory."""
        import numpy as np

        room = np.empty(round_up(extent.size) + 3 * ALIGNMENT, np.uint8)
        lead = -room.ctypes.data % ALIGNMENT
        data = self.file(extent.path).read(extent.offset, extent.size, room[lead:])
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, extent.dtype)).view(extent.shape)


def find_weights(model: Any, weights: Any) -> Files:
    """Where each of the model's tensors lies; an `InputError` that names what is missing or of another shape or type."""
    table = {name: extent for path in _paths(weights) for name, extent in _read(path)}
    extents: dict[int, Extent] = {}
    tensors: list[Any] = []
    missing: list[str] = []
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, tensor in named:
        extent = table.get(name)
        if extent is None:
            if tensor.device.type == "meta" or id(tensor) in parameters:
                missing.append(name)
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if extent.shape != tuple(tensor.shape) or extent.dtype != dtype:
            raise InputError(
                f"{name} is {tuple(tensor.shape)} of {dtype} in the model and {extent.shape} of {extent.dtype} in "
                f"{extent.path}: build the model with the file's shapes and type"
            )
        if id(tensor) not in extents:
            tensors.append(tensor)
        extents[id(tensor)] = extent
    held = {id(tensor) for tensor in tensors}
    lost = [name for name, tensor in named if name in missing and id(tensor) not in held]
    if lost:
        raise InputError(
            f"{len(lost)} tensors of the model are not in the file, the first is {lost[0]}; the file has "
            f"{', '.join(list(table)[:2])}, ... (buffers that no file has need real values: build the model with "
            "outsize.model.fitting.without_weights())"
        )
    return Files(extents, tensors)


def _paths(weights: Any) -> list[str]:
    """Files that a user's word stands for: one, several, a folder, or the index of shards."""
    if isinstance(weights, list | tuple):
        return [str(path) for path in weights]
    if not isinstance(weights, str | os.PathLike):
        raise InputError(f"weights needs the path of a file or folder, not {type(weights).__name__}")
    path = pathlib.Path(weights)
    if path.is_dir():
        found = sorted(path.glob("*.safetensors")) or sorted(one for one in path.glob("*") if one.suffix in KINDS)
        if not found:
            raise InputError(f"the folder {path} holds no {', '.join(KINDS[:-1])} or {KINDS[-1]} file")
        return [str(one) for one in found]
    if path.name.endswith(".index.json"):
        try:
            names = json.loads(path.read_text())["weight_map"].values()
        except OSError as error:
            raise _unreadable(str(path), error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} is no index of shards: it has no table weight_map of tensor names and files; give the folder of the "
                "shards, or the files themselves"
            ) from error
        return [str(path.parent / name) for name in dict.fromkeys(names)]
    return [str(path)]


def _unreadable(path: str, error: OSError) -> StoreError:
    """What could not be read, and what to give instead."""
    folder = pathlib.Path(path).parent
    there = [one.name for one in sorted(folder.glob("*")) if one.suffix in KINDS]
    beside = f"there are {', '.join(there[:3])}{', ...' if there[3:] else ''} in" if there else "there is none in"
    return StoreError(
        f"the weights file {path} cannot be read ({error.strerror}), {beside} {folder.absolute()}: give weights= the path of a "
        "safetensors or torch file, several, a folder, or an index of shards that are all there",
        path=path,
    )


def _read(path: str) -> Iterable[tuple[str, Extent]]:
    try:
        with open(path, "rb") as file:
            head = file.read(9)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if is_safetensors(path, head, size):
        table, start, _ = read_table(path)
        for name, row in table.items():
            first, last = row["data_offsets"]
            yield (
                name,
                Extent(path, start + first, last - first, tuple(row["shape"]), _NAMES.get(row["dtype"], row["dtype"])),
            )
        return
    tensors, members, prefix, swapped = read_tensors(path)
    for name, tensor in tensors.items():
        member = members.get(f"{prefix}data/{tensor.storage.entry}")
        if member is None or member.compressed or swapped or not _dense(tensor.shape, tensor.strides):
            continue
        import torch

        width = getattr(torch, tensor.dtype).itemsize
        place = member.offset() + tensor.offset * width
        yield name.rsplit("/", 1)[-1], Extent(path, place, math.prod(tensor.shape) * width, tensor.shape, tensor.dtype)


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


@dataclass(slots=True)
class Script:
    """How a unit is read: pieces of files into a block, then tensors from there."""

    pieces: list[tuple[str, int, int, int]]
    """(path, offset in the file, bytes, offset in the block)."""
    moves: list[tuple[int, int, int]]
    """(offset in the block, offset in the unit, bytes)."""
    size: int
    """Bytes of the block."""


def write_script(unit: Unit, files: Files) -> Script:
    """Tensors that lie near each other are read in one go, in pieces that begin and end on pages."""
    place_of = operator.attrgetter("path", "offset")
    places = sorted((*unit.places, *unit.guests), key=lambda p: place_of(files.extents[id(p.parameter)]))
    script = Script([], [], 0)
    runs: list[tuple[str, int, int, list[Any]]] = []
    for place in places:
        extent = files.extents[id(place.parameter)]
        start, stop = extent.offset, extent.offset + extent.size
        if runs and runs[-1][0] == extent.path and start - runs[-1][2] <= GAP:
            path, first, last, row = runs[-1]
            runs[-1] = (path, first, max(last, stop), [*row, place])
        else:
            runs.append((extent.path, start // ALIGNMENT * ALIGNMENT, stop, [place]))
    for path, first, last, row in runs:
        for at in range(first, last, PIECE):
            script.pieces.append((path, at, min(PIECE, last - at), script.size + at - first))
        for place in row:
            extent = files.extents[id(place.parameter)]
            script.moves.append((script.size + extent.offset - first, place.offset, extent.size))
        script.size += round_up(last - first) + ALIGNMENT
    return script


class ReadBuffer:
    """A page-locked block that units pass through."""

    def __init__(self, size: int) -> None:
        self.block = Block(size)
        self.name = ""
        """The unit that is in it or on its way."""
        self.reads: list[Future[None]] = []
        self.used: Mark = None
        """Passes when the device has taken what was in it."""


class FileSource(Source):
    ahead = False

    def __init__(self, files: Files, cut: Cut, mover: Mover, order: list[str], buffers: int) -> None:
        self._files = files
        self._mover = mover
        self._order = order
        self._scripts = {name: write_script(unit, files) for name, unit in cut.units.items()}
        largest = max((script.size for script in self._scripts.values()), default=0)
        self._buffers = [ReadBuffer(largest) for _ in range(min(buffers, len(order)))]
        self._pool = ThreadPoolExecutor(READERS, "outsize-read")
        self._next = 0
        for path in {piece[0] for script in self._scripts.values() for piece in script.pieces}:
            files.file(path)

    def bring(self, unit: Unit, into: Any, after: list[Mark]) -> Mark:
        """Wait until the unit is read, start its copy to the device, and let the next one be read in its place."""
        if unit.name not in self._scripts:
            return self._bring_whole(unit, into, after)
        buffer = next((buffer for buffer in self._buffers if buffer.name == unit.name), None)
        if buffer is None:
            buffer = self._turn_to(unit.name)
        for read in buffer.reads:
            read.result()
        mark = None
        for start, place, size in self._scripts[unit.name].moves:
            mark = self._mover.bring(into[place : place + size], buffer.block.bytes[start : start + size], after)
            after = []
        buffer.used = mark
        self._start(buffer)
        return mark

    def _turn_to(self, name: str) -> ReadBuffer:
        """The units come in another order than they did: read on from this one."""
        for buffer in self._buffers:
            for read in buffer.reads:
                read.result()
        self._next = self._order.index(name) if name in self._order else 0
        if name not in self._order:
            self._order = [name, *self._order]
        for buffer in self._buffers:
            self._start(buffer)
        return self._buffers[0]

    def _start(self, buffer: ReadBuffer) -> None:
        """Let the next unit be read into a buffer."""
        buffer.name = self._order[self._next % len(self._order)]
        self._next += 1
        memory = buffer.block
        buffer.reads = [
            self._pool.submit(self._read, piece, memory, buffer.used) for piece in self._scripts[buffer.name].pieces
        ]

    def _read(self, piece: tuple[str, int, int, int], memory: Block, used: Mark) -> None:
        path, offset, size, place = piece
        self._mover.sync(used)
        self._files.file(path).read(offset, size, memory.array[place : place + round_up(size)])

    def _bring_whole(self, unit: Unit, into: Any, after: list[Mark]) -> Mark:
        """What stays on the device: read once, through a block of its own."""
        script = write_script(unit, self._files)
        room = Block(READERS * PIECE)
        at = [piece[3] for piece in script.pieces]
        for first in range(0, len(at), READERS):
            some = script.pieces[first : first + READERS]
            reads = [
                self._pool.submit(self._read, (path, offset, size, number * PIECE), room, None)
                for number, (path, offset, size, _) in enumerate(some)
            ]
            for read in reads:
                read.result()
            for number, (_, _, size, there) in enumerate(some):
                for start, place, length in script.moves:
                    low, high = max(start, there), min(start + length, there + size)
                    if low < high:
                        source = room.bytes[number * PIECE + low - there : number * PIECE + high - there]
                        mark = self._mover.bring(into[place + low - start : place + high - start], source, after)
            self._mover.sync(mark)
        room.unlock()
        return mark

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for buffer in self._buffers:
            buffer.block.unlock()
        for file in self._files.opened.values():
            file.close()
        self._files.opened.clear()


def without_weights() -> contextlib.AbstractContextManager[None]:
    """`with without_weights(): model = Model(config)` makes parameters without memory; buffers are real, since no file has
    those that a module computes for itself."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    return registering_parameters(on_meta)
