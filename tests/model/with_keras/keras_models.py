"""Small Keras models whose activations are larger than their weights, each with a batch."""

import keras
import numpy as np
from keras import layers

ROWS = 32


def _numbers(*shape):
    return np.random.default_rng(0).random(shape, dtype="float32")


def _whole(top, *shape):
    return np.random.default_rng(1).integers(0, top, shape).astype("int32")


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def cnn():
    net = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((24, 24, 3)), *net])
    model.compile("adam", sparse(), metrics=["accuracy"])
    return model, (_numbers(ROWS, 24, 24, 3), _whole(10, ROWS))


def lstm():
    net = [layers.Embedding(50, 16, mask_zero=True), layers.LSTM(16, return_sequences=True), layers.Dense(50)]
    model = keras.Sequential([keras.Input((12,), dtype="int32"), *net])
    model.compile("rmsprop", sparse())
    words = _whole(50, ROWS, 12)
    words[np.arange(ROWS)[:, None] % 7 + np.arange(12) > 10] = 0  # samples of different lengths
    return model, (words, _whole(50, ROWS, 12))


def transformer():
    words = keras.Input((24,), dtype="int32")
    x = layers.Embedding(60, 32)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="gelu")(x)))
    model = keras.Model(words, layers.Dense(60)(x))
    model.compile(keras.optimizers.AdamW(), sparse())
    return model, (_whole(60, ROWS, 24), _whole(60, ROWS, 24))


def autoencoder():
    inner = {"strides": 2, "padding": "same", "activation": "relu"}
    net = [layers.Conv2D(8, 3, **inner), layers.Conv2D(16, 3, **inner), layers.Conv2DTranspose(8, 3, **inner)]
    last = layers.Conv2DTranspose(3, 3, strides=2, padding="same", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((32, 32, 3)), *net, last])
    model.compile("adam", "mse")
    pictures = _numbers(ROWS, 32, 32, 3)
    return model, (pictures, pictures)


def two_inputs():
    wide, picture = keras.Input((16,)), keras.Input((20, 20, 1))
    seen = layers.Flatten()(layers.Conv2D(8, 3, activation="relu", activity_regularizer="l2")(picture))
    both = layers.concatenate([layers.Dense(8)(wide), layers.Dense(8)(seen)])
    model = keras.Model([wide, picture], [layers.Dense(1, name="p")(both), layers.Dense(5, name="q")(both)])
    model.compile("sgd", ["mse", sparse()], loss_weights=[1.0, 0.5])
    batch = [_numbers(ROWS, 16), _numbers(ROWS, 20, 20, 1)], [_numbers(ROWS, 1), _whole(5, ROWS)]
    return model, (*batch, [_numbers(ROWS), _numbers(ROWS)])


ALL = {make.__name__: make for make in (cnn, lstm, transformer, autoencoder, two_inputs)}
