"""Five tensors that did not fit, in TensorFlow and Keras: `python in_tensorflow.py NAME plain` fails as its readers' did, `...
NAME ours` works. TensorFlow's own limit takes the place of a card's memory.

data: 3075200 x 512 rows to train on. picture: activations of 1 x 256 x 1024 x 1021. update: a training step that ends at a small
tensor (384 x 192). shape: how large may the batch be? larger: a product with a matrix that no card holds.
"""

import os
import sys

from limits import MANY, ROOM, SCALE, WIDE, run, stored

os.environ |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ROOM >> 20)}
os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}  # oneDNN has an allocator of its own

import keras
import numpy as np
import tensorflow as tf

import outsize

ROWS = 200_000 // SCALE


def make():
    layers = [keras.layers.Dense(384, activation="relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((384,)), *layers, keras.layers.Dense(192)])
    model.compile("adam", "mse")
    return model


def data_plain():
    return tf.reduce_mean(tf.ones((MANY, 512)))


def data_ours():
    with stored(MANY, 512) as path:
        for rows in outsize.DataSource(path, budget=ROOM // 8).to_tensorflow(1024):
            last = tf.reduce_mean(rows)
        return float(last)


def picture_plain():
    x = tf.ones(WIDE)
    return ((x - tf.reduce_mean(x, 1, keepdims=True)) / tf.math.reduce_std(x, 1, keepdims=True)).shape


def picture_ours():
    with stored(*WIDE) as path:
        x = outsize.open(path)
        return (
            ((x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True))
            .save(path + ".z.npy", budget=ROOM // 8)
            .shape
        )


def update_plain():
    return make().train_on_batch(np.ones((ROWS, 384), "float32"), np.ones((ROWS, 192), "float32"))


def update_ours():
    model = make()
    x, y = np.ones((ROWS, 384), "float32"), np.ones((ROWS, 192), "float32")
    outsize.fit(model, batch=(x, y), budget=ROOM * 3 // 4)
    return model.train_on_batch(x, y)


def shape_plain():
    model = make()
    for rows in (1000 * 4**power for power in range(9)):
        model.train_on_batch(np.ones((rows, 384), "float32"), np.ones((rows, 192), "float32"))
    return "every shape fits"


def shape_ours():
    return outsize.estimate(make(), batch=1000, device="cpu", budget=ROOM).largest[0].largest


def larger_plain():
    x = tf.ones((MANY // 2, 512))
    return tf.matmul(x, x, transpose_a=True).shape


def larger_ours():
    with stored(MANY // 2, 512) as path:
        total = tf.zeros((512, 512))
        for tile in outsize.DataSource(path, budget=ROOM // 4).to_tensorflow(2048):
            total += tf.matmul(tile, tile, transpose_a=True)
        return total.shape


CASES = {
    (name, way): globals()[f"{name}_{way}"]
    for name in ("data", "picture", "update", "shape", "larger")
    for way in ("plain", "ours")
}

if __name__ == "__main__":
    run(CASES, *sys.argv[1:3])
