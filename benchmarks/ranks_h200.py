"""One card: the 5.12 B model of `stream_h200.py` under `outsize.fit` beside FSDP2 with `CPUOffloadPolicy`, the same budgets.

    python benchmarks/ranks_h200.py --kinds bf16 --out results/
    python benchmarks/ranks_h200.py --kinds fp32 --out results/

Each way runs in a fresh process with a time limit, with the same weights and tokens. `bf16` has weights and AdamW's state in
bfloat16; `fp32` has both in float32 and computes in bfloat16 (autocast; FSDP2's `MixedPrecisionPolicy`).

- `ours`: `fit(device="cuda", budget=, host=)`.
- `fsdp2`: one rank, `fully_shard` and activation checkpointing of every layer, AdamW fused on the host. The passes of a step run
  on the whole card first, in so many slices, which tells what they reserve. 1.02 times that, or the budget where that is more, is
  FSDP2's budget, and `ours` runs in it too.

The card's memory is limited by `set_per_process_memory_fraction`. Rows: tokens a second; what torch reserved; what the driver
says is in use on the whole card above the first context; the process's highest resident size; page-locked bytes of torch's own
allocator, which the resident size may lack. Torch rounds page-locked blocks up to powers of two, so FSDP2 takes about 50 GiB of
the host for `bf16` and 90 GiB for `fp32`. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

from stream_h200 import GiB, fill, highest_resident, llama, make_loss, say, tokens

from outsize.core.units import parse_bytes

SHAPES = {"cuda": (24, 4096, 11008, 32000, 32), "cpu": (4, 128, 344, 500, 4)}
"""Layers, width, inner width, words, heads."""
BATCH = {"cuda": (8, 1024), "cpu": (8, 32)}
STEPS = 3
LEARNING = 1e-5


class Driver:
    """The most memory in use on the card, as its driver says, every few milliseconds."""

    def __init__(self, device):
        import torch

        if device == "cuda":
            torch.zeros(1, device="cuda")
        self.first = self.most = self.used() if device == "cuda" else 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look if device == "cuda" else self._ended.wait)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()

    @staticmethod
    def used():
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def _look(self):
        while not self._ended.wait(0.005):
            self.most = max(self.most, self.used())

    def above(self):
        return self.most - self.first


def begin(given):
    """(model with weights, batch), and the card as it is before anything is there."""
    import torch

    kind = torch.bfloat16 if given.kind == "bf16" else torch.float32
    layers, *shape = SHAPES[given.device]
    model = fill(llama(given.layers or layers, *shape), kind).train()
    say(f"made {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
    return model, tokens(*BATCH[given.device], shape[2])


def limit_card(given, budget):
    import torch

    if given.device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
        torch.cuda.reset_peak_memory_stats()


def timed(given, step):
    import torch

    began = time.perf_counter()
    loss = float(step())
    if given.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, loss


def tell(given, way, budget, step, driver, **more):
    """Time the steps and write the row; what was measured so far is written even if a step fails."""
    import torch

    card = given.device == "cuda"
    rows, length = BATCH[given.device]
    row = {"way": way, "kind": given.kind, "budget": budget, **more}
    seconds, losses = [], []
    for _ in range(1 + STEPS):
        try:
            took, loss = timed(given, step)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            break
        seconds.append(took)
        losses.append(loss)
        say(f"{way} {given.kind}: {took:.2f} s, loss {loss:.4f}")
    if seconds[1:]:
        best = sorted(seconds[1:])[len(seconds[1:]) // 2]
        row.update(seconds=best, tokens_a_second=rows * length / best)
    row.update(all=seconds, losses=losses, resident=highest_resident())
    if card:
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
        row.update(reserved=reserved(given), driver=driver.above(), context=driver.first, pinned=pinned)
    write(given, row)


def write(given, row):
    line = json.dumps(row)
    print(line, flush=True)
    with open(pathlib.Path(given.out) / "ranks_h200.jsonl", "a") as file:
        file.write(line + "\n")


def run_ours(given, driver):
    import torch

    import outsize

    budget = parse_bytes(given.budget)
    model, batch = begin(given)
    limit_card(given, budget)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING)
    loss = make_loss({"amp": given.kind == "fp32"})
    began = time.perf_counter()
    fitted = outsize.fit(model, loss, optimizer, batch, device=given.device, budget=budget, host=given.host)
    took = time.perf_counter() - began
    say(f"fitted in {took:.1f} s\n{fitted.plan}")
    pool = fitted.plan.budgets[0].pool
    more = {"projected": fitted.plan.peak(pool), "fit_seconds": took, "choice": str(fitted.choice)[:300]}
    tell(given, "ours", budget, lambda: fitted.step(batch), driver, **more)


def join_group(device):
    """A group of one rank: NCCL, or gloo where NCCL does not start. Returns which."""
    import torch
    import torch.distributed as dist

    for backend in ("nccl", "gloo") if device == "cuda" else ("gloo",):
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.zeros(1, device=device))
            return backend
        except Exception as error:
            say(f"{backend} does not start: {error}")
            if dist.is_initialized():
                dist.destroy_process_group()
    raise RuntimeError("no backend starts")


def spread(model, given):
    """FSDP2 as its authors' own trainers use it: layers in groups of their own, embedding and head too."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    more = {"mesh": init_device_mesh(given.device, (1,)), "offload_policy": CPUOffloadPolicy(given.device == "cuda")}
    if given.kind == "fp32":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inner = model.model
    for number, layer in enumerate(inner.layers):
        inner.layers[number] = checkpoint_wrapper(layer)
        fully_shard(inner.layers[number], **more)
    fully_shard(inner.embed_tokens, **more)
    fully_shard([inner.norm, model.lm_head], reshard_after_forward=False, **more)
    return fully_shard(model, **more)


