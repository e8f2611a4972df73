"""Your own function on tiles: read one after another, and written back."""

import os
import tempfile

import numpy as np

import outsize

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "x.npy")
    np.save(path, np.arange(60_000, dtype="float32").reshape(600, 100))

    largest = 0.0
    for tile in outsize.open(path).tiles(
        shape=(100, 100)
    ):  # NumPy arrays; with device="cuda" torch tensors on the card
        largest = max(largest, float(tile.max()))
    assert largest == 59_999

    x = outsize.open(path, mode="r+")
    for tile in x.tiles(write=True, shape=(100, 100)):
        tile *= 2  # written back when the next tile is asked for
    assert np.load(path)[-1, -1] == 2 * 59_999
    print("doubled in place")
