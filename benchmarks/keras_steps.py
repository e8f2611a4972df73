"""Estimates of ten Keras training steps beside TensorFlow's own account of a real run on the CPU.

    python benchmarks/keras_steps.py [NAME ...]

Measured: `tf.config.experimental.get_memory_info("CPU:0")["peak"]`, the highest of eight steps after two that warm up, each
model in a process of its own with `TF_CPU_ALLOCATOR_USE_BFC=true`. That allocator counts every tensor and every kernel's scratch,
with what it rounds up: chunks are cut only where half would be left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras_models


def measure(name: str) -> dict[str, float]:
    """One model, in this process."""
    import tensorflow as tf

    import outsize

    model, x, y = keras_models.make(name)
    found = outsize.estimate(model, x, y, device="cpu")
    model.optimizer.build(model.trainable_variables)
    batch = tf.nest.map_structure(tf.constant, (x, y))
    step = tf.function(model.train_step, autograph=False)
    step(batch), step(batch)
    peaks = []
    for _ in range(8):
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(batch)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    amount = found.peak_requested
    return {"likely": amount.bytes, "bound": amount.bound, "low": min(peaks), "high": max(peaks)}


def main() -> int:
    names = sys.argv[1:] or keras_models.NAMES
    if os.environ.get("OUTSIZE_ONE"):
        print(json.dumps(measure(names[0])))
        return 0
    print("| model | likely MiB | at most | measured, 8 steps | likely / highest | bound holds |")
    print("|---|---|---|---|---|---|")
    for name in names:
        env = {**os.environ, "OUTSIZE_ONE": "1", "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1]} |")
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        mib = {key: value / 2**20 for key, value in row.items()}
        holds = "yes" if row["high"] <= row["bound"] else f"no, {row['high'] / row['bound'] - 1:.0%} above"
        print(
            f"| {name} | {mib['likely']:.1f} | {mib['bound']:.1f} | {mib['low']:.1f} to {mib['high']:.1f} | "
            f"{row['likely'] / row['high']:.2f} | {holds} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
