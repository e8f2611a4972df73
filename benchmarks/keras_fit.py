"""`outsize.fit` of five Keras models on a processor: the same weights, and life under a limit that kills the plain run.

    python benchmarks/keras_fit.py [weights | limit] [NAME ...]

The models are those of `keras_models.py`. Weights: 20 steps of a fitted `model.fit` inside a budget far below the plain bound
beside 20 plain ones, for a part of the batch: with the model's own optimizer, with SGD, which does not make rounding larger, and
with Adam in float64, where rounding is too small to be seen. Beside that stand 20 plain steps whose samples come in another
order: they differ by rounding alone.

Limit: the batch is repeated until its step is large beside TensorFlow itself. Plain and fitted training run alone first; the
limit of the control group lies in the middle of their highest anonymous memory, and both run again under it.
Needs root and a memory cgroup.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
import cgroup

REPEATS = {"cnn": 6, "lstm": 4, "transformer": 3, "autoencoder": 8, "two_inputs": 8}
"""Name -> how often its batch is repeated under a limit."""
SAMPLES = {"cnn": 8, "lstm": 64, "transformer": 8, "autoencoder": 8, "two_inputs": 128}
"""Name -> how many of its samples are trained on, where weights are compared."""
WEIGHTS = {"two_inputs": [1.0, 0.5]}
"""Name -> weights of its losses."""
PART = 0.3
"""Where weights are compared, the budget is this part of the way from the smallest that works to the plain bound."""
TIGHT = 0.3
"""Budget as a part of the plain bound, under a limit."""
FREE = 12 << 30
"""A limit that nothing here meets."""


def make(name: str, repeats: int = 1) -> tuple[Any, tuple[Any, Any]]:
    import keras_models
    import numpy as np

    model, x, y = keras_models.make(name)

    def longer(data: Any) -> Any:
        return [np.concatenate([each] * repeats) for each in data] if isinstance(data, list) else longer([data])[0]

    return model, (longer(x), longer(y))


def fit(model: Any, batch: tuple[Any, Any], part: float, above: int = 0) -> str:
    """Fit to a budget that lies this part of the way from `above` to the plain bound, and say what was decided."""
    import outsize

    plain = outsize.fit(model, batch=batch, budget="1TiB", dry_run=True).plan.plain
    budget = int(above + part * (plain - above))
    plan = outsize.fit(model, batch=batch, budget=budget).plan
    said = "; ".join(remedy.how for remedy in plan.remedies)
    return f"{plain / 2**20:.1f} | {plan.peak() / 2**20:.1f} of {budget / 2**20:.1f} | {said}"


def smallest(model: Any, batch: tuple[Any, Any]) -> int:
    """The smallest budget that works, in bytes."""
    import outsize

    try:
        outsize.fit(model, batch=batch, budget=1)
    except outsize.BudgetError as error:
        return error.smallest or 0
    raise AssertionError("a budget of one byte was kept")


def first(batch: tuple[Any, Any], samples: int) -> tuple[Any, Any]:
    import tensorflow as tf

    x, y = tf.nest.map_structure(lambda data: data[:samples], batch)
    return x, y


def train(model: Any, batch: tuple[Any, Any], steps: int) -> Any:
    x, y = batch
    rows = len(x[0] if isinstance(x, list) else x)
    model.fit(x, y, batch_size=rows, epochs=steps, shuffle=False, verbose=0)
    return model.get_weights()


def farthest(one: Any, other: Any) -> float:
    import numpy as np

    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def differences(name: str, float64: bool) -> list[Any]:
    """What the fit decided, and how far weights are from plain ones after 20 steps."""
    import keras
    import tensorflow as tf

    keras.config.set_floatx("float64" if float64 else "float32")
    batch = first(make(name)[1], SAMPLES[name])

    def compare(optimizer: str | None) -> tuple[str, float]:
        plain, fitted = make(name)[0], make(name)[0]
        for model in (plain, fitted) if optimizer else ():
            model.compile(optimizer, model.loss, loss_weights=WEIGHTS.get(name))
        said = fit(fitted, batch, PART, smallest(fitted, batch))
        return said, farthest(train(plain, batch, 20), train(fitted, batch, 20))

    if float64:
        return list(compare("adam"))
    said, own = compare(None)
    turned = tf.nest.map_structure(lambda data: data[::-1].copy(), batch)
    order = farthest(train(make(name)[0], batch, 20), train(make(name)[0], turned, 20))
    return [said, own, order, compare("sgd")[1]]


def child(name: str, way: str) -> None:
    """One way of training, in this process."""
    if way in ("weights", "float64"):
        print(json.dumps(differences(name, float64=way == "float64")))
        return
    model, batch = make(name, REPEATS[name])
    said = fit(model, batch, TIGHT) if way == "fitted" else ""
    train(model, batch, 1)
    print(json.dumps([said]))


def run(name: str, way: str, limit: int) -> cgroup.Outcome:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return cgroup.run([sys.executable, __file__, name, way], limit, env=env)


def said_by(outcome: cgroup.Outcome) -> list[Any]:
    if not outcome.fine:
        raise SystemExit(outcome.stderr[-2000:])
    return list(json.loads(outcome.stdout.strip().splitlines()[-1]))


def state(outcome: cgroup.Outcome) -> str:
    return "killed" if outcome.killed else "lives" if outcome.fine else f"status {outcome.status}"


def compare_weights(names: list[str]) -> None:
    print(
        "| model | plain bound, MiB | plan | remedies | own optimizer | plain, samples turned | SGD | Adam, float64 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        said, *far = said_by(run(name, "weights", FREE))
        far += said_by(run(name, "float64", FREE))[1:]
        print(f"| {name} | {said} | {' | '.join(f'{each:.1e}' for each in far)} |", flush=True)


def run_under_limits(names: list[str]) -> None:
    print(
        "| model | batch x | plain alone, MiB | fitted alone | limit | plain | fitted | plain bound; plan; remedies |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        plain, fitted = run(name, "plain", FREE), run(name, "fitted", FREE)
        said_by(plain)
        limit = (plain.anonymous + fitted.anonymous) // 2
        under = [run(name, way, limit) for way in ("plain", "fitted")]
        said = said_by(fitted)[0].replace(" | ", "; ")
        sizes = " | ".join(f"{size / 2**20:.0f}" for size in (plain.anonymous, fitted.anonymous, limit))
        print(f"| {name} | {REPEATS[name]} | {sizes} | {' | '.join(map(state, under))} | {said} |", flush=True)


def main() -> int:
    words = sys.argv[1:]
    if len(words) == 2 and words[1] in ("weights", "float64", "plain", "fitted"):
        child(*words)
        return 0
    tables = {"limit": run_under_limits, "weights": compare_weights}
    wanted = [words.pop(0)] if words and words[0] in tables else list(tables)
    for table in wanted:
        tables[table](words or list(REPEATS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
