"""Make the benchmark's inputs once: `python benchmarks/data.py FOLDER` (9.5 GB, float32 between 0.5 and 1.5)."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (3_075_200, 512),
    "a": (16_384, 16_384),
    "b": (16_384, 16_384),
    "image": (1, 256, 1024, 1021),
}
"""File stem -> shape."""
WHOLE = 536_870_912
"""Whole numbers: 2 GiB."""
COSINE_ROWS = 32_768
"""Rows that are compared with the first 4,096: a result of 512 MiB."""
SORTED_ROWS = 1_048_576
"""Rows whose elements are sorted: 2 GiB."""


def part(rows: int, there: int) -> int:
    """That many of the whole file's rows, or as small a part of them as `there` rows are of all."""
    return rows * there // SHAPES["tall"][0]


def scaled(shape: tuple[int, ...], scale: int) -> tuple[int, ...]:
    """A shape with fewer elements by `scale`: a square stays a square, else the first long axis is shorter."""
    if shape[0] == shape[-1]:
        return tuple(int(length / scale**0.5) for length in shape)
    axis = 1 if shape[0] == 1 else 0
    return tuple(length // scale if i == axis else length for i, length in enumerate(shape))


def make(folder: Path, scale: int = 1, stems: tuple[str, ...] = tuple(SHAPES)) -> None:
    """Write what is missing; `scale` divides the elements, for a quick try."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    for stem, shape in SHAPES.items():
        shape = scaled(shape, scale)
        path = folder / f"{stem}.npy"
        if path.exists() or stem not in stems:
            continue
        out = np.lib.format.open_memmap(path.with_suffix(".part"), "w+", "float32", shape).reshape(-1)
        for start in range(0, out.size, 1 << 24):
            piece = out[start : start + (1 << 24)]
            piece[:] = rng.random(piece.size, dtype="float32") + np.float32(0.5)
        out.base.flush()
        path.with_suffix(".part").rename(path)


def make_whole(folder: Path, scale: int = 1) -> None:
    """Whole numbers below 2**28, most of which come several times."""
    path = folder / "whole.npy"
    if path.exists():
        return
    rng = np.random.default_rng(8)
    out = np.lib.format.open_memmap(path.with_suffix(".part"), "w+", "int32", (WHOLE // scale,))
    for start in range(0, out.size, 1 << 24):
        piece = out[start : start + (1 << 24)]
        piece[:] = rng.integers(0, (1 << 28) // scale, piece.size, dtype="int32")
    out.flush()
    path.with_suffix(".part").rename(path)


def make_blosc2(folder: Path, stems: tuple[str, ...] = ("tall", "a", "b")) -> None:
    """blosc2 works on its own format: a copy of each input, uncompressed (the data is noise)."""
    import blosc2

    (folder / "blosc2").mkdir(exist_ok=True)
    for stem in stems:
        target = folder / "blosc2" / f"{stem}.b2nd"
        if target.exists():
            continue
        source = np.load(folder / f"{stem}.npy", mmap_mode="r")
        part = target.with_suffix(".part.b2nd")
        out = blosc2.empty(source.shape, dtype=source.dtype, urlpath=str(part), mode="w", cparams={"clevel": 0})
        step = max(1, (1 << 25) // source.shape[1])
        for start in range(0, len(source), step):
            out[start : start + step] = source[start : start + step]
        part.rename(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--blosc2", action="store_true")
    args = parser.parse_args()
    make(args.folder, args.scale)
    if args.blosc2:
        make_blosc2(args.folder)
