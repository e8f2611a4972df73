"""`outsize.fit` of JAX on a card at 50 and 30 % of the plain step's peak, beside what one writes by hand.

    python benchmarks/jax_fit_h200.py [--limit SECONDS] [--out FILE.json] [KIND ...]

Every way of running a step has a process of its own, and all compile at the same time with one folder for what JAX and XLA
keep of compilations:

- plain: the step as it is. Its peak sets the budgets, its first gradients are what the others are compared with.
- ours: `outsize.fit`, once for each budget, in an arena (XLA_PYTHON_CLIENT_MEM_FRACTION) of the budget and 3 % more. Its first
  steps, in which it times a few plans, run before the steps that count. The plain step is run there last, and has to die.
- `jax.checkpoint` over everything: over the whole loss, and over every block where the model has blocks.
- accumulation by hand, with the fewest slices that fit each budget.

The last two run where memory is free: a budget takes those whose bytes fit it. Each way runs one step when it is compiled. When
all have, or `--limit` leaves a quarter of its time, they are timed one after the other, alone on the card. Products are in
float32 throughout and by cuBLAS in every way (tuning XLA's own kernels takes minutes). Gradients are read from the momentum
after one step, and also compared with gradients in float64: a float32 step of 65,536 rows is itself far from those, since
a hidden value near 0 falls on the other side of a ReLU, and another size of batch has other kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
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

KINDS = ("gpt", "vit", "mlp_wide")
SHARES = (0.5, 0.3)
ROUNDS = 10
PARTS = 16
"""Slices of the gradients in float64."""
ARENA = 1.03
"""The arena as a multiple of the budget."""
FLAGS = "--xla_gpu_enable_triton_gemm=false"
SLICES = (2, 4, 8)
"""Slices by hand that are compiled at once; more follow where none of these fits."""


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


def size_of(program) -> int:
    found = program.memory_analysis()
    size = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return size + found.temp_size_in_bytes


def lower(update, made):
    import jax

    return jax.jit(update, donate_argnums=(0, 1), keep_unused=True).lower(*made.arguments)


def compiled(loss, made):
    from jax_steps import train

    return lower(train(loss, made.optimizer), made).compile()


def by_hand(loss, optimizer, slices):
    """Accumulation as one writes it: reshape, scan, add up, then one update."""
    import jax
    import jax.numpy as jnp
    import optax

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


def sliced_by_hand(made, budgets):
    """Way -> program: for each budget the fewest slices that fit."""
    import jax

    rows = jax.tree.leaves(made.batch)[0].shape[0]

    def compile_all(counts):
        lowered = [lower(by_hand(made.loss, made.optimizer, count), made) for count in counts]
        with concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
            return dict(zip(counts, pool.map(lambda one: one.compile(), lowered), strict=True))

    programs = compile_all(SLICES)
    while min(map(size_of, programs.values())) > min(budgets) and max(programs) < rows:
        programs |= compile_all([2 * max(programs)])
    fewest = {min((n for n, one in programs.items() if size_of(one) <= budget), default=None) for budget in budgets}
    return {f"{count} slices by hand": programs[count] for count in fewest if count is not None}


def checkpointed(name, made):
    """Way -> loss with `jax.checkpoint` over everything."""
    import jax
    from jax_steps import block, gpt_loss

    losses = {"checkpoint of the loss": jax.checkpoint(made.loss)}
    if name == "gpt":
        losses["checkpoint of every block"] = lambda params, batch: gpt_loss(params, batch, jax.checkpoint(block))
    return losses


class Race:
    """The folder in which the processes of one kind of step meet."""

    def __init__(self, folder: str, waits_for: str, until: str) -> None:
        self.folder, self.waits_for, self.until = pathlib.Path(folder), int(waits_for), float(until)

    def peak(self, name: str) -> int:
        """Bytes of the plain step, when its process knows them."""
        place = self.folder / f"peak-{name}"
        while not place.exists() or not place.read_text():
            if (self.folder / f"dead-{name}-plain").exists():
                raise SystemExit("the plain step did not compile")
            time.sleep(0.1)
        return int(place.read_text())

    def budgets(self, name: str) -> list[int]:
        return [int(share * self.peak(name)) for share in SHARES]

    @contextlib.contextmanager
    def turn(self, tag: str) -> Iterator[None]:
        """Say that everything is compiled, wait for the others, but not for ever; then have the card alone."""
        (self.folder / f"ready-{tag}").touch()
        while self._busy() and time.time() < self.until:
            time.sleep(0.1)
        with open(self.folder / "turn", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _busy(self) -> bool:
        return sum(len(list(self.folder.glob(f"{state}-*"))) for state in ("ready", "dead")) < self.waits_for

    def save(self, name: str, gradients) -> None:
        import numpy as np

        np.savez(self.folder / "saving" / f"{name}.npz", *gradients)
        (self.folder / "saving" / f"{name}.npz").rename(self.folder / f"{name}.npz")

    def difference(self, name: str, first) -> float:
        """Largest difference from gradients that were saved, as a part of the largest gradient of the same array."""
        import numpy as np

        while not (self.folder / f"{name}.npz").exists():
            time.sleep(0.1)
        with np.load(self.folder / f"{name}.npz") as saved:
            pairs = [(a, saved[key]) for a, key in zip(first, saved.files, strict=True)]
        return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)

    def differences(self, name: str, first) -> dict[str, float]:
        return {
            "difference": self.difference(name, first),
            "from float64": self.difference(f"{name}-float64", first),
        }


def first_step(step, params, state, batch):
    """(momentum on the host, arguments of the next step)."""
    import jax

    params, state, value = step(params, state, batch)
    jax.block_until_ready(value)
    return jax.device_get(jax.tree.leaves(state)), (params, state, batch)


def timed(step, arguments) -> float:
    """Best seconds of some steps."""
    import jax

    (params, state, batch), seconds = arguments, []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        params, state, value = step(params, state, batch)
        jax.block_until_ready((params, value))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def in_float64(made, params, batch):
    """Gradients of the whole batch in float64, added up slice by slice on the host."""
    import jax
    import numpy as np

    params, batch = jax.device_get((params, batch))
    rows = jax.tree.leaves(batch)[0].shape[0]
    added = None
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf, (params, batch))
        gradients = jax.jit(jax.grad(made.loss))
        for part in range(PARTS):
            place = slice(part * rows // PARTS, (part + 1) * rows // PARTS)
            found = jax.device_get(gradients(wide[0], jax.tree.map(lambda leaf: leaf[place], wide[1])))  # noqa: B023
            added = found if added is None else jax.tree.map(np.add, added, found)
    return [leaf / PARTS for leaf in jax.tree.leaves(added)]


def plain(name: str, race: Race, made) -> dict:
    begin = time.perf_counter()
    step = compiled(made.loss, made)
    (race.folder / f"peak-{name}").write_text(str(size_of(step)))
    seconds = round(time.perf_counter() - begin, 1)
    params, batch = contents(made)
    first, arguments = first_step(step, params, made.optimizer.init(params), batch)
    race.save(name, first)
    race.save(f"{name}-float64", in_float64(made, *contents(made)))
    with race.turn(f"{name}-plain"):
        row = {"peak": size_of(step), "seconds": timed(step, arguments), "compiled_in": seconds}
    return row | race.differences(name, first)


def others(name: str, way: str, race: Race, made) -> dict:
    """Ways written by hand, those that fit a budget timed."""
    begin = time.perf_counter()
    if way == "slices by hand":
        programs = sliced_by_hand(made, race.budgets(name))
    else:
        programs = {way: compiled(checkpointed(name, made)[way], made)}
    rows = {one: {"peak": size_of(program)} for one, program in programs.items()}
    seconds = round(time.perf_counter() - begin, 1)
    runs = {one: program for one, program in programs.items() if size_of(program) <= max(race.budgets(name))}
    begun = {}
    for one, program in runs.items():
        params, batch = contents(made)
        first, begun[one] = first_step(program, params, made.optimizer.init(params), batch)
        rows[one] |= race.differences(name, first)
    with race.turn(f"{name}-{way}"):
        for one, program in runs.items():
            rows[one]["seconds"] = timed(program, begun.pop(one))
    return {"ways": rows, "compiled_in": seconds}


def ours(name: str, share: float, race: Race, made) -> dict:
    budget = int(share * race.peak(name))
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{ARENA * budget / total_bytes():.6f}"  # before JAX takes the card
    os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE")
    import jax

    import outsize

    card = jax.devices()[0]
    params, batch = contents(made)
    begin = time.perf_counter()
    fitted = outsize.fit(params, made.loss, made.optimizer, batch, budget=budget)
    row = {
        "budget": budget, "arena": card.memory_stats()["bytes_limit"], "predicted": str(fitted.choice),
        "peaks": peaks_of(fitted), "compiled_in": round(time.perf_counter() - begin, 1),
        "compiling": card.memory_stats()["peak_bytes_in_use"],
    }  # fmt: skip
    first, arguments = first_step(fitted.step, params, fitted.init(params), batch)
    params = None
    row |= race.differences(name, first)
    with race.turn(f"{name}-{share}"):
        while not fitted.settled:
            params, state, batch = arguments
            params, state, _ = fitted.step(params, state, batch)
            arguments = params, state, batch
        row["seconds"] = timed(fitted.step, arguments)
    row |= {
        "choice": str(fitted.choice), "peak": fitted.plan.peak(), "notes": fitted.plan.notes,
        "measured": card.memory_stats()["peak_bytes_in_use"],
    }  # fmt: skip
    params = state = batch = arguments = None
    params, batch = contents(made)
    again, arguments = first_step(fitted.step, params, fitted.init(params), batch)  # by the plan that stayed
    row |= {key: max(row[key], far) for key, far in race.differences(name, again).items()}
    params = batch = arguments = None
    return row | {"plain_dies": dies(made)}


def peaks_of(fitted) -> dict[str, int]:
    """Choice -> bytes of every plan that is timed."""
    plans = [plan for trial in fitted._trials.values() for plan in trial.plans] or [fitted._now]
    return {str(plan.choice): plan.candidate.peak for plan in plans}


def dies(made) -> str:
    """What the plain step says in this arena."""
    import jax

    try:
        params, batch = contents(made)
        jax.block_until_ready(compiled(made.loss, made)(params, made.optimizer.init(params), batch))
    except Exception as error:
        return str(error).splitlines()[0][:120]
    return "it runs"


def total_bytes() -> int:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return int(done.stdout.split()[0]) * 2**20


def start(name: str, way: str, race: list[str], folder: pathlib.Path) -> subprocess.Popen:
    env = {
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    log = open(folder / f"log-{name}-{way}", "w")  # noqa: SIM115
    return subprocess.Popen([sys.executable, __file__, "--child", name, way, *race], env=env, stdout=log, stderr=log)


def child(name: str, way: str, *where: str) -> None:
    from jax_models import KINDS as MADE

    race, made = Race(*where), MADE[name]()
    try:
        if way == "plain":
            row = plain(name, race, made)
        elif way in map(str, SHARES):
            row = ours(name, float(way), race, made)
        else:
            row = others(name, way, race, made)
    except BaseException:
        (race.folder / f"dead-{name}-{way}").touch()
        raise
    (race.folder / f"row-{name}-{way}.json").write_text(json.dumps(row))


def ask(folder: pathlib.Path, tag: str, process: subprocess.Popen, until: float) -> dict:
    try:
        process.wait(timeout=max(0.1, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    found = folder / f"row-{tag}.json"
    if found.exists():
        return json.loads(found.read_text())
    ready = "ready, not run" if (folder / f"ready-{tag}").exists() else "not compiled"
    return {"error": f"{ready} in time: {(folder / f'log-{tag}').read_text()[-900:]}"}


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
    (folder / "saving").mkdir()
    ways = {
        (name, way)
        for name in kinds
        for way in ("plain", *map(str, SHARES), "checkpoint of the loss", "slices by hand")
    }  # fmt: skip
    ways |= {("gpt", "checkpoint of every block")} & {(name, "checkpoint of every block") for name in kinds}
    race = [str(folder), str(len(ways)), str(begin + 0.75 * asked.limit)]
    started = {(name, way): start(name, way, race, folder) for name, way in sorted(ways)}
    rows = {}
    for (name, way), process in started.items():
        rows[f"{name}-{way}"] = ask(folder, f"{name}-{way}", process, begin + asked.limit - 5)
        if asked.out:
            pathlib.Path(asked.out).write_text(json.dumps(rows, indent=1))
    show(kinds, rows)
    print(f"\n{time.time() - begin:.0f} s in all")


def show(kinds, rows: dict[str, dict]) -> None:
    print(
        "| kind | budget | plan | peak of the plan | measured | gradients differ (float64; plain's) | time / plain | beside |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in kinds:
        base = rows[f"{name}-plain"].get("seconds", float("nan"))
        beside = {}
        for tag, row in rows.items():
            if tag.startswith(f"{name}-"):
                beside |= row.get("ways", {})
        for share in SHARES:
            row = rows[f"{name}-{share}"]
            if "error" in row:
                print(f"| {name} | {share:.0%} | failed: {row['error']} |")
                continue
            hand = "; ".join(
                f"{way}: {one['seconds'] / base:.2f}x ({one['peak'] / 2**30:.2f} GiB)"
                if one["peak"] <= row["budget"]
                else f"{way}: too large ({one['peak'] / 2**30:.2f} GiB)"
                for way, one in beside.items()
            )
            print(
                f"| {name} | {share:.0%}: {row['budget'] / 2**30:.2f} GiB | {row['choice']} | {row['peak'] / 2**30:.2f} GiB "
                f"| {row['measured'] / 2**30:.2f} GiB (largest that was timed {max(row['peaks'].values()) / 2**30:.2f}, planning "
                f"{row['compiling'] / 2**30:.2f}) | {row['difference']:.1e} ({row['from float64']:.1e}; "
                f"{rows[f'{name}-plain']['from float64']:.1e}) "
                f"| {row['seconds'] / base:.2f}x | {hand} |"
            )
            print(f"  planned in {row['compiled_in']} s; the plain step here: {row['plain_dies']}")
    print()
    for tag, row in rows.items():
        print(f"{tag}: {row.get('error') or {key: row[key] for key in row if key not in ('choice', 'plain_dies')}}")


if __name__ == "__main__":
    main()
