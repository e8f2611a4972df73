"""`outsize.shrink` on models that are trained first: bytes, held-out loss before, after, after healing; every method alone.

    python benchmarks/shrink.py gpt cnn vit --seeds 0,1 --rows rows.jsonl  # a line of JSON for each trained model, size, healing
    python benchmarks/shrink.py --table rows.jsonl                           # all lines as Markdown tables

Sets are found on the batches that `shrink` gets and judged on held-out batches that neither training nor search has seen. Before
healing methods are fitted to those batches too; with healing, to training batches, as `shrink` does. Every set that is small
enough is also healed whole, so that it can be compared healed and unhealed. "peak" is the most that the loss of one batch
held without gradients, by the account of torch's allocator, weights included.

The digits are few: they are cut in three, and a seed is three models, so that every digit is held out once. All three are a row.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import tempfile
import time
from dataclasses import replace
from typing import Any

import shrink_table
import torch
from shrink_models import FOLDS, MODELS, RATES, train

from outsize.compression import healing as healing_module
from outsize.compression import sets as sets_module
from outsize.compression.evaluation import FEW_BATCHES, Measured, evaluate, require_loss
from outsize.compression.healing import Healing
from outsize.compression.judge import build, interleave, make_judge, take_few
from outsize.compression.method import Subject
from outsize.compression.methods import choose
from outsize.compression.search import try_alone
from outsize.compression.sets import choose_set, heal_sets, measure_sets
from outsize.compression.structure import describe_difference
from outsize.compression.weights import count_bytes
from outsize.model.fitting.run.meter import Meter

STEPS = 60
"""Of healing."""
SIZES = (0.5, 0.25)


def file_bytes(before: Any, after: Any) -> int:
    from outsize.compression.files import save

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "small.safetensors")
        save(after, path, describe_difference(before, after), None)
        return os.path.getsize(path)


def peak_of(model: Any, subject: Subject) -> int:
    meter = Meter("cpu")
    meter.begin(lambda: [*model.parameters(), *model.buffers()])
    with torch.no_grad():
        subject.loss(model, subject.batches[0])
    return meter.end() or 0


def main() -> None:
    torch.set_num_threads(1)
    healing_module.fit = PlainSteps
    words = argparse.ArgumentParser()
    words.add_argument("models", nargs="*", default=["gpt", "cnn", "vit"])
    words.add_argument("--seeds", default="0")
    words.add_argument("--rows", type=pathlib.Path)
    words.add_argument("--trained", type=pathlib.Path, help="a folder that keeps the trained models")
    words.add_argument("--table", type=pathlib.Path)
    asked = words.parse_args()
    if asked.table is not None:
        shrink_table.show([json.loads(line) for line in asked.table.read_text().splitlines()])
        return
    for name, make in MODELS.items():
        if make.__name__ in asked.models:
            for seed in map(int, asked.seeds.split(",")):
                for fold in range(FOLDS.get(name, 1)):
                    run(name, seed, fold, asked.rows, asked.trained)


class PlainSteps:
    """The steps that `fit` takes where memory is not short, without its search for a plan, which takes longer than they do."""

    def __init__(self, model: Any, loss: Any, optimizer: Any, batch: Any, **options: Any) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model, batch).backward()
        self.optimizer.step()

    def undo(self) -> None:
        pass


def heal_once() -> Any:
    """`heal`, which gives the model again that it gave for the same candidates and steps."""
    known: dict[Any, Any] = {}

    def heal(subject: Subject, chosen: Any, healing: Healing) -> Any:
        key = frozenset(chosen), healing.steps
        if key not in known:
            known[key] = healing_module.heal(subject, chosen, healing)
        return known[key]

    return heal


def run(name: str, seed: int, fold: int, rows: pathlib.Path | None, trained: pathlib.Path | None) -> None:
    """Both sizes, before healing and after it."""
    began = time.process_time()
    torch.manual_seed(1000 * fold + seed)
    made = MODELS[name]
    model, loss, training, data, held = made(seed, fold) if name in FOLDS else made(seed)
    kept = None if trained is None else trained / f"{made.__name__}-{seed}-{fold}.pt"
    if kept is not None and kept.exists():
        model.load_state_dict(torch.load(kept))
        model.eval()
    else:
        train(model, loss, training, RATES[name])
        if kept is not None:
            kept.parent.mkdir(exist_ok=True)
            torch.save(model.state_dict(), kept)
    subject = Subject(model=model, batches=interleave(data), loss=loss)
    held_out = replace(subject, batches=held)
    optimizer = functools.partial(torch.optim.AdamW, lr=RATES[name] / 5, weight_decay=0)
    healing = Healing(steps=STEPS, batches=training, seen=training[:FEW_BATCHES], budget=None, optimizer=optimizer)
    whole = {
        "model": name, "seed": seed, "fold": fold, "bytes": count_bytes(model), "file": file_bytes(model, model),
        "peak": peak_of(model, subject), "held": as_list(evaluate(model, held_out)),
    }  # fmt: skip
    print(f"{name}, seed {seed}, part {fold}: loss {sum(whole['held']):.5f}", flush=True)
    tried: dict[str, list[Any]] = {}
    known: dict[frozenset[Any], dict[str, Any]] = {}
    sets_module.heal = heal_once()
    for one in (None, healing):
        for row in measure(subject, held_out, one, tried, known):
            print(f"  {row['size']:.0%}, healing {row['healing']}: {row['taken']}, {time.process_time() - began:.0f} s",
                  flush=True)  # fmt: skip
            if rows is not None:
                with rows.open("a") as lines:
                    lines.write(json.dumps({"whole": whole, **row}) + "\n")


def measure(
    subject: Subject,
    held_out: Subject,
    healing: Healing | None,
    tried: dict[str, list[Any]],
    known: dict[frozenset[Any], dict[str, Any]],
) -> Any:
    """What `shrink` takes at both sizes, with healing or without, and all sets beside it. Trials of methods that are not fitted
    and what is known of sets are kept in `tried` and `known`."""
    seen = None if healing is None else healing.seen
    judge, quick = make_judge(subject, seen), make_judge(take_few(subject), seen)
    plain = require_loss(subject)
    for method in choose(None):
        if method.fitted or method.name not in tried:
            tried[method.name] = try_alone(quick, quick.find_candidates([method])[0], plain)[0]
    trials = [trial for method in choose(None) for trial in tried[method.name]]
    for share in SIZES:
        target = int(count_bytes(subject.model) * share)
        sets = measure_sets(judge, trials, target, plain)
        if healing is not None:
            sets = heal_sets(subject, sets, target, math.inf, healing, plain)
        taken = choose_set(sets, target, math.inf)
        assert taken is not None
        found = [describe(one, subject, held_out, healing, known) for one in sets if one.noun.bytes <= target]
        yield {
            "size": share, "target": target, "healing": healing is not None, "plain": as_list(plain),
            "taken": taken.noun.name, "healed": taken.noun.healed is not None, "sets": found,
        }  # fmt: skip


def describe(
    one: Any, subject: Subject, held_out: Subject, healing: Healing | None, known: dict[frozenset[Any], dict[str, Any]]
) -> dict[str, Any]:
    """A set in bytes, and its losses on the user's data and on held-out data: unhealed, and healed whole."""
    key = frozenset(one.candidates)
    if key not in known:
        plain = build(subject, one.candidates)
        known[key] = {
            "parts": one.noun.parts, "methods": len({part.method for part in one.candidates}), "bytes": count_bytes(plain),
            "file": file_bytes(subject.model, plain), "peak": peak_of(plain, subject),
            "data": as_list(evaluate(plain, subject) if one.noun.healed is not None else one.measured),
            "held": as_list(evaluate(plain, held_out)),
        }  # fmt: skip
    row = {"name": one.noun.name, **known[key]}
    if healing is None:
        return row
    healed = sets_module.heal(subject, one.candidates, healing)
    return row | {"data_healed": as_list(evaluate(healed, subject)), "held_healed": as_list(evaluate(healed, held_out))}


def as_list(measured: Measured) -> list[float]:
    """What each batch gives to the mean."""
    return [float(f"{part:.9g}") for part in measured.parts]


if __name__ == "__main__":
    main()
