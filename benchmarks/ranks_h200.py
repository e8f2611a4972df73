"""One card: a model that visits the card under `outsize.fit` beside FSDP2 with `CPUOffloadPolicy`, the same model and batch.

    python benchmarks/ranks_h200.py --layers 24 --budget 8GiB --out results/

Each way runs in a fresh process: `ours` (`fit(device="cuda", budget=...)`), `fsdp2` (`fully_shard` with `CPUOffloadPolicy`, one
rank, the card's memory limited to the budget by `set_per_process_memory_fraction`). Printed: tokens a second and the highest
bytes that torch reserved. `--device cpu` tries the script out on a small model. Not run yet on a card.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

SHAPES = {"cuda": (4096, 11008, 32000, 32), "cpu": (64, 160, 100, 4)}
STEPS = 5


def model_of(layers, device):
    from torch import nn

    width, inner, words, heads = SHAPES[device]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner_norm = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

        def forward(self, x):
            rows, tokens, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, -1))
            gate, value = self.up(self.inner_norm(x)).chunk(2, -1)
            return x + self.down(nn.functional.silu(gate) * value)

    return nn.Sequential(
        nn.Embedding(words, width),
        *[Layer() for _ in range(layers)],
        nn.RMSNorm(width),
        nn.Linear(width, words, bias=False),
    )


def loss(model, batch):
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def batch_of(given, device):
    import torch

    words = SHAPES[given.device][2]
    return {name: torch.randint(0, words, (given.rows, given.tokens), device=device) for name in "xy"}


def run_ours(given):
    import torch

    import outsize

    model = model_of(given.layers, given.device).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    fitted = outsize.fit(
        model, loss, optimizer, batch_of(given, "cpu"), device=given.device, budget=given.budget, host=given.host
    )
    return lambda: fitted.step(batch_of(given, "cpu"))


def run_fsdp2(given):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29741")
    dist.init_process_group("cuda:nccl,cpu:gloo" if given.device == "cuda" else "gloo")
    mesh = init_device_mesh(given.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=given.device == "cuda")
    model = model_of(given.layers, given.device).to(torch.bfloat16)
    for layer in model[1:-2]:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def step():
        loss(model, batch_of(given, given.device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(way, given):
    import torch

    from outsize.core.units import parse_bytes

    if given.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(given.budget) / total)
    step = {"ours": run_ours, "fsdp2": run_fsdp2}[way](given)
    step()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    if given.device == "cuda":
        torch.cuda.synchronize()
    took = (time.perf_counter() - begin) / STEPS
    reserved = torch.cuda.max_memory_reserved() if given.device == "cuda" else None
    return {
        "way": way,
        "tokens_a_second": given.rows * given.tokens / took,
        "reserved": reserved,
        "budget": given.budget,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", nargs="?")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", default="8GiB")
    parser.add_argument("--host", default="64GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(run(given.way, given)))
        return
    for way in ("ours", "fsdp2"):
        done = subprocess.run([sys.executable, __file__, way, *sys.argv[1:]], capture_output=True, text=True)
        line = (
            done.stdout.strip().splitlines()[-1]
            if done.returncode == 0
            else json.dumps({"way": way, "failed": done.stderr[-500:]})
        )
        print(line, flush=True)
        if given.out:
            with open(pathlib.Path(given.out) / "ranks_h200.jsonl", "a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
