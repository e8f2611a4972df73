"""`outsize.shrink` on three models that are trained first: bytes, held-out loss before, after, after healing; every method alone.

    python benchmarks/shrink.py [gpt cnn vit] [--seed 1]     # a Markdown table for each

Each set is found on search batches and judged on held-out batches that neither training nor search has seen. Before healing
methods are fitted to search batches too; with healing, to training batches, as `shrink` does. "peak" is the most that the loss
of one batch held without gradients, by the account of torch's allocator, weights included.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from shrink_models import MODELS, RATES, train

from outsize.compression.evaluation import evaluate, require_loss
from outsize.compression.healing import Healing, heal
from outsize.compression.judge import build, interleave, make_judge
from outsize.compression.method import Subject
from outsize.compression.methods import choose
from outsize.compression.search import try_alone
from outsize.compression.sets import choose_set, heal_sets, measure_sets
from outsize.compression.structure import describe_difference
from outsize.compression.weights import count_bytes
from outsize.model.fitting.run.meter import Meter

STEPS, SEEN = 60, 24
"""Steps of healing, and training batches that methods are fitted to."""


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
    wanted = [word for word in sys.argv[1:] if word in ("gpt", "cnn", "vit")]
    seed = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
    for name, make in MODELS.items():
        if wanted and make.__name__ not in wanted:
            continue
        began = time.perf_counter()
        torch.manual_seed(seed)
        model, loss, training, search, held = make()
        train(model, loss, training, RATES[name])
        subject = Subject(model=model, batches=interleave(search), loss=loss)
        held_out = replace(subject, batches=held)
        print(f"\n## {name}, seed {seed}: {count_bytes(model):,} bytes, held-out loss {evaluate(model, held_out).loss:.4f} "
              f"(trained in {time.perf_counter() - began:.0f} s), peak {peak_of(model, subject):,}, "
              f"file {file_bytes(model, model):,}\n")  # fmt: skip
        make = functools.partial(torch.optim.AdamW, lr=RATES[name] / 5, weight_decay=0)
        healing = Healing(steps=STEPS, batches=training, seen=training[:SEEN], budget=None, optimizer=make)
        for one in (None, healing):
            report(subject, held_out, one)


def report(subject: Subject, held_out: Subject, healing: Healing | None) -> None:
    """Both sizes; with healing or without."""
    judge = make_judge(subject, None if healing is None else healing.seen)
    plain, seen = require_loss(subject), evaluate(subject.model, held_out)
    began = time.perf_counter()
    trials, failures = try_alone(judge, judge.find_candidates(choose(None))[0], plain)
    words = "before healing" if healing is None else f"after {healing.steps} steps of healing"
    print(f"{len(trials)} candidates measured alone in {time.perf_counter() - began:.1f} s. {' '.join(failures[:3])}\n")
    before = count_bytes(subject.model)
    for share in (0.5, 0.25):
        target = int(before * share)
        sets = measure_sets(judge, trials, target, plain)
        if healing is not None:
            sets = heal_sets(subject, sets, target, healing, plain)
        ready = [one for one in sets if healing is None or one.model is not None]
        taken = choose_set(ready, target, math.inf)
        print(f"### to {share:.0%}, {words}: {target:,} bytes\n")
        print("| set | what | RAM | share | file | peak | time | search loss | held-out loss | change |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        judged = {}
        for one in sets:
            small = one.noun.bytes <= target
            model = one.model or build(subject, one.candidates)
            if healing is not None and small and one.model is None:  # healed whole here, to be compared
                model = heal(subject, one.candidates, healing)
            judged[one.noun.name] = found = evaluate(model, held_out)
            print_row(subject, one, taken, model, found.loss, seen.loss, plain.seconds, small)
        compare(taken.noun.name, [one.noun.name for one in sets if one.noun.bytes <= target], judged, words)


def print_row(
    subject: Subject, one: Any, taken: Any, model: Any, loss: float, was: float, seconds: float, small: bool
) -> None:
    name = f"**{one.noun.name}** (taken)" if one.noun.name == taken.noun.name else one.noun.name
    cells = [name if small else f"{name} (not small enough)", ", ".join(one.noun.parts), f"{one.noun.bytes:,}",
             f"{one.noun.bytes / count_bytes(subject.model):.1%}", f"{file_bytes(subject.model, model):,}",
             f"{peak_of(model, subject):,}", f"{one.noun.seconds / seconds:.2f}x", f"{one.noun.best_loss:.4f}", f"{loss:.4f}",
             f"{(loss - was) / was:+.2%}"]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def compare(taken: str, small: list[str], losses: dict[str, Any], words: str) -> None:
    """The set that was taken beside the best method alone that is as small, on the held-out data."""
    best = min((name for name in small if not name.startswith("mixture")), key=lambda name: losses[name].loss)
    change = losses[taken].loss - losses[best].loss
    doubt = losses[taken].doubt(losses[best])
    verdict = (
        "at least as good" if change <= 0 else "equal within two standard errors" if change <= 2 * doubt else "worse"
    )
    print(f"\nHeld-out, {words}: {taken} (taken) - {best} (best alone) = {change:+.5f} +- {doubt:.5f}: {verdict}.\n")


if __name__ == "__main__":
    main()
