"""In a real memory control group whose limit kills the plain training, the fitted one lives."""

import os
import pathlib
import sys

import cgroup

PROGRAM = """
import sys
import keras
import numpy as np

layers = [keras.layers.Dense(1024, activation="relu") for _ in range(8)]
model = keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((32768, 1024), "float32"), np.ones((32768, 1), "float32")
if sys.argv[1] == "fitted":
    import outsize

    print(outsize.fit(model, batch=(x, y), budget="640MiB").rows)
print(model.train_on_batch(x, y))
"""
LIMIT = 1700 << 20
"""The plain step holds more than 1.1 GiB of tensors beside 0.5 GiB of TensorFlow and the batch."""


def test_a_limit_that_kills_the_plain_step_lets_the_fitted_one_live(tf):
    source = pathlib.Path(__file__).resolve().parents[3] / "src"
    env = {**os.environ, "PYTHONPATH": str(source), "TF_CPP_MIN_LOG_LEVEL": "3"}
    plain, fitted = (cgroup.run([sys.executable, "-c", PROGRAM, way], LIMIT, env=env) for way in ("plain", "fitted"))
    assert plain.killed or plain.status != 0
    assert fitted.fine, fitted.stderr[-2000:]
    print(plain.peak >> 20, fitted.peak >> 20, fitted.anonymous >> 20)
