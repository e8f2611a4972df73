"""Blocks of a tensor, each compressed by zfp with a bounded error: what is smallest where a tensor is smooth and not low-rank.

zfp checks no lengths when it decodes. So a block's bytes are first copied to where as many can be read as zfp may ever want of a
block of that shape: a damaged file gives wrong numbers and no wrong reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Region, round_up
from outsize.array.store.io.chunks import cut_regular
from outsize.core.errors import InputError
from outsize.core.extras import need
from outsize.factor.formats.form import Resident
from outsize.factor.workspace import Workspace

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_MOST_BYTES = 16658 // 8 + 8
"""Bytes that zfp reads at most of a cube of side 4 (ZFP_MAX_BITS)."""
_MOST_ELEMENTS = 1 << 18
"""Elements of the largest block that is written, and more."""
_MOST_AXES = 4
"""Axes that zfp knows."""


@dataclass(frozen=True, slots=True, eq=False)
class Coded(Resident):
    """x in blocks of a grid, each with no element further off than `tolerance`"""

    method = "zfp"
    suffixes = (".zfp",)

    data: Block
    """Compressed bytes, block after block."""
    offsets: Block
    """Where each block begins, and where the last one ends."""
    layout: Block
    """Lengths of the axes, lengths of a block, bytes of an element."""
    tolerance: Block
    """The one tolerance."""

    def __post_init__(self) -> None:
        for name, dtype in (("data", np.uint8), ("offsets", np.int64), ("layout", np.int64), ("tolerance", np.float64)):
            array = np.asarray(getattr(self, name))
            if array.dtype != dtype or array.ndim != 1:
                raise InputError(f"{name} is a row of {np.dtype(dtype)}, not {array.dtype}{list(array.shape)}")
            object.__setattr__(self, name, array)
        axes, rest = divmod(len(self.layout) - 1, 2)
        sound = rest == 0 and axes > 0 and all(length > 0 for length in self.layout) and len(self.tolerance) == 1
        if not sound or self.layout[-1] not in (4, 8) or not self.tolerance[0] > 0:
            raise InputError(f"the layout {self.layout.tolist()[:9]} does not describe blocks")
        blocks = math.prod(-(-n // b) for n, b in zip(self.shape, self.box, strict=True))
        grows = len(self.offsets) == blocks + 1 and bool((np.diff(self.offsets) >= 0).all())
        if not grows or self.offsets[0] != 0 or self.offsets[-1] != len(self.data):
            raise InputError(
                f"{len(self.offsets)} offsets into {len(self.data)} bytes are not those of {blocks} blocks"
            )
        if math.prod(self.box) > _MOST_ELEMENTS:
            raise InputError(f"blocks of {self.box} are larger than any that is written")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.layout[: len(self.layout) // 2]))

    @property
    def box(self) -> tuple[int, ...]:
        """Lengths of a block."""
        return tuple(map(int, self.layout[len(self.layout) // 2 : -1]))

    @property
    def granule(self) -> tuple[int, ...]:
        return self.box

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> np.dtype[Any]:
        return _DTYPES[int(self.layout[-1]) // 4 - 1]

    def rebuild(self, region: Region, work: Workspace) -> Block:
        made = work.array(tuple(stop - start for start, stop in region))
        bytes_ = work.array((-(-most_bytes(self.box) // self.dtype.itemsize),))
        scratch = work.array((math.prod(self.box),))
        if work.dry or not made.size:
            return made
        counts = [-(-n // b) for n, b in zip(self.shape, self.box, strict=True)]
        for piece in cut_regular(region, self.box):
            number = int(np.ravel_multi_index(piece.chunk, counts))
            lengths = [min(b, n - at * b) for n, b, at in zip(self.shape, self.box, piece.chunk, strict=True)]
            block = scratch[: math.prod(lengths)].reshape(lengths)
            packed = self.data[self.offsets[number] : self.offsets[number + 1]]
            held = bytes_.view(np.uint8)
            packed = packed[: held.nbytes]
            held[: packed.nbytes] = packed
            decode(held, block, float(self.tolerance[0]))
            made[piece.target] = block[piece.inside]
        return made


def encode(block: Block, tolerance: float) -> bytes:
    """A block's bytes."""
    zfpy = need("zfpy", "writing blocks of zfp")
    found: bytes = zfpy.compress_numpy(np.ascontiguousarray(_folded(block)), tolerance=tolerance, write_header=False)
    return found


def decode(data: Block, out: Block, tolerance: float) -> None:
    """A block from its bytes, into memory of ours."""
    zfpy = need("zfpy", "reading blocks of zfp")
    folded = _folded(out)
    kind = zfpy.dtype_to_ztype(out.dtype)
    zfpy._decompress(data, kind, folded.shape, out=folded, tolerance=tolerance)


def _folded(block: Block) -> Block:
    """With at most as many axes as zfp knows; leading ones become one."""
    return block if block.ndim <= _MOST_AXES else block.reshape(-1, *block.shape[-_MOST_AXES + 1 :])


def most_bytes(box: tuple[int, ...]) -> int:
    """Bytes that zfp may read of a block."""
    folded = box if len(box) <= _MOST_AXES else (math.prod(box[: -_MOST_AXES + 1]), *box[-_MOST_AXES + 1 :])
    return round_up(math.prod(-(-length // 4) for length in folded) * _MOST_BYTES, 64)


def choose_box(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Nearly cubic blocks of about 2**16 elements, in multiples of 4."""
    box = [1] * len(shape)
    while math.prod(box) < 1 << 16:
        open_axes = [axis for axis in range(len(shape)) if box[axis] < shape[axis]]
        if not open_axes:
            break
        axis = min(open_axes, key=lambda axis: (box[axis], -axis))
        box[axis] = min(shape[axis], max(4, 2 * box[axis]))
    return tuple(box)
