"""Estimates of Keras training steps: ten models, and nine that were chosen after the rules were written, beside
TensorFlow's own account of a real run on the CPU.

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

import keras_blind_models
import keras_models

MANY = 8
"""Threads of the second run: more than processors, so that some stand still while others go on."""


def measure(name: str) -> dict[str, float]:
    """One model, in this process."""
    import tensorflow as tf

    import outsize

    tf.config.threading.set_inter_op_parallelism_threads(int(os.environ["OUTSIZE_THREADS"]))
    model, x, y = (keras_models if name in keras_models.NAMES else keras_blind_models).make(name)
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


def run(name: str, threads: int) -> dict[str, float]:
    """One model, in a process of its own."""
    own = {"OUTSIZE_THREADS": str(threads), "TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> int:
    if "OUTSIZE_THREADS" in os.environ:
        print(json.dumps(measure(sys.argv[1])))
        return 0
    print(f"| model | likely MiB | at most | measured, 8 steps | {MANY} threads | likely / highest | bound / highest |")
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or (*keras_models.NAMES, *keras_blind_models.NAMES):
        few, many = run(name, 0), run(name, MANY)
        high = max(few["high"], many["high"])
        ranges = (f"{row['low'] / 2**20:.1f} to {row['high'] / 2**20:.1f}" for row in (few, many))
        print(
            f"| {name} | {few['likely'] / 2**20:.1f} | {few['bound'] / 2**20:.1f} | {' | '.join(ranges)} | "
            f"{few['likely'] / high:.2f} | {few['bound'] / high:.2f}{'' if high <= few['bound'] else ', BELOW'} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
