"""Cholesky and solve of a matrix of 20000 x 20000 float64 (3.0 GiB) in 1 GiB, with residuals in the units of LAPACK's own tests.

Run: `python benchmarks/large_matrices.py cholesky FOLDER [N]`, and the same with `solve`; in a control group of 1.5 GiB the
kernel checks the peak. A residual below about 10 is what LAPACK's tests call passed: |A v - L (L' v)| / (n eps |A| |v|).
"""

import os
import sys
import time

import numpy as np

import outsize
import outsize.array as xp

BUDGET = "1GiB"


def peak() -> int:
    """Highest resident memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def make(folder: str, n: int, positive: bool) -> xp.Array:
    """A random matrix on disk; symmetric with positive eigenvalues where that is asked for."""
    path = os.path.join(folder, f"{'positive' if positive else 'square'}-{n}.npy")
    if not os.path.exists(path):
        rng, step = np.random.default_rng(0), 1000
        out = np.lib.format.open_memmap(path, "w+", np.float64, (n, n))
        for i in range(0, n, step):
            for j in range(0, i + 1 if positive else n, step):
                block = rng.normal(size=out[i : i + step, j : j + step].shape)
                if positive:
                    block *= np.sqrt(0.5)
                    block = (
                        np.tril(block) + np.tril(block, -1).T + 1.5 * np.sqrt(n) * np.eye(len(block))
                        if i == j
                        else block
                    )
                    out[j : j + step, i : i + step] = block.T
                out[i : i + step, j : j + step] = block
        out.flush()
    return outsize.open(path)


def main() -> None:
    """One of the two."""
    work, folder = sys.argv[1], sys.argv[2]
    n = int(sys.argv[3]) if len(sys.argv) > 3 else 20000
    v = np.random.default_rng(1).normal(size=n)
    with outsize.budget(host=BUDGET, scratch=folder):
        x = make(folder, n, work == "cholesky")
        size = float(xp.sqrt((x * x).sum()))
        before, start = peak(), time.perf_counter()
        if work == "cholesky":
            lower = xp.linalg.cholesky(x)
            seconds = time.perf_counter() - start
            left = (x @ v).compute() - (lower @ (lower.T @ v)).compute()
            scale = size * np.linalg.norm(v)
            flops = n**3 / 3
        else:
            found = xp.linalg.solve(x, outsize.open(v)).compute()
            seconds = time.perf_counter() - start
            left = (x @ found).compute() - v
            scale = size * np.linalg.norm(found)
            flops = 2 * n**3 / 3
    residual = np.linalg.norm(left) / (n * np.finfo(float).eps * scale)
    print(
        f"{work} {n}: {seconds:.0f} s, {flops / seconds / 1e9:.1f} GFLOP/s, residual {residual:.3g} n eps, "
        f"peak {peak() / 2**20:.0f} MiB resident ({before / 2**20:.0f} before), budget {BUDGET}"
    )


if __name__ == "__main__":
    main()
