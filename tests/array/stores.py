"""What the tests of all stores share: buffers as the engine hands them over, and arrays to put into them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outsize.array.store.base import Region, Sink, Store, region_shape, whole
from outsize.array.store.registry import FORMATS


def make_buffer(size: int) -> Any:
    """A page-aligned buffer of anonymous memory."""
    return np.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE)), np.uint8)


def read(store: Store, region: Region | None = None) -> np.ndarray:
    """A region, read into a buffer of exactly the extent that the store asked for, and copied out of it."""
    region = whole(store.shape) if region is None else region
    size = store.extent(region)
    buffer = make_buffer(size)[:size]
    block = store.read(region, buffer)
    assert block.shape == region_shape(region)
    assert block.dtype == store.dtype
    if block.size and not store.resident:
        assert np.may_share_memory(block, buffer), "the block must lie inside the buffer"
    assert store.traffic(region) >= 0
    return np.array(block)


def write(sink: Sink, values: np.ndarray, cuts: int = 3) -> Store:
    """All of an array, in a few regions cut along axis 0 at multiples of the granule, and committed."""
    length = values.shape[0] if values.ndim else 0
    step = max(1, sink.granule[0] if values.ndim else 1) * max(
        1, -(-length // (cuts * max(1, sink.granule[0] if sink.granule else 1)))
    )
    starts = range(0, length, step) if values.ndim else [0]
    for start in starts:
        region = (((start, min(length, start + step)), *whole(values.shape)[1:])) if values.ndim else ()
        block = sink.lay(region, make_buffer(sink.room(region)))
        block[...] = values[tuple(slice(*axis) for axis in region)]
        size = sink.extent(region)
        sink.write(region, block, make_buffer(size)[:size])
    return sink.commit()


def select(values: np.ndarray, region: Region) -> np.ndarray:
    return values[tuple(slice(*axis) for axis in region)]


DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]


@st.composite
def arrays(
    draw: Any, dtypes: list[str] = DTYPES, min_dims: int = 0, max_dims: int = 4, min_side: int = 0
) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=min_dims, max_dims=max_dims, min_side=min_side, max_side=9))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    seed = draw(st.integers(0, 2**31))
    raw = np.random.default_rng(seed).integers(0, 256, size=(*shape, dtype.itemsize), dtype=np.uint8)
    if dtype.kind == "b":
        return np.asarray(raw[..., 0] > 127)
    if dtype.kind in "fc":
        return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)
    return raw.view(dtype).reshape(shape)


@st.composite
def regions(draw: Any, shape: tuple[int, ...]) -> Region:
    axes = []
    for length in shape:
        start = draw(st.integers(0, length))
        axes.append((start, draw(st.integers(start, length))))
    return tuple(axes)


@st.composite
def chunk_shapes(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(draw(st.integers(1, max(1, length + 2))) for length in shape)


def peak_of(code: str, *arguments: str) -> int:
    """Peak of anonymous memory in bytes that `code` adds in a fresh process, between its calls of `begin()` and
    `end()`."""
    frame = """
import sys
def _status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name): return int(line.split()[1]) * 1024
def begin():
    global _before
    open("/proc/self/clear_refs", "w").write("5")
    _before = _status("VmRSS")
def end():
    print("PEAK", _status("VmHWM") - _before)
"""
    folders = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    settings = (("PYTHONPATH", folders), ("MALLOC_MMAP_THRESHOLD_", "65536"), ("MALLOC_TRIM_THRESHOLD_", "65536"))
    child = forks.start(frame + code, *arguments, imported=("stores",), settings=settings)
    out, err = child.communicate()
    assert child.returncode == 0, err
    return int(out.split("PEAK")[1].split()[0])


Maker = Callable[[Path, np.ndarray], Any]


WRITTEN = [row.suffixes[0] for row in FORMATS if row.writes]
"""The suffix of every format that can be written."""
