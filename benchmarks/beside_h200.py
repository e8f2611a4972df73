"""A step that is not alone on its card: averaged weights and another tensor of the same process lie beside it, inside one
budget that the process may not pass.

    python benchmarks/beside_h200.py --out DIR

Says for each model what the plan projected, what was held, and how far the losses of some steps are from the plain ones'.
"""

import argparse
import copy
import json
import pathlib
import warnings

import torch
from fit_models import build, cut_step

import outsize

GiB = 2**30


def limit(size):
    """The process may hold so much of the card."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if size is None else size / total)


def steps(step, count=4):
    return [float(step()) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--models", default="gpt2,resnet50")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in given.models.split(","):
        model, loss, batch = build(name, "cuda")
        rows = next(iter(batch.values())).shape[0]
        first = {key: value.to("cpu", copy=True) for key, value in model.state_dict().items()}
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.reset_peak_memory_stats()
        plain = steps(cut_step(model, loss, optimizer, batch, rows))
        alone = torch.cuda.max_memory_reserved()
        model.load_state_dict(first)
        optimizer.zero_grad(set_to_none=True)
        averaged, samples = copy.deepcopy(model), torch.zeros(3 * GiB // 2, dtype=torch.uint8, device="cuda")
        beside = sum(p.numel() * 4 for p in averaged.parameters()) + samples.numel()
        budget = int(0.6 * alone) + beside
        limit(budget)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.reset_peak_memory_stats()
        fitted = outsize.fit(model, loss, optimizer, batch, budget=budget)
        planning = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        ours = steps(lambda fitted=fitted, batch=batch: fitted.step(batch))
        row = {
            "model": name, "plain_GiB": alone / GiB, "beside_GiB": beside / GiB, "budget_GiB": budget / GiB,
            "projected_GiB": max(p.bytes for step in fitted.plan.steps for p in step.peaks) / GiB,
            "held_GiB": torch.cuda.max_memory_reserved() / GiB, "held_while_planning_GiB": planning / GiB,
            "losses": max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True)),
            "notes": [note for note in fitted.plan.notes if "not the step's" in note], "choice": str(fitted.choice)[:200],
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with (given.out / "beside_h200.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        fitted.undo()
        del model, loss, batch, optimizer, fitted, averaged, samples, first
        limit(None)


if __name__ == "__main__":
    main()
