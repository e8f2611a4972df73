"""A matrix product whose matrices and result stay on disk."""

import os
import tempfile

import numpy as np

import outsize

with tempfile.TemporaryDirectory() as folder:
    a, b, c = (os.path.join(folder, f"{name}.npy") for name in "abc")
    rng = np.random.default_rng(0)
    np.save(a, rng.random((1200, 900), dtype="float32"))
    np.save(b, rng.random((900, 700), dtype="float32"))

    product = outsize.open(a) @ outsize.open(b)
    print(product.plan(budget="4MiB"))
    product.save(c, budget="4MiB")
    assert np.allclose(np.load(c), np.load(a) @ np.load(b), rtol=1e-4)
