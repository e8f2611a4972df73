"""`outsize.shrink` on models that are trained first: bytes, held-out loss before, after, after healing; every method alone.

    python benchmarks/shrink.py gpt cnn vit --seeds 0,1 --rows rows.jsonl  # a Markdown table and a line of JSON for each row
    python benchmarks/shrink.py --table rows.jsonl                           # all rows as one table

Each set is found on the batches that `shrink` gets and judged on held-out batches that neither training nor search has seen.
Before healing methods are fitted to those batches too; with healing, to training batches, as `shrink` does. "peak" is the
most that the loss of one batch held without gradients, by the account of torch's allocator, weights included. The best method
alone is the one of the lowest held-out loss of those that are as small, healed as `shrink` would heal it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from shrink_models import MODELS, RATES, train

from outsize.compression.evaluation import FEW_BATCHES, evaluate, require_loss
from outsize.compression.healing import Healing, heal
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
    words = argparse.ArgumentParser()
    words.add_argument("models", nargs="*", default=["gpt", "cnn", "vit"])
    words.add_argument("--seeds", default="0")
    words.add_argument("--rows", type=pathlib.Path)
    words.add_argument("--table", type=pathlib.Path)
    asked = words.parse_args()
    if asked.table is not None:
        print_table([json.loads(line) for line in asked.table.read_text().splitlines()])
        return
    for seed in map(int, asked.seeds.split(",")):
        for name, make in MODELS.items():
            if make.__name__ in asked.models:
                run(name, make, seed, asked.rows)


def run(name: str, make: Any, seed: int, file: pathlib.Path | None) -> None:
    """Both sizes, before healing and after it."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    model, loss, training, data, held = make(seed)
    train(model, loss, training, RATES[name])
    subject = Subject(model=model, batches=interleave(data), loss=loss)
    held_out = replace(subject, batches=held)
    print(f"\n## {name}, seed {seed}: {count_bytes(model):,} bytes, held-out loss {evaluate(model, held_out).loss:.4f} "
          f"(trained in {time.perf_counter() - began:.0f} s), peak {peak_of(model, subject):,}, "
          f"file {file_bytes(model, model):,}\n", flush=True)  # fmt: skip
    optimizer = functools.partial(torch.optim.AdamW, lr=RATES[name] / 5, weight_decay=0)
    healing = Healing(steps=STEPS, batches=training, seen=training[:FEW_BATCHES], budget=None, optimizer=optimizer)
    for one in (None, healing):
        for row in report(subject, held_out, one):
            if file is not None:
                with file.open("a") as lines:
                    lines.write(json.dumps({"model": name, "seed": seed, **row}) + "\n")


