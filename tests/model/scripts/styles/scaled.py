"""Half precision with a GradScaler, a compiled model, one process of a group, and a thread that fetches batches."""

import os
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group("nccl", rank=0, world_size=1)
torch.cuda.set_device(dist.get_rank())
data = TensorDataset(torch.rand(512, 256), torch.rand(512, 8))
loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data), num_workers=4, persistent_workers=True)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8)).cuda()
model = torch.compile(DistributedDataParallel(model, device_ids=[0]))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
ready = queue.Queue(2)


def fetch():
    while True:
        for x, y in loader:
            ready.put((x.cuda(non_blocking=True), y.cuda(non_blocking=True)))


threading.Thread(target=fetch, daemon=True).start()
while True:
    x, y = ready.get()
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print("loss", loss.item())
