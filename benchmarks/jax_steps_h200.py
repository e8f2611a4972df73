"""Ten kinds of JAX step on a card: what `outsize.estimate` says beside what the card counts.

    python benchmarks/jax_steps_h200.py [--out FILE.json] [NAME ...]      all ten, each in a process of its own, four at a time
    python benchmarks/jax_steps_h200.py --one NAME                        one, in this process

For each: the estimate for the card (XLA's own bytes), the bound from the jaxpr (what is said without a card), and
`peak_bytes_in_use` after two steps. That peak is never reset, and XLA takes the whole arena at the start unless told not to, so
each kind has a process of its own with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time


def one(name: str) -> dict:
    import jax
    import jax.numpy as jnp
    from jax_models import KINDS

    import outsize

    card, made = jax.devices()[0], KINDS[name]()
    begin = time.perf_counter()
    said = outsize.estimate(made.step, *made.arguments, device="cuda")
    bound = outsize.estimate(made.step, *made.arguments, device="tpu")  # a device that is not here: the jaxpr's bound
    planned, before = time.perf_counter() - begin, card.memory_stats()["peak_bytes_in_use"]
    found = made.step.lower(*made.arguments).compile().memory_analysis()
    args = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made.arguments)
    for _ in range(2):
        params, state, value = made.step(*args)
        jax.block_until_ready(value)
        args = (params, state, args[2])
        del params, state, value
    return {
        "step": name, "estimate": said.peak_allocated.bytes, "at_most": said.peak_allocated.bound,
        "jaxpr": bound.peak_requested.bound, "measured": card.memory_stats()["peak_bytes_in_use"], "autotuning": before,
        "temporaries": found.temp_size_in_bytes, "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes, "aliased": found.alias_size_in_bytes,
        "code": found.generated_code_size_in_bytes, "seconds": round(planned, 1),
        "device": card.device_kind, "jax": jax.__version__,
    }  # fmt: skip


def apart(name: str) -> dict:
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", name], env=env, capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        return {"step": name, "error": done.stderr[-600:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--out")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one)))
        return
    from jax_models import KINDS

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(apart, asked.names or KINDS))
    if asked.out:
        with open(asked.out, "w") as file:
            json.dump(rows, file, indent=1)
    print("| step | estimate | measured | off by | at most / measured | jaxpr's bound / measured | planned in |")
    print("|---|---|---|---|---|---|---|")
    good = [row for row in rows if "error" not in row]
    for row in rows:
        if "error" in row:
            print(f"| {row['step']} | failed: {row['error']!r} |")
            continue
        said, seen = row["estimate"], row["measured"]
        print(
            f"| {row['step']} | {said / 2**30:.3f} GiB | {seen / 2**30:.3f} GiB | {100 * (said / seen - 1):+.2f} % "
            f"| {row['at_most'] / seen:.4f} | {row['jaxpr'] / seen:.3f} | {row['seconds']} s |"
        )
    if good:
        off = [abs(row["estimate"] / row["measured"] - 1) for row in good]
        jaxpr = [row["jaxpr"] / row["measured"] for row in good]
        print(f"\n{len(good)} steps on {good[0]['device']}, jax {good[0]['jax']}")
        print(f"estimate: median off {100 * statistics.median(off):.2f} %, worst {100 * max(off):.2f} %")
        print(f"at most below measured: {[row['step'] for row in good if row['at_most'] < row['measured']]}")
        print(f"jaxpr's bound: median {statistics.median(jaxpr):.2f}x, from {min(jaxpr):.2f} to {max(jaxpr):.2f}")
    print("autotuning was the peak in:", [row["step"] for row in good if row["autotuning"] >= row["measured"]])


if __name__ == "__main__":
    main()
