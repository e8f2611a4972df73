"""What fewer bits do to a training run: a character GPT on the standard library's own text, by each approximate remedy alone.

Prints the projected and measured peak of a step, its time beside the plain one, and the held-out loss after the same steps.

    python benchmarks/approximate_fit.py [STEPS]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import outsize

STEPS, LENGTH, ROWS = int([*sys.argv, "150"][1]), 64, 32
EXACT = (
    "slices",
    "checkpoint",
    "offload",
    "in_backward",
    "state_away",
    "gradients_away",
    "stream",
    "chunks",
    "recipes",
    "tensors_away",
)
NARROW = ("autocast", "state_bits", "frozen_bits", "kept_bits")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Characters(nn.Module):
    def __init__(self, symbols: int, width: int = 96, heads: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(symbols, width), nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.blocks(self.embedding(x) + self.place)))


def loss(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def run(data: Any, symbols: int, only: str) -> None:
    torch.manual_seed(0)
    model = Characters(symbols)
    if only == "frozen_bits":
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
    source = torch.Generator().manual_seed(1)

    def batch() -> Any:
        starts = torch.randint(0, len(data) - LENGTH - 1, (ROWS,), generator=source)
        return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])

    without = (*EXACT, *(key for key in NARROW if key != only))
    budget: Any = "8GiB"
    if only:
        try:
            outsize.fit(model, loss, optimizer, batch(), budget=1, allow="approximate", without=without)
        except outsize.BudgetError as error:
            budget = error.smallest
    fitted = outsize.fit(
        model, loss, optimizer, batch(), budget=budget, allow="approximate" if only else "exact", without=without
    )
    fastest = float("inf")
    for _ in range(STEPS):
        began = time.perf_counter()
        fitted.step(batch())
        fastest = min(fastest, time.perf_counter() - began)
    fitted.undo()
    held_out = [batch() for _ in range(20)]
    with torch.no_grad():
        value = sum(float(loss(model, part)) for part in held_out) / len(held_out)
    done = ", ".join(remedy.name for remedy in fitted.plan.remedies) or "plain"
    peaks = f"{fitted.plan.peak() / 2**20:.2f} | {fitted.measured / 2**20:.2f}"
    print(
        f"| {only or 'plain'} | {done} | {peaks} | {1e3 * fastest:.0f} | {fitted.plan.slow_down:.2f}x | {value:.4f} |",
        flush=True,
    )


def main() -> None:
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    text = "".join(file.read_text(errors="ignore") for file in files)[:600_000]
    symbols = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    data = torch.tensor([symbols[symbol] for symbol in text])
    print(
        "| allowed | plan | projected MiB | measured MiB | fastest step ms | projected time | held-out loss |\n"
        "|---|---|---|---|---|---|---|"
    )
    for only in ("", *NARROW):
        run(data, len(symbols), only)


if __name__ == "__main__":
    main()
