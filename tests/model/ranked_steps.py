"""What every rank of a test does: `python ranked_steps.py FILE RANK COUNT SCENARIO...` fits a small model and prints what it saw.

A scenario is `kind:share:failure`: `ddp`, `fsdp` or `hsdp`; the part of the plain step's peak that is the budget; where memory
runs out on the last rank: `forward`, `backward`, or `error` for an error of the user's own, or nothing. With `+counted` the loss
is a total and a count. Each rank prints one JSON object a scenario. `benchmarks/ranks.py` runs the same with more steps.
"""

import copy
import datetime
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outsize

STEPS = int(os.environ.get("RANKED_STEPS", "3"))
WIDTH, DEPTH, ROWS = (int(n) for n in os.environ.get("RANKED_SIZES", "24,2,384").split(","))
FULL = (
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.leave = nn.Linear(width, 7)  # of an odd size: shards are padded

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def counted(model, batch):
    keep = batch["y"] > 1  # another count on every rank and in every slice
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * keep).sum(), keep.sum()


def samples(rank, step, rows=ROWS):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {"x": torch.rand(rows, 12, generator=generator), "y": torch.randint(0, 7, (rows,), generator=generator)}


def spread(model, kind, count):
    if kind == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    sizes, names = ((2, count // 2), ("replicate", "shard")) if kind == "hsdp" else ((count,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    policy = CPUOffloadPolicy(pin_memory=False) if kind == "offloaded" else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


class Trouble:
    """Fails once on this rank when it is armed."""

    def __init__(self, place):
        self.place, self.left = place, 0

    def hook(self, module, args, out):
        if self.place in ("forward", "error"):
            self.meet()
        elif self.place == "backward" and out.requires_grad:
            out.register_hook(lambda gradient: self.meet())

    def meet(self):
        self.left -= 1
        if self.left == 0:
            raise KeyError("labels") if self.place == "error" else RuntimeError(FULL)


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def plain_step(model, optimizer, loss, step, count):
    """What one process does with the batches of all ranks."""
    parts = [samples(rank, step) for rank in range(count)]
    value = loss(model, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    (value[0] / value[1] if isinstance(value, tuple) else value).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def run(rank, count, kind, share, place):
    torch.manual_seed(0)
    alone = Net()
    mine = copy.deepcopy(alone)
    trouble = Trouble(place.partition("+")[0])
    mine.blocks[-1].register_forward_hook(trouble.hook)
    model = spread(mine, kind, count)
    which = counted if place.endswith("counted") else loss
    optimizer, other = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, alone))
    plain = outsize.fit(model, which, optimizer, samples(rank, 0), budget="1GiB", dry_run=True)
    fitted = outsize.fit(model, which, optimizer, samples(rank, 0), budget=int(share * plain.plan.plain))
    first, seen, error = fitted.choice, [], ""
    gradients = 0.0
    for step in range(STEPS):
        if step == 1 and rank == count - 1:
            trouble.left = fitted.choice.slices
        try:
            fitted.step(samples(rank, step))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            break
        seen.append((max(fitted.rank_peaks), fitted.plan.peak(fitted.plan.pool)))
        plain_step(alone, other, which, step, count)
    if not error:
        fitted.undo()
        own = outsize.fit(
            model, which, optimizer, samples(rank, 0), budget=int(share * plain.plan.plain), own_step=True
        )
        own.backward(samples(rank, STEPS))
        expected = plain_step(alone, other, which, STEPS, count)
        pairs = list(zip((full(p.grad) for p in model.parameters()), expected, strict=True))
        gradients = max(float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs)
        optimizer.step()
    weights = [(full(p), q.detach()) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    return {
        "kind": kind, "place": place, "budget": fitted.plan.budgets[0].bytes, "plain": plain.plan.plain, "error": error,
        "peaks": seen, "ranks": fitted.rank_peaks, "first": repr(first), "last": repr(fitted.choice),
        "slices": (first.slices, fitted.choice.slices), "gradients": gradients, "notes": list(fitted.plan.notes),
        "weights": max(float((got - wanted).abs().max() / wanted.abs().max()) for got, wanted in weights),
    }  # fmt: skip


def main(file, rank, count, *scenarios):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, count = int(rank), int(count)
    timeout = datetime.timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count, timeout=timeout)
    for scenario in scenarios:
        kind, share, place = scenario.split(":")
        print(json.dumps({"rank": rank} | run(rank, count, kind, float(share), place)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
