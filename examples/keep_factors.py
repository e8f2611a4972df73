"""A tensor kept as a few small factors, with an error that is promised and kept."""

import numpy as np

import outsize

rng = np.random.default_rng(0)
a, b, c = (rng.normal(size=(length, 4)) for length in (60, 50, 40))
x = np.einsum("ir,jr,kr->ijk", a, b, c).astype("float32")
x += 0.001 * rng.normal(size=x.shape).astype("float32")

factors = outsize.decompose(x, "tucker", error=0.01)
print(factors.summary())

rebuilt = factors.compute()
assert np.linalg.norm(rebuilt - x) <= 0.01 * np.linalg.norm(x)
assert factors.summary().bytes_after < x.nbytes / 10
