"""Fitted steps of Keras models that were chosen after `fit` was written: the plan beside TensorFlow's own account, and 20 steps.

    python benchmarks/keras_fit_blind.py [NAME ...]

Each model in a process of its own with `TF_CPU_ALLOCATOR_USE_BFC=true`: the budget is a part of the plain bound; measured is
`get_memory_info("CPU:0")["peak"]` of four fitted steps; then the weights of 20 plain steps and 20 fitted ones are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PARTS = {"residual": 0.7, "normalised": 0.85, "pyramid": 0.6, "classifier": 0.9, "tagger": 0.6}
"""Name -> part of the plain bound that is the budget."""


def make(name: str) -> tuple[Any, tuple[Any, Any]]:
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(0)
    data = np.random.default_rng(0)
    pictures = keras.Input((32, 32, 3))
    if name in ("residual", "normalised"):  # normalised: batch statistics do not split, so only layers run again
        x = layers.Conv2D(16, 3, padding="same")(pictures)
        for number in range(4):
            inner = layers.Conv2D(16, 3, padding="same", activation="elu")(x)
            x = x + layers.Activation("tanh")(layers.Conv2D(16, 3, padding="same")(inner))
            if name == "normalised" and number == 1:
                x = layers.BatchNormalization()(x)
        model = keras.Model(pictures, layers.Dense(10)(layers.GlobalMaxPooling2D()(x)))
    elif name == "pyramid":  # values that cross several segments
        one = layers.Conv2D(12, 3, padding="same", activation="relu")(pictures)
        two = layers.Conv2D(24, 3, strides=2, padding="same", activation="relu")(one)
        three = layers.Conv2D(24, 3, padding="same", activation="relu")(two)
        up = layers.Concatenate()([one, layers.UpSampling2D()(three)])
        x = layers.Conv2D(12, 3, padding="same", activation="relu")(up)
        model = keras.Model(pictures, layers.Dense(10)(layers.Flatten()(layers.AveragePooling2D(4)(x))))
    elif name == "classifier":  # draws: slices are not the same, so only layers run again
        words = keras.Input((48,), dtype="int32")
        x = layers.Embedding(500, 48)(words)
        for number in range(3):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 12)(x, x))
            x = layers.LayerNormalization()(x + layers.Dense(48)(layers.Dense(192, activation="gelu")(x)))
            x = layers.Dropout(0.1, seed=1)(x) if number == 0 else x
        model = keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    else:  # masks, and a label a word
        words = keras.Input((24,), dtype="int32")
        x = layers.Embedding(300, 32, mask_zero=True)(words)
        x = layers.Bidirectional(layers.GRU(24, return_sequences=True))(x)
        model = keras.Model(words, layers.Dense(10)(layers.Dense(64, activation="tanh")(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows, shape = 64, tuple(model.input.shape[1:])
    x = data.random((rows, *shape), dtype="float32") if len(shape) > 1 else data.integers(0, 300, (rows, *shape))
    return model, (x, data.integers(0, 10, (rows, *model.output.shape[1:-1])))


def run(name: str) -> dict[str, Any]:
    import numpy as np
    import tensorflow as tf

    import outsize

    (model, batch), (plain, _) = make(name), make(name)
    bound = outsize.estimate(model, *batch, device="cpu").peak_requested.bound
    budget = int(bound * PARTS[name])
    fitted = outsize.fit(model, batch=batch, budget=budget)
    model.optimizer.build(model.trainable_variables)
    kept = [variable.numpy() for variable in model.variables]
    given = tf.nest.map_structure(tf.constant, batch)
    step = tf.function(model.train_step, autograph=False)
    peaks = []
    for _ in range(5):
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(given)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    for variable, value in zip(model.variables, kept, strict=True):
        variable.assign(value)
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable.assign(tf.zeros_like(variable) if "learning_rate" not in variable.path else variable)
    for each in (plain, model):
        each.fit(*batch, batch_size=64, epochs=20, shuffle=False, verbose=0)
    off = max(float(np.abs(a - b).max()) for a, b in zip(plain.get_weights(), model.get_weights(), strict=True))
    used = " + ".join(remedy.how for remedy in fitted.plan.remedies)
    return {
        "plain": bound,
        "budget": budget,
        "plan": fitted.plan.peak(),
        "measured": max(peaks[1:]),
        "off": off,
        "used": used,
    }


def main() -> int:
    if "OUTSIZE_CHILD" in os.environ:
        print(json.dumps(run(sys.argv[1])))
        return 0
    print("| model | plain bound MiB | budget | plan, at most | measured | weights after 20 steps differ | remedies |")
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or PARTS:
        own = {"OUTSIZE_CHILD": "1", "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(
            [sys.executable, __file__, name], env={**os.environ, **own}, capture_output=True, text=True
        )
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        sizes = " | ".join(f"{row[key] / 2**20:.2f}" for key in ("plain", "budget", "plan", "measured"))
        print(f"| {name} | {sizes} | {row['off']:.1e} | {row['used']} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
