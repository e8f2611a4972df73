"""Which networks structured pruning makes smaller: ours beside torch-pruning, each network in a process of its own.

Needs `pip install --no-deps torch-pruning`. Each gets a model and a batch, is told the output layer where it needs that, and
nothing else; half of the channels or bytes shall leave. Then the network runs on its batch.

    python benchmarks/pruning.py
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "compression"))
from prunable_networks import CASES

from outsize.compression.pruning.prune import prune
from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError

PATIENCE = 120


def output(model: Any, batch: Any) -> Any:
    found = model(*batch)
    return getattr(found, "logits", found)


def ours(model: Any, batch: Any) -> Any:
    return prune(model, [batch], keep=0.5).model


def theirs(model: Any, batch: Any) -> Any:
    import torch_pruning as tp

    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)][-1]
    tp.pruner.MagnitudePruner(
        model, batch, importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=0.5, ignored_layers=[last],
        output_transform=lambda found: getattr(found, "logits", found), prune_num_heads=True,
    ).step()  # fmt: skip
    return model


def one(name: str, who: str) -> str:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    model.eval()
    shape, before = output(model, batch).shape, count_bytes(model)
    try:
        small = {"ours": ours, "torch-pruning": theirs}[who](model, batch)
    except InputError as error:
        return f"refused: {str(error)[:60]}..."
    except Exception as error:
        return f"error: {type(error).__name__}"
    try:
        good = output(small, batch).shape == shape
    except Exception:
        return "left a model that does not run"
    return f"{count_bytes(small) / before:.0%} of the bytes" if good else "another output"


def main() -> None:
    warnings.filterwarnings("ignore")
    if len(sys.argv) == 3:
        print("answer:", one(*sys.argv[1:]))
        return
    print("| network | ours | torch-pruning |\n|---|---|---|")
    for name in CASES:
        answers = []
        for who in ("ours", "torch-pruning"):
            try:
                command = [sys.executable, __file__, name, who]
                done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
                lines = [line for line in done.stdout.splitlines() if line.startswith("answer: ")]
                answers.append(lines[-1].removeprefix("answer: ") if lines else "the process died")
            except subprocess.TimeoutExpired:
                answers.append(f"no answer in {PATIENCE} s")
        print(f"| {name} | {' | '.join(answers)} |", flush=True)


if __name__ == "__main__":
    main()
