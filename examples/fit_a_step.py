"""A training step in half of its memory, with the same gradients."""

import torch
from torch import nn

import outsize

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(256, 64)


def loss(model, batch):
    return (model(batch) - batch).pow(2).mean()


plain = outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True).plan.plain
fitted = outsize.fit(model, loss, optimizer, batch, budget=plain // 2)
print(fitted.plan)
fitted.step(batch)
assert fitted.measured <= plain // 2
