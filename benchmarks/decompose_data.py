"""Low-rank tensors with noise, written slab by slab: `python decompose_data.py OUT.npy 1536,1024,1024 40 0.005 [tt]`.

A tensor of the given shape in float32: of Tucker rank (r, r, ...) or, with `tt`, a tensor train of ranks r, and noise of the
given relative size.
"""

from __future__ import annotations

import math
import sys

import numpy as np


def main(path: str, shape: tuple[int, ...], rank: int, noise: float, kind: str) -> None:
    """Write the tensor."""
    draws = np.random.default_rng(7)
    bases = [np.linalg.qr(draws.standard_normal((n, min(rank, n))))[0].astype("f4") for n in shape]
    if kind == "tt":
        ranks = [1, *([rank] * (len(shape) - 1)), 1]
        cores = [draws.standard_normal((ranks[k], n, ranks[k + 1])).astype("f4") for k, n in enumerate(shape)]
        rest = cores[-1][..., 0]
        for core in reversed(cores[1:-1]):
            rest = np.tensordot(core, rest, axes=(2, 0))
        rest /= np.linalg.norm(rest)
        first = cores[0][0]
    else:
        core = draws.standard_normal([b.shape[1] for b in bases]).astype("f4")
        decay = np.linspace(1, 0.1, core.shape[0], dtype="f4")
        rest = core * decay.reshape(-1, *[1] * (core.ndim - 1))
        for axis in range(1, len(shape)):
            rest = np.moveaxis(np.tensordot(bases[axis], rest, axes=(1, axis)), 0, axis)
        first = bases[0]
    first = first / np.linalg.norm(first) * math.sqrt(first.shape[1])
    scale = np.linalg.norm(rest) / math.sqrt(math.prod(shape)) * noise
    out = np.lib.format.open_memmap(path, "w+", "f4", shape)
    step = max(1, (64 << 20) // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        slab = np.tensordot(first[start : start + step], rest, axes=(1, 0))
        slab += np.float32(scale) * draws.standard_normal(slab.shape, dtype="f4")
        out[start : start + step] = slab
    out.flush()


if __name__ == "__main__":
    target, lengths, rank, noise, *kind = sys.argv[1:]
    main(target, tuple(map(int, lengths.split(","))), int(rank), float(noise), *(kind or ["tucker"]))
