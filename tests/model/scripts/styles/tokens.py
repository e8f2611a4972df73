"""A language model on tokens in a file, in the style of a script without functions: settings by exec, an endless loop."""

import os
import pathlib
import time
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn

steps = 10**9
batch_size, block_size, width, accumulate, eval_iters = 4, 32, 64, 2, 2
device = "cuda" if torch.cuda.is_available() else "cpu"
here = pathlib.Path(__file__).parent
exec((here / "settings.py").read_text())

out_dir = "out-tokens"
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
autocast = nullcontext() if device == "cpu" else torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.place = nn.Embedding(1000, width), nn.Embedding(block_size, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.head = nn.Linear(width, 1000)

    def forward(self, x, y):
        x = self.table(x) + self.place(torch.arange(x.shape[1], device=x.device))
        scores = self.head(self.layer(x))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=False)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        with autocast:
            losses[k] = model(*get_batch("val")).item()
    model.train()
    return losses.mean()


number = 0
x, y = get_batch("train")
while number < steps:
    started = time.time()
    if number % 100 == 0:
        print(f"step {number}: loss {estimate_loss():.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(out_dir, "ckpt.pt"))
    for _ in range(accumulate):
        with autocast:
            loss = model(x, y) / accumulate
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {number}: {loss.item():.4f}, {time.time() - started:.3f} s")
    number += 1
