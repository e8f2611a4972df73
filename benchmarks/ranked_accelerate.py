"""What `accelerate launch --num_processes 2 benchmarks/ranked_accelerate.py` runs: fit inside the user's own accelerate loop.

Each rank fits the prepared model, gets its loss from fit, and gives it to `accelerator.backward` as ever. The weights are
compared with those of one process that has all batches.
"""

import copy

import torch
from accelerate import Accelerator
from torch import nn

import outsize


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def samples(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {"x": torch.rand(256, 16, generator=generator), "y": torch.randint(0, 5, (256,), generator=generator)}


def main():
    accelerator = Accelerator(cpu=True)
    rank, count = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    model, optimizer = copy.deepcopy(alone), None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    other = torch.optim.AdamW(alone.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = outsize.fit(model, loss, optimizer, samples(rank, 0), budget="1GiB", own_step=True, dry_run=True).plan.plain
    fitted = outsize.fit(model, loss, optimizer, samples(rank, 0), budget=int(0.7 * plain), own_step=True)
    for step in range(20):
        accelerator.backward(fitted.loss(samples(rank, step)))
        optimizer.step()
        optimizer.zero_grad()
        parts = [samples(number, step) for number in range(count)]
        loss(alone, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}).backward()
        other.step()
        other.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    print(
        f"rank {rank} of {count}: {type(model).__name__}, {fitted.choice.slices} slices, weights after 20 steps differ by "
        f"{worst:.1e}, peak {max(fitted.peaks):,} of {fitted.plan.budgets[0].bytes:,}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
