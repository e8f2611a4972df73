"""Ten kinds of JAX step on a card: what `outsize.estimate` says beside what the card counts.

    python benchmarks/jax_steps_h200.py [--out FILE.json] [NAME ...]      all ten, four at a time

For each: the estimate for the card (XLA's own bytes), the bound from the jaxpr (what is said without a card), and
`peak_bytes_in_use` after two steps. That peak is never reset, and tuning of kernels while XLA compiles counts too. So each kind
is compiled in one process and measured in another, which finds the program in JAX's compilation cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def say(name: str) -> dict:
    """What is known before the step runs; its program goes into the compilation cache."""
    import jax
    from jax_models import KINDS

    import outsize

    made, begin = KINDS[name](), time.perf_counter()
    said = outsize.estimate(made.step, *made.arguments, device="cuda")
    seconds = round(time.perf_counter() - begin, 1)
    bound = outsize.estimate(made.step, *made.arguments, device="tpu")  # a device that is not here: the jaxpr's bound
    found = made.step.lower(*made.arguments).compile().memory_analysis()
    card = jax.devices()[0]
    return {
        "step": name, "estimate": said.peak_allocated.bytes, "at_most": said.peak_allocated.bound,
        "jaxpr": bound.peak_allocated.bound, "temporaries": found.temp_size_in_bytes,
        "arguments": found.argument_size_in_bytes, "outputs": found.output_size_in_bytes,
        "aliased": found.alias_size_in_bytes, "code": found.generated_code_size_in_bytes, "seconds": seconds,
        "peak_of_compiling": card.memory_stats()["peak_bytes_in_use"], "device": card.device_kind, "jax": jax.__version__,
    }  # fmt: skip


def measure(name: str) -> dict:
    """What the card counts in two steps."""
    import jax
    import jax.numpy as jnp
    from jax_models import KINDS

    card, made = jax.devices()[0], KINDS[name]()
    step = made.step.lower(*made.arguments).compile()
    compiled = card.memory_stats()["peak_bytes_in_use"]
    args = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), made.arguments)
    jax.block_until_ready(args)
    placed = card.memory_stats()["bytes_in_use"]
    for _ in range(2):
        params, state, value = step(*args)
        jax.block_until_ready(value)
        args = (params, state, args[2])
        del params, state, value
    return {"compiled": compiled, "placed": placed, "measured": card.memory_stats()["peak_bytes_in_use"]}


def apart(name: str) -> dict:
    """A kind in two processes: the second finds the program in the cache, so that nothing is tuned on the card it measures."""
    with tempfile.TemporaryDirectory() as cache:
        env = {
            **os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }  # fmt: skip
        row = {"step": name}
        for part in ("--say", "--measure"):
            command = [sys.executable, __file__, part, name]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
            except subprocess.TimeoutExpired:
                return {**row, "error": f"{part} took more than 240 s"}
            if done.returncode:
                return {**row, "error": done.stderr[-600:]}
            row |= json.loads(done.stdout.splitlines()[-1])
        return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--say")
    parser.add_argument("--measure")
    parser.add_argument("--out")
    asked = parser.parse_args()
    if asked.say or asked.measure:
        print(json.dumps(say(asked.say) if asked.say else measure(asked.measure)))
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
    print("compiling was the peak in:", [row["step"] for row in good if row["compiled"] >= row["measured"]])
    for row in good:
        names = ("arguments", "outputs", "aliased", "temporaries", "code", "placed", "compiled", "peak_of_compiling")
        print(row["step"], ", ".join(f"{name} {row[name] / 2**20:.1f}" for name in names), "MiB")


if __name__ == "__main__":
    main()
