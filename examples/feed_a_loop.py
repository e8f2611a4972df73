"""Batches from files, shuffled, inside a budget."""

import os
import tempfile

import numpy as np

import outsize

with tempfile.TemporaryDirectory() as folder:
    images, labels = os.path.join(folder, "images.npy"), os.path.join(folder, "labels.npy")
    np.save(images, np.zeros((500, 3, 16, 16), "uint8"))
    np.save(labels, np.arange(500))

    source = outsize.DataSource(images, labels, budget="2MiB")
    seen = []
    for _, which in source.batches(64, shuffle=True, seed=1):
        seen.extend(which.tolist())
    assert sorted(seen) == list(range(500)) and seen != sorted(seen)
    print(f"{len(seen)} rows, each once, in another order")
