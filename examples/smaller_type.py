"""What float16 costs, measured on the data: nothing is written with `target=None`."""

import os
import tempfile

import numpy as np

import outsize

with tempfile.TemporaryDirectory() as folder:
    source = os.path.join(folder, "x.npy")
    np.save(source, np.random.default_rng(0).normal(size=(1000, 500)).astype("float32"))

    measured = outsize.convert(source, None, "float16")
    print(measured)
    assert measured.precision.overflowed == 0 and measured.precision.rms < 0.001

    outsize.convert(source, os.path.join(folder, "half.npy"), "float16")
    assert outsize.show(os.path.join(folder, "half.npy")).arrays[0].dtype == "float16"