def report(subject: Subject, held_out: Subject, healing: Healing | None) -> Any:
    """The rows of both sizes; with healing or without."""
    seen = None if healing is None else healing.seen
    judge, quick = make_judge(subject, seen), make_judge(take_few(subject), seen)
    plain, was = require_loss(subject), evaluate(subject.model, held_out)
    began = time.process_time()
    trials, failures = try_alone(quick, quick.find_candidates(choose(None))[0], plain)
    words = "before healing" if healing is None else f"after {healing.steps} steps of healing"
    spent = f"{time.process_time() - began:.1f} s of a processor"
    print(f"{len(trials)} candidates measured alone in {spent}. {' '.join(failures[:3])}\n")
    before = count_bytes(subject.model)
    for share in (0.5, 0.25):
        target, began = int(before * share), time.process_time()
        sets = measure_sets(judge, trials, target, plain)
        if healing is not None:
            sets = heal_sets(subject, sets, target, math.inf, healing, plain)
        taken = choose_set([one for one in sets if healing is None or one.model is not None], target, math.inf)
        assert taken is not None
        print(
            f"### to {share:.0%}, {words}: {target:,} bytes, found in {time.process_time() - began:.0f} s of a processor\n"
        )
        print("| set | what | RAM | share | file | peak | time | loss on data | held-out loss | change |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        judged = {}
        for one in sets:
            small = one.noun.bytes <= target
            model, on_data = one.model or build(subject, one.candidates), one.noun.best_loss
            if healing is not None and small and one.model is None:  # healed whole here, to be compared
                healed = heal(subject, one.candidates, healing)
                found = evaluate(healed, subject)
                if not found.is_worse(one.measured):
                    model, on_data = healed, found.loss
            loss = evaluate(model, held_out)
            if small:
                judged[one.noun.name] = loss
            print_row(subject, one, taken, model, on_data, loss.loss, was.loss, plain.seconds, small)
        yield compare(taken.noun, judged, words) | {"size": share, "target": target, "was": was.loss}


def print_row(
    subject: Subject,
    one: Any,
    taken: Any,
    model: Any,
    on_data: float,
    loss: float,
    was: float,
    seconds: float,
    small: bool,
) -> None:
    name = f"**{one.noun.name}** (taken)" if one.noun.name == taken.noun.name else one.noun.name
    cells = [name if small else f"{name} (not small enough)", ", ".join(one.noun.parts), f"{count_bytes(model):,}",
             f"{count_bytes(model) / count_bytes(subject.model):.1%}", f"{file_bytes(subject.model, model):,}",
             f"{peak_of(model, subject):,}", f"{one.noun.seconds / seconds:.2f}x", f"{on_data:.5f}", f"{loss:.5f}",
             f"{(loss - was) / was:+.3%}"]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def compare(taken: Any, judged: dict[str, Any], words: str) -> dict[str, Any]:
    """The set that was taken beside the best method alone that is as small, on the held-out data."""
    alone = [name for name in judged if not name.startswith("mixture")]
    best = min(alone, key=lambda name: judged[name].loss)
    row = {
        "when": words, "taken": taken.name, "parts": taken.parts, "bytes": taken.bytes, "loss": judged[taken.name].loss,
        "best": best, "best_loss": judged[best].loss, "error": judged[taken.name].doubt(judged[best]),
    }  # fmt: skip
    print(f"\nHeld-out, {words}: {taken.name} (taken) - {best} (best alone) = {row['loss'] - row['best_loss']:+.5f} "
          f"+- {row['error']:.5f}: {verdict(row)}. {pick_elsewhere(taken.name, alone, judged)}\n", flush=True)  # fmt: skip
    return row


def pick_elsewhere(taken: str, alone: list[str], judged: dict[str, Any]) -> str:
    """The best of several on some batches looks better there than it is. So it is picked on every second batch here and compared
    on the others, and the other way round."""
    picked = [min(alone, key=lambda name: sum(judged[name].parts[1 - odd :: 2])) for odd in (0, 1)]
    pairs = enumerate(judged[taken].parts)
    changes = [part - judged[picked[number % 2]].parts[number] for number, part in pairs]
    error = statistics.stdev(changes) * math.sqrt(len(changes))
    names = f"{picked[1]}, {picked[0]}"
    return f"Picked on half of the batches ({names}), compared on the others: {sum(changes):+.5f} +- {error:.5f}."


def verdict(row: dict[str, Any]) -> str:
    change = row["loss"] - row["best_loss"]
    if change <= 0:
        return "at least as good"
    return "equal within two standard errors" if change <= 2 * row["error"] else "worse"


def print_table(rows: list[dict[str, Any]]) -> None:
    titles = ("model", "seed", "size", "healing", "bytes", "loss before", "taken", "its loss", "best alone", "its loss",
              "difference", "standard error", "of the loss", "")  # fmt: skip
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for row in sorted(
        rows,
        key=lambda row: (list(MODELS).index(row["model"]), row["seed"], row["when"] != "before healing", -row["size"]),
    ):
        change = row["loss"] - row["best_loss"]
        cells = [row["model"], row["seed"], f"{row['size']:.0%}", "no" if row["when"] == "before healing" else "yes",
                 f"{row['bytes']:,}", f"{row['was']:.5f}", f"{row['taken']}: {', '.join(row['parts'])}", f"{row['loss']:.5f}",
                 row["best"], f"{row['best_loss']:.5f}", f"{change:+.5f}", f"{row['error']:.5f}",
                 f"{change / row['best_loss']:+.3%}", verdict(row)]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
