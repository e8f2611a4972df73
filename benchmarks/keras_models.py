"""Ten Keras models with a batch each, of sizes at which tensors are large: `make(name)` gives (model, x, y)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

NAMES = (
    "cnn", "lstm", "transformer", "autoencoder", "two_inputs", "mlp", "resnet", "gru_dropout", "wide_embedding", "unet",
)  # fmt: skip


def _numbers(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape, dtype="float32")


def _whole(top: int, *shape: int) -> Any:
    return np.random.default_rng(1).integers(0, top, shape).astype("int32")


def _sparse() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _chain(shape: tuple[int, ...], *net: Any, dtype: str = "float32") -> Any:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *net])


def _conv(filters: int, **more: Any) -> Any:
    return layers.Conv2D(filters, 3, padding="same", activation="relu", **more)


def cnn() -> Any:
    model = _chain(
        (64, 64, 3), _conv(32), _conv(32), layers.MaxPooling2D(), _conv(64), layers.Flatten(), layers.Dense(10)
    )
    model.compile("adam", _sparse(), metrics=["accuracy"])
    return model, _numbers(64, 64, 64, 3), _whole(10, 64)


def lstm() -> Any:
    model = _chain((100,), layers.Embedding(5000, 128), layers.LSTM(256), layers.Dense(10), dtype="int32")
    model.compile("adam", _sparse(), metrics=["accuracy"])
    return model, _whole(5000, 128, 100), _whole(10, 128)


def transformer() -> Any:
    words = keras.Input((128,), dtype="int32")
    x = layers.Embedding(4000, 256)(words)
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 64)(x, x, use_causal_mask=True))
        x = layers.LayerNormalization()(x + layers.Dense(256)(layers.Dense(1024, activation="gelu")(x)))
    model = keras.Model(words, layers.Dense(4000)(x))
    model.compile("adam", _sparse())
    return model, _whole(4000, 16, 128), _whole(4000, 16, 128)


def autoencoder() -> Any:
    up = {"strides": 2, "padding": "same", "activation": "relu"}
    back = layers.Conv2DTranspose(32, 3, **up), layers.Conv2DTranspose(3, 3, **up)
    model = _chain((64, 64, 3), _conv(32, strides=2), _conv(64, strides=2), *back)
    model.compile("adam", "mse")
    pictures = _numbers(128, 64, 64, 3)
    return model, pictures, pictures


def two_inputs() -> Any:
    wide, picture = keras.Input((512,)), keras.Input((32, 32, 1))
    seen = layers.Dense(64)(layers.Flatten()(layers.Conv2D(16, 3, activation="relu")(picture)))
    both = layers.concatenate([layers.Dense(512, activation="relu")(wide), seen])
    model = keras.Model([wide, picture], [layers.Dense(1, name="p")(both), layers.Dense(5, name="q")(both)])
    model.compile("rmsprop", ["mse", _sparse()], loss_weights=[1.0, 0.5])
    return model, [_numbers(1024, 512), _numbers(1024, 32, 32, 1)], [_numbers(1024, 1), _whole(5, 1024)]


def mlp() -> Any:
    model = _chain((1024,), *(layers.Dense(1024, activation="relu") for _ in range(6)), layers.Dense(10))
    model.compile("adam", "mse")
    return model, _numbers(2048, 1024), _numbers(2048, 10)


def resnet() -> Any:
    pictures = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same")(pictures)
    for _ in range(4):
        inner = layers.Conv2D(32, 3, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
        x = layers.Add()([x, layers.Conv2D(32, 3, padding="same")(layers.ReLU()(layers.BatchNormalization()(inner)))])
    model = keras.Model(pictures, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), _sparse())
    return model, _numbers(64, 32, 32, 3), _whole(10, 64)


def gru_dropout() -> Any:
    first = layers.Bidirectional(layers.GRU(128, return_sequences=True))
    model = _chain((50, 64), first, layers.Dropout(0.3), layers.GRU(64), layers.Dense(1))
    model.compile("sgd", "mse")
    return model, _numbers(256, 50, 64), _numbers(256, 1)


def wide_embedding() -> Any:
    net = layers.Embedding(50000, 128), layers.GlobalAveragePooling1D(), layers.Dense(50000)
    model = _chain((20,), *net, dtype="int32")
    model.compile("adam", _sparse())
    return model, _whole(50000, 256, 20), _whole(50000, 256)


def unet() -> Any:
    pictures = keras.Input((128, 128, 3))
    one = _conv(16)(pictures)
    two = _conv(32)(layers.MaxPooling2D()(one))
    up = layers.UpSampling2D()(_conv(64)(layers.MaxPooling2D()(two)))
    up = layers.UpSampling2D()(_conv(32)(layers.concatenate([up, two])))
    last = layers.Conv2D(1, 1, activation="sigmoid")(_conv(16)(layers.concatenate([up, one])))
    model = keras.Model(pictures, last)
    model.compile(keras.optimizers.AdamW(), "binary_crossentropy")
    return model, _numbers(8, 128, 128, 3), _whole(2, 8, 128, 128, 1).astype("float32")


def make(name: str) -> Any:
    """(model, x, y)"""
    keras.utils.set_random_seed(0)
    return globals()[name]()
