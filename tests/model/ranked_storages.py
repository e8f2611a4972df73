"""What plain training steps hold on every rank, by the account of the CPU's allocator: `FILE RANK COUNT KIND...`.

Nothing of Outsize plans or traces here: the model is spread as its users do it. One JSON object a kind.
"""

import datetime
import json
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from outsize.model.fitting.ranks.collectives import Collectives
from outsize.model.torch_port.objects import start_allocator_events, stop_allocator_events
from outsize.model.torch_port.sharding import local_part

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # a fork is no script

from ranked_steps import Net, loss, samples, spread


def build(kind="", count=1, rank=0):
    torch.manual_seed(0)
    model = spread(Net(), kind, count) if kind else Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return model, optimizer, samples(rank, 0)


def step(model, optimizer, batch):
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def held_by(*tensors):
    storages = [local_part(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(kind, count, rank):
    """(highest bytes of storages in a second step, bytes of the optimizer's state)."""
    model, optimizer, batch = build("ddp" if kind == "zero1" else kind, count, rank)
    if kind == "zero1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in range(3):  # in the first step state is made, in the second DDP makes its buckets anew
        step(model, optimizer, batch)
    states = (optimizer.optim if kind == "zero1" else optimizer).state
    state = [value for values in states.values() for value in values.values()]
    total = held_by(*model.parameters(), *model.buffers(), *batch.values(), *state)
    if kind in ("ddp", "zero1"):
        total += held_by(*model.parameters())  # its buckets, which no tensor of Python's shows
    peak = total
    start_allocator_events()
    with Collectives().noting():  # frees happen in this thread, where they are seen
        step(model, optimizer, batch)
    for change in stop_allocator_events():
        total += change
        peak = max(peak, total)
    return {"kind": kind, "rank": rank, "peak": peak, "state": held_by(*state)}


def main(file, rank, count, *kinds):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, count = int(rank), int(count)
    timeout = datetime.timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count, timeout=timeout)
    for kind in kinds:
        print(json.dumps(measure(kind, count, rank)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
