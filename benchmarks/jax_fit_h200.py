"""`outsize.fit` of JAX on a card at 50 and 30 % of the plain step's peak, beside what one writes by hand.

    python benchmarks/jax_fit_h200.py [--out FILE.json] [KIND ...]

A reference process a kind runs the plain step: its peak, time and gradients. Then each pair of kind and budget has a process of
its own whose arena (XLA_PYTHON_CLIENT_MEM_FRACTION) is the budget and 3 % more, so that a step that passes it dies. Three ways of
running the same step are compiled there: ours, `jax.checkpoint` over everything (over the whole loss, and over every block
where the model has blocks), and accumulation by hand with the fewest slices that fit. All compile at the same time; then
they run one after the other, alone on the card. Who is not ready at 60 % of the time left (`--limit`) runs when it is. Products
are in float32 throughout. Gradients are read from the momentum after one step.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

KINDS = ("mlp_wide", "gpt", "vit")
SHARES = (0.5, 0.3)
ROUNDS = 6
ARENA = 1.03
"""The arena as a multiple of the budget."""


def contents(made):
    """Parameters and a batch with contents, the same in every process."""
    import jax
    import numpy as np

    random = np.random.default_rng(0)

    def fill(leaf, scale):
        if leaf.dtype.kind == "i":
            return random.integers(0, 1000, leaf.shape, dtype=np.int32)
        if len(leaf.shape) == 1:
            return np.ones(leaf.shape, np.float32)
        return random.standard_normal(leaf.shape, dtype=np.float32) * np.float32(scale)

    params = jax.tree.map(lambda leaf: fill(leaf, 0.02), made.params)
    batch = jax.tree.map(lambda leaf: fill(leaf, 1.0), made.batch)
    return jax.device_put((params, batch))


def timed(step, params, state, batch):
    """(momentum after the first step on the host, best seconds of the following ones)."""
    import jax

    params, state, value = step(params, state, batch)
    jax.block_until_ready(value)
    first = jax.device_get(jax.tree.leaves(state))
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        params, state, value = step(params, state, batch)
        jax.block_until_ready((params, value))
        seconds.append(time.perf_counter() - begin)
    return first, min(seconds)


def compiled(loss, optimizer, arguments):
    import jax
    from jax_steps import train

    made = jax.jit(train(loss, optimizer), donate_argnums=(0, 1), keep_unused=True).lower(*arguments).compile()
    found = made.memory_analysis()
    size = (
        found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    )
    return made, size


def by_hand(loss, slices):
    """Accumulation as one writes it: reshape, scan, add up. It is a loss with the gradient inside."""
    import jax
    import jax.numpy as jnp
    import optax

    def train_sliced(optimizer):
        def update(params, state, batch):
            parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)

            def body(carry, part):
                value, grads = jax.value_and_grad(loss)(params, part)
                return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            (value, grads), _ = jax.lax.scan(body, (jnp.zeros(()), zeros), parts)
            grads = jax.tree.map(lambda g: g / slices, grads)
            changes, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, changes), state, value / slices

        return update

    return train_sliced


def fewest_slices(made, budget):
    """(slices, program, bytes) of the fewest slices by hand that fit."""
    import jax

    rows, slices = jax.tree.leaves(made.batch)[0].shape[0], 2
    while slices <= rows:
        program = (
            jax.jit(by_hand(made.loss, slices)(made.optimizer), donate_argnums=(0, 1)).lower(*made.arguments).compile()
        )
        found = program.memory_analysis()
        size = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        size += found.temp_size_in_bytes
        if size <= budget:
            return slices, program, size
        slices *= 2
    return None


def checkpointed(name, made):
    """Losses with `jax.checkpoint` over everything."""
    import jax
    from jax_steps import block, gpt_loss

    losses = {"checkpoint of the loss": jax.checkpoint(made.loss)}
    if name == "gpt":
        losses["checkpoint of every block"] = lambda params, batch: gpt_loss(params, batch, jax.checkpoint(block))
    return losses


@contextlib.contextmanager
def turn(folder: pathlib.Path, name: str, waits_for: int, until: float) -> Iterator[None]:
    """Say that everything is compiled, wait for the others that compile, but not for ever; then have the card alone."""
    (folder / f"ready-{name}").touch()
    while len(list(folder.glob("ready-*"))) + len(list(folder.glob("dead-*"))) < waits_for and time.time() < until:
        time.sleep(0.1)
    with open(folder / "turn", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def reference(name: str, folder: pathlib.Path, waits_for: int, until: float) -> dict:
    import jax
    import numpy as np
    from jax_models import KINDS as MADE

    made = MADE[name]()
    step, size = compiled(made.loss, made.optimizer, made.arguments)
    params, batch = contents(made)
    with turn(folder / "plain", name, waits_for, until):
        first, seconds = timed(step, params, made.optimizer.init(params), batch)
    np.savez(folder / f"{name}.npz", *first)
    return {"peak": size, "seconds": seconds, "measured": jax.devices()[0].memory_stats()["peak_bytes_in_use"]}


def difference(first, folder: pathlib.Path, name: str) -> float:
    """Largest difference from the plain gradients, as a part of the largest gradient of the same array."""
    import numpy as np

    with np.load(folder / f"{name}.npz") as plain:
        pairs = [(a, plain[key]) for a, key in zip(first, plain.files, strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def inside(name: str, share: float, plain: int, folder: pathlib.Path, waits_for: int, until: float) -> dict:
    import jax
    from jax_models import KINDS as MADE

    import outsize

    made, budget = MADE[name](), int(plain * share)
    card = jax.devices()[0]
    params, batch = contents(made)
    begin = time.perf_counter()
    fitted = outsize.fit(params, made.loss, made.optimizer, batch, budget=budget)
    row = {
        "kind": name, "share": share, "budget": budget, "arena": card.memory_stats()["bytes_limit"],
        "choice": str(fitted.choice), "peak": fitted.plan.peak(), "planned_in": round(time.perf_counter() - begin, 1),
        "after_planning": card.memory_stats()["peak_bytes_in_use"], "others": {},
    }  # fmt: skip
    others = {}
    for way, loss in checkpointed(name, made).items():
        program, size = compiled(loss, made.optimizer, made.arguments)
        row["others"][way] = {"peak": size}
        if size <= budget:
            others[way] = program
    hand = fewest_slices(made, budget)
    if hand is not None:
        way = f"{hand[0]} slices by hand"
        row["others"][way], others[way] = {"peak": hand[2]}, hand[1]
    row["compiling"] = card.memory_stats()["peak_bytes_in_use"]
    with turn(folder / "fitted", f"{name}-{share}", waits_for, until):
        first, row["seconds"] = timed(fitted.step, params, fitted.init(params), batch)
        row["difference"] = difference(first, folder, name)
        row["measured"] = card.memory_stats()["peak_bytes_in_use"]
        for way, program in others.items():
            params = batch = None
            params, batch = contents(made)
            first, row["others"][way]["seconds"] = timed(program, params, made.optimizer.init(params), batch)
            row["others"][way]["difference"] = difference(first, folder, name)
        params = batch = None
        row["plain_dies"] = dies(made)
    return row


def dies(made) -> str:
    """What the plain step says in this arena."""
    params, batch = contents(made)
    try:
        import jax

        jax.block_until_ready(made.step(params, made.optimizer.init(params), batch))
    except Exception as error:
        return str(error).splitlines()[0][:120]
    return "it runs"


def start(arguments: list[str], folder: pathlib.Path, settings: dict[str, str]) -> subprocess.Popen:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DEFAULT_MATMUL_PRECISION": "highest", **settings}
    log = open(folder / f"log-{'-'.join(arguments[1:3])}", "w")  # noqa: SIM115
    return subprocess.Popen([sys.executable, __file__, *arguments], env=env, stdout=log, stderr=subprocess.STDOUT)


def ask(folder: pathlib.Path, tag: str, process: subprocess.Popen, until: float) -> dict:
    try:
        process.wait(timeout=max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    found = folder / f"row-{tag}.json"
    if found.exists():
        return json.loads(found.read_text())
    return {"error": (folder / f"log-{tag}").read_text()[-1500:]}


def total_bytes() -> int:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return int(done.stdout.split()[0]) * 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--out")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    parser.add_argument("--child", nargs="+", help="used by this script itself")
    asked = parser.parse_args()
    if asked.child:
        child(*asked.child)
        return
    begin, kinds = time.time(), asked.kinds or KINDS
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "plain").mkdir()
    (folder / "fitted").mkdir()
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    end, half = begin + asked.limit, begin + 0.3 * asked.limit
    common = [str(folder), str(len(kinds)), str(half - 0.1 * asked.limit)]
    started = {name: start(["--child", "plain", name, *common], folder, growing) for name in kinds}
    plain = {}
    for name, process in started.items():
        plain[name] = ask(folder, f"plain-{name}", process, half)
        print(f"plain {name}: {plain[name]}", flush=True)
    pairs = [(name, share) for name in kinds for share in SHARES if "peak" in plain[name]]
    processes, whole = {}, total_bytes()
    until = time.time() + 0.6 * (end - time.time())
    for name, share in pairs:
        arena = ARENA * share * plain[name]["peak"] / whole
        settings = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{arena:.5f}"}
        arguments = ["--child", name, str(share), str(plain[name]["peak"]), str(folder), str(len(pairs)), str(until)]
        processes[name, share] = start(arguments, folder, settings)
    rows = []
    for (name, share), process in processes.items():
        rows.append({"kind": name, "share": share, **ask(folder, f"{name}-{share}", process, end)})
        if asked.out:
            pathlib.Path(asked.out).write_text(json.dumps({"plain": plain, "rows": rows}, indent=1))
    show(plain, rows)
    print(f"\n{time.time() - begin:.0f} s in all")


def child(first: str, *rest: str) -> None:
    if first == "plain":
        name, folder, waits_for, until = rest
        place, tag = pathlib.Path(folder) / "plain", name
    else:
        share, plain, folder, waits_for, until = rest
        place, tag = pathlib.Path(folder) / "fitted", f"{first}-{share}"
    try:
        if first == "plain":
            row = reference(name, pathlib.Path(folder), int(waits_for), float(until))
        else:
            row = inside(first, float(share), int(plain), pathlib.Path(folder), int(waits_for), float(until))
    except BaseException:
        (place / f"dead-{tag}").touch()
        raise
    (pathlib.Path(folder) / f"row-{'plain-' if first == 'plain' else ''}{tag}.json").write_text(json.dumps(row))


def show(plain: dict, rows: list[dict]) -> None:
    print("\nnan: too large for the budget, so not run")
    print("\n| kind | budget | plan | peak of the plan | measured | gradients differ | time / plain | beside |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "error" in row:
            print(f"| {row['kind']} {row['share']} | failed: {row['error']} |")
            continue
        base = plain[row["kind"]]["seconds"]
        beside = "; ".join(
            f"{way}: {one['seconds'] / base if 'seconds' in one else float('nan'):.2f}x ({one['peak'] / 2**30:.2f} GiB)"
            for way, one in row["others"].items()
        )  # fmt: skip
        print(
            f"| {row['kind']} | {row['share']:.0%}: {row['budget'] / 2**30:.2f} GiB "
            f"| {row['choice']} | {row['peak'] / 2**30:.2f} GiB "
            f"| {row['measured'] / 2**30:.2f} GiB (planning {row['compiling'] / 2**30:.2f}) | {row['difference']:.1e} "
            f"| {row['seconds'] / base:.2f}x | {beside} |"
        )
        print(f"  planned in {row['planned_in']} s; the plain step here: {row['plain_dies']}")


if __name__ == "__main__":
    main()
