"""A loop of accelerate with accumulation and a scheduler."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.rand(256, 128), torch.randint(0, 10, (256,))), batch_size=32, shuffle=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(100):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print("loss", accelerator.gather(loss).mean().item())
    accelerator.save_state("states")
