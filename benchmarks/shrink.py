"""`outsize.shrink` on three models that are trained first: bytes, held-out loss before, after, after healing; every method alone.

    python benchmarks/shrink.py [gpt cnn vit]     # a Markdown table for each

Each set is found on search batches and judged on held-out batches that neither training nor search has seen. "peak" is the most
that the loss of one batch held without gradients, by the account of torch's allocator, weights included.
"""

from __future__ import annotations

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
from outsize.compression.method import Subject
from outsize.compression.methods import choose
from outsize.compression.search import build, try_alone
from outsize.compression.sets import measure_sets
from outsize.compression.structure import describe_difference
from outsize.compression.weights import count_bytes
from outsize.model.fitting.run.meter import Meter

STEPS = 100


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
    wanted = sys.argv[1:]
    for name, make in MODELS.items():
        if wanted and make.__name__ not in wanted:
            continue
        began = time.perf_counter()
        torch.manual_seed(0)
        model, loss, training, search, held = make()
        train(model, loss, training, RATES[name])
        subject = Subject(model=model, batches=search, loss=loss)
        judge = replace(subject, batches=held)
        before = count_bytes(model)
        print(f"\n## {name}: {before:,} bytes, held-out loss {evaluate(model, judge).loss:.4f} "
              f"(trained in {time.perf_counter() - began:.0f} s), peak {peak_of(model, subject):,}, "
              f"file {file_bytes(model, model):,}\n")  # fmt: skip
        candidates = [one for method in choose(None) for one in method.candidates(subject)]
        plain = require_loss(subject)
        began = time.perf_counter()
        trials, failures = try_alone(subject, candidates, plain)
        print(
            f"{len(trials)} candidates measured alone in {time.perf_counter() - began:.1f} s. {' '.join(failures[:3])}\n"
        )
        for share in (0.5, 0.25):
            report(subject, judge, trials, plain, share, training, RATES[name])


def report(subject: Any, judge: Any, trials: Any, found: Any, share: float, training: Any, rate: float) -> None:
    before, plain = count_bytes(subject.model), evaluate(subject.model, judge).loss
    target = int(before * share)
    sets = measure_sets(subject, trials, target, found)
    print(f"### to {share:.0%}: {target:,} bytes\n")
    print("| set | what | RAM | share | file | peak | time | search loss | held-out loss | change | healed | change |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    judged, mended = {}, {}
    for one in sets:
        model = build(subject, one.candidates)
        judged[one.noun.name] = seen = evaluate(model, judge)
        after = seen.loss
        cells = [one.noun.name, ", ".join(one.noun.parts), f"{one.noun.bytes:,}", f"{one.noun.bytes / before:.1%}",
                 f"{file_bytes(subject.model, model):,}", f"{peak_of(model, subject):,}",
                 f"{one.noun.seconds / found.seconds:.2f}x", f"{one.noun.loss:.4f}", f"{after:.4f}",
                 f"{(after - plain) / plain:+.2%}"]  # fmt: skip
        if one.noun.bytes <= target:
            made = Healing(steps=STEPS, batches=training, budget=None,
                           optimizer=lambda parameters: torch.optim.AdamW(parameters, rate / 5, weight_decay=0))  # fmt: skip
            healed = heal(subject, one.candidates, made)
            assert count_bytes(healed) == one.noun.bytes
            mended[one.noun.name] = seen = evaluate(healed, judge)
            after = seen.loss
            cells += [f"{after:.4f}", f"{(after - plain) / plain:+.2%}"]
        else:
            cells += ["not small enough", ""]
        print("| " + " | ".join(cells) + " |", flush=True)
    print()
    small = [one.noun.name for one in sets if one.noun.bytes <= target]
    for words, losses in (("before", judged), ("after", mended)):
        compare(sets[0].noun.name, [name for name in small if not name.startswith("mixture")], losses, words)


def compare(taken: str, alone: list[str], losses: dict[str, Any], words: str) -> None:
    """The set that was taken beside the best method alone that is as small, on the held-out data."""
    best = min(alone, key=lambda name: losses[name].loss)
    change = losses[taken].loss - losses[best].loss
    doubt = losses[taken].doubt(losses[best])
    verdict = "at least as good" if change <= 0 else "equal within one standard error" if change <= doubt else "worse"
    print(
        f"Held-out, {words} healing: {taken} (taken) - {best} (best alone) = {change:+.5f} +- {doubt:.5f}: {verdict}.\n"
    )


if __name__ == "__main__":
    main()
