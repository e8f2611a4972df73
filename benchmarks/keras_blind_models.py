"""Eight further Keras models, chosen after the rules of `estimate` were written: `make(name)` gives (model, x, y)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras_models import _chain, _numbers, _sparse, _whole

NAMES = (
    "attention_conv", "separable", "norms", "masked_gru", "transposed", "mixed_precision", "large_softmax", "own_step",
    "many_outputs",
)  # fmt: skip


def attention_conv() -> Any:
    pictures = keras.Input((32, 32, 3))
    x = layers.Conv2D(64, 4, strides=4, activation="gelu")(pictures)
    x = layers.Reshape((64, 64))(x)
    for _ in range(2):
        inner = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(inner, inner)
        x = x + layers.Conv1D(64, 3, padding="same")(layers.Conv1D(128, 3, padding="same", activation="gelu")(x))
    model = keras.Model(pictures, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    model.compile(keras.optimizers.AdamW(), _sparse())
    return model, _numbers(128, 32, 32, 3), _whole(10, 128)


def separable() -> Any:
    net: list[Any] = [layers.Conv2D(32, 3, strides=2, padding="same")]
    for size in (64, 128):
        net += [layers.DepthwiseConv2D(3, padding="same", activation="relu")]
        net += [layers.SeparableConv2D(size, 3, strides=2, padding="same", activation="relu")]
    model = _chain((96, 96, 3), *net, layers.GlobalMaxPooling2D(), layers.Dense(10))
    model.compile(keras.optimizers.RMSprop(momentum=0.9), _sparse())
    return model, _numbers(48, 96, 96, 3), _whole(10, 48)


def norms() -> Any:
    x = first = keras.Input((48, 48, 8))
    for norm in (layers.BatchNormalization, lambda: layers.GroupNormalization(4), layers.LayerNormalization):
        x = layers.Activation("swish")(norm()(layers.Conv2D(24, 3, padding="same")(x)))
    model = keras.Model(first, layers.Dense(5)(layers.Flatten()(layers.AveragePooling2D(2)(x))))
    model.compile(keras.optimizers.SGD(0.01, nesterov=True, momentum=0.9), _sparse(), metrics=["accuracy"])
    return model, _numbers(64, 48, 48, 8), _whole(5, 64)


def masked_gru() -> Any:
    net = (
        layers.Embedding(8000, 96, mask_zero=True),
        layers.Bidirectional(layers.GRU(96, return_sequences=True)),
        layers.GRU(64),
        layers.Dense(20),
    )
    model = _chain((40,), *net, dtype="int32")
    model.compile("adam", _sparse())
    return model, _whole(8000, 192, 40), _whole(20, 192)


def transposed() -> Any:
    net: list[Any] = [layers.Dense(8 * 8 * 64), layers.Reshape((8, 8, 64))]
    for size in (64, 32, 16):
        net += [layers.Conv2DTranspose(size, 4, strides=2, padding="same"), layers.BatchNormalization()]
        net += [layers.LeakyReLU()]
    model = _chain((100,), *net, layers.Conv2D(3, 5, padding="same", activation="tanh"))
    model.compile("adam", "mae")
    return model, _numbers(64, 100), _numbers(64, 64, 64, 3)


def mixed_precision() -> Any:
    net = [layers.Dense(768, activation="gelu", dtype="mixed_bfloat16") for _ in range(5)]
    model = _chain((768,), *net, layers.Dense(4, dtype="float32"))
    model.compile("adam", "mse")
    return model, _numbers(2048, 768), _numbers(2048, 4)


def large_softmax() -> Any:
    words = keras.Input((16,), dtype="int32")
    x = layers.Embedding(30000, 64)(words)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    model = keras.Model(words, layers.Dense(30000, activation="softmax")(x))
    model.compile("adagrad", "categorical_crossentropy")
    labels = np.zeros((256, 30000), "float32")
    labels[np.arange(256), _whole(30000, 256)] = 1
    return model, _whole(30000, 256, 16), labels


class Distilled(keras.Model):
    """A `train_step` of its own: two forward passes and a penalty of the gradient."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            one, other = self(x, training=True), self(x * 0.9, training=True)
            loss = tf.reduce_mean((one - y) ** 2) + 0.1 * tf.reduce_mean(tf.abs(one - tf.stop_gradient(other)))
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def own_step() -> Any:
    given = keras.Input((640,))
    x = given
    for _ in range(4):
        x = layers.Dropout(0.2)(layers.Dense(640, activation="silu")(x))
    model = Distilled(given, layers.Dense(32)(x))
    model.compile(keras.optimizers.Lion())
    return model, _numbers(1536, 640), _numbers(1536, 32)


def many_outputs() -> Any:
    pictures = keras.Input((40, 40, 3))
    x = layers.Conv2D(24, 3, padding="same", activation="elu")(pictures)
    deep = layers.Conv2D(48, 3, strides=2, padding="same", activation="elu")(x)
    box = layers.Dense(4, name="box")(layers.GlobalAveragePooling2D()(deep))
    mask = layers.Conv2D(1, 1, name="mask")(layers.concatenate([x, layers.UpSampling2D()(deep)]))
    kind = layers.Dense(50, name="kind")(layers.Flatten()(layers.MaxPooling2D()(deep)))
    model = keras.Model(pictures, [box, mask, kind])
    model.compile("nadam", ["huber", keras.losses.BinaryCrossentropy(from_logits=True), _sparse()])
    targets = [_numbers(96, 4), _whole(2, 96, 40, 40, 1).astype("float32"), _whole(50, 96)]
    return model, _numbers(96, 40, 40, 3), targets


def make(name: str) -> Any:
    """(model, x, y)"""
    keras.utils.set_random_seed(0)
    return globals()[name]()