def unspread(model, given):
    """A new model around the weights of one whose step ran out of memory."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            group._to_sharded()
    layers, *shape = SHAPES[given.device]
    fresh = llama(given.layers or layers, *shape)
    old = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    for name, _ in list(fresh.named_parameters()):
        holder, _, last = name.rpartition(".")
        module = fresh.get_submodule(holder)
        module._parameters[last] = type(module._parameters[last])(old.pop(name).detach().to_local())
    return fresh.train()


def make_step(model, batch, slices, optimizer=None):
    """A step in so many slices of the batch; without an optimizer, its passes only."""

    def step():
        total = 0.0
        for part in zip(*(t.chunk(slices) for t in batch.values()), strict=True):
            loss = model(**dict(zip(batch, part, strict=True))).loss / slices
            loss.backward()
            total += loss.detach()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
        return total

    return step


class Spread:
    """A model under FSDP2 that is made anew around its weights where a step ran out of memory."""

    def __init__(self, given, model, batch):
        self.given, self.batch, self.model = given, batch, spread(model, given)

    def fits(self, slices, budget):
        """Whether the passes of a step stay inside a budget."""
        import torch

        limit_card(self.given, budget)
        try:
            seconds, _ = timed(self.given, make_step(self.model, self.batch, slices))
            say(f"{slices} slices in {budget / GiB:.2f} GiB: {seconds:.1f} s")
            return True
        except torch.OutOfMemoryError:
            say(f"{slices} slices do not fit {budget / GiB:.2f} GiB")
        gc.collect()
        fresh = unspread(self.model, self.given)
        self.model = None
        gc.collect()
        limit_card(self.given, whole(self.given))
        self.model = spread(fresh, self.given)
        return False

    def needed(self, slices):
        """What the passes reserve on the whole card, None where that is not enough."""
        return (reserved(self.given) or 0) if self.fits(slices, whole(self.given)) else None


def whole(given):
    """All of the card; on the CPU, where this is only tried out, four budgets."""
    import torch

    card = given.device == "cuda"
    return torch.cuda.get_device_properties(0).total_memory if card else 4 * parse_bytes(given.budget)


def reserved(given):
    import torch

    return torch.cuda.max_memory_reserved() if given.device == "cuda" else None


def run_fsdp2(given, driver):
    import torch

    budget = parse_bytes(given.budget)
    backend = join_group(given.device)
    model, batch = begin(given)
    work = Spread(given, model, {name: t.to(given.device) for name, t in batch.items()})
    del model
    say("spread")
    needed = work.needed(given.slices)
    if needed is None:
        write(given, {"way": "fsdp2", "kind": given.kind, "budget": None, "failed": "out of memory on the whole card"})
        return
    found = max(budget, int(1.02 * needed))
    limit_card(given, found)
    driver.most = driver.first
    optimizer = torch.optim.AdamW(work.model.parameters(), LEARNING, fused=True)
    step = make_step(work.model, work.batch, given.slices, optimizer)
    more = {"slices": given.slices, "backend": backend, "passes": needed}
    tell(given, "fsdp2", found, step, driver, **more)


@functools.cache
def growing():
    """The setting of torch's allocator that FSDP2's trainers recommend, where this machine's driver takes it."""
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    words = [sys.executable, "-c", "import torch; torch.ones(2**26, device='cuda').sum().item()"]
    done = subprocess.run(words, env={**os.environ, **setting}, capture_output=True, timeout=60)
    say(f"segments that grow: {not done.returncode}")
    return {} if done.returncode else setting


def start(given, way, kind, budget):
    """A way in a fresh process; returns the rows that it wrote."""
    words = [sys.executable, "-u", __file__, "--way", way, "--kinds", kind, "--budget", str(budget), "--host", given.host,
             "--device", given.device, "--limit", str(given.limit), "--out", given.out]  # fmt: skip
    words += ["--slices", str(given.slices)]
    words += ["--layers", str(given.layers)] if given.layers else []
    began, rows = time.perf_counter(), []
    held = pathlib.Path(given.out) / "ranks_h200.jsonl"
    before = len(held.read_text().splitlines()) if held.exists() else 0
    env = {**os.environ, **growing()} if way == "fsdp2" and given.device == "cuda" else None
    try:
        code = subprocess.run(words, timeout=given.limit, env=env).returncode
    except subprocess.TimeoutExpired:
        code = "time"
    if held.exists():
        rows = [json.loads(line) for line in held.read_text().splitlines()[before:]]
    write(given, {"ended": way, "kind": kind, "budget": budget, "code": code, "seconds": time.perf_counter() - began})
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("ours", "fsdp2"))
    parser.add_argument("--kinds", default="bf16,fp32")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--budget", default="8GiB", help="of the card")
    parser.add_argument("--host", default="64GiB", help="for ours; FSDP2 takes what it takes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--slices", type=int, default=1, help="of the batch, for FSDP2")
    parser.add_argument("--same", action="store_true", help="ours in FSDP2's budget alone")
    parser.add_argument("--limit", type=float, default=180, help="seconds of one way")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    given = parser.parse_args()
    given.began = time.perf_counter()
    if given.way:
        given.kind = given.kinds
        with Driver(given.device) as driver:
            {"ours": run_ours, "fsdp2": run_fsdp2}[given.way](given, driver)
        return
    for kind in given.kinds.split(","):
        budget = parse_bytes(given.budget)
        rows = start(given, "fsdp2", kind, budget)
        same = next((row["budget"] for row in rows if row.get("seconds")), budget)
        for each in dict.fromkeys((same, budget)) if not given.same else (same,):
            start(given, "ours", kind, each)


if __name__ == "__main__":
    main()
