"""A z-score of a file larger than the budget: planned first, then run, with the same result as NumPy's."""

import os
import tempfile

import numpy as np

import outsize

with tempfile.TemporaryDirectory() as folder:
    source, target = os.path.join(folder, "x.npy"), os.path.join(folder, "z.npy")
    np.save(source, np.random.default_rng(0).normal(3, 2, size=(40_000, 128)).astype("float32"))  # 20 MB

    x = outsize.open(source)  # only the header is read
    z = (x - x.mean(axis=0)) / x.std(axis=0)  # nothing is computed yet
    print(z.plan(budget="8MiB"))
    z.save(target, budget="8MiB")

    whole = np.load(source)
    assert np.allclose(np.load(target), (whole - whole.mean(axis=0)) / whole.std(axis=0), atol=1e-4)
