"""Models that do not fit on the card: trained and run with weights that visit, measured beside the link and the disk.

    python benchmarks/stream_h200.py --out results/      every part, each in a fresh process with its own time limit
    python benchmarks/stream_h200.py train --out results/

Parts: `exact` (hosted against plain steps, small models on the card), `rates` (link, disk-free: CPU and card AdamW), `host` and
`disk` (inference of a model four times the device's budget), `train` (the largest Llama-shaped model with AdamW in 8 GiB of
the card and 64 GiB of the host). The card is limited by `set_per_process_memory_fraction`, so that passing the budget dies.
Host memory is the process's highest resident size, which the page-locked blocks are part of.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

GiB = 2**30
LIMITS = {"exact": 35, "host": 30, "disk": 75, "rates": 12, "train": 100}
"""Seconds of each part."""
SHAPES = {"cuda": (4096, 11008, 32000, 32), "cpu": (256, 688, 500, 4)}
"""Width, width of the inner layer, words, heads; the CPU's is for trying the script out."""


def write(out, row):
    """One result, at once."""
    line = json.dumps(row)
    print(line, flush=True)
    with open(pathlib.Path(out) / "stream.jsonl", "a") as file:
        file.write(line + "\n")


def say(text):
    print(f"[{time.perf_counter() - BEGIN:6.1f}] {text}", file=sys.stderr, flush=True)


def highest_resident():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def llama(layers, hidden=4096, wide=11008, words=32000, heads=32):
    """A Llama-shaped model without contents, its rotary tables real."""
    import transformers

    from outsize.model.fitting import without_weights

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=words,
    )
    with without_weights():
        return transformers.LlamaForCausalLM(config)


def fill(model, dtype):
    """Real weights, drawn by several threads."""
    import torch

    rows = [(module, name) for module in model.modules() for name, p in module._parameters.items() if p is not None]

    def draw(row):
        number, (module, name) = row
        old = module._parameters[name]
        new = torch.empty(old.shape, dtype=dtype)
        if old.dim() == 1:
            new.fill_(1.0)
        else:
            source = (
                torch.randn(min(new.numel(), 2**20), generator=torch.Generator().manual_seed(number))
                .mul_(0.02)
                .to(dtype)
            )
            flat = new.view(-1)
            for start in range(0, flat.numel(), source.numel()):
                some = flat[start : start + source.numel()]
                some.copy_(source[: some.numel()])
        module._parameters[name] = torch.nn.Parameter(new, requires_grad=old.requires_grad)

    torch.set_num_threads(1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(draw, enumerate(rows)))
    torch.set_num_threads(os.cpu_count())
    return model


def limit_card(budget):
    import torch

    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)


def tokens(rows, length, words=32000):
    import torch

    made = torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": made, "labels": made}


def make_loss(switch):
    import torch

    def loss(model, batch):
        with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16, enabled=switch["amp"]):
            return model(**batch).loss

    return loss


def timed(work, device="cuda"):
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    value = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


def part_exact(out, device):
    """Hosted steps against plain ones on the same card."""
    import copy

    import torch

    import outsize

    shape = (4, 512, 1376, 4000, 8) if device == "cuda" else (2, 64, 172, 500, 2)
    for amp, way in ((False, {}), (True, {}), (False, {"without": ("state_away",)}), (False, {"clip": 1.0})):
        torch.manual_seed(0)
        model = fill(llama(shape[0], shape[1], shape[2], shape[3], shape[4]), torch.float32).train()
        plain = copy.deepcopy(model).to(device)
        batch = tokens(4, 128 if device == "cuda" else 16, shape[3])
        there = {name: t.to(device) for name, t in batch.items()}
        switch = {"amp": amp}
        loss = make_loss(switch)
        ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, plain))
        size = sum(p.numel() * 4 for p in model.parameters())
        budget = max(size * 3 // 2, 400 * 2**20) if device == "cuda" else 8 * size
        fitted = outsize.fit(model, loss, ours, batch, device=device, budget=budget, host="32GiB", **way)
        gradients = None
        losses = []
        for step in range(20):
            theirs.zero_grad()
            expected = loss(plain, there)
            expected.backward()
            expected = expected.detach()
            if "clip" in way:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            if step == 0 and not way:
                found = fitted._now.collect(batch)
                gradients = max(
                    float((found[id(p)] - q.grad).norm() / q.grad.norm().clamp_min(1e-12))
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True)
                )
            theirs.step()
            got = fitted.step(batch)
            losses.append(abs(float(got) - float(expected)) / abs(float(expected)))
        weights = max(
            float((p.detach().to(device) - q.detach()).norm() / q.norm())
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
        write(out, {
            "part": "exact", "amp": amp, "way": str(way), "update": fitted.choice.update, "budget": budget,
            "measured": fitted.measured, "projected": fitted.plan.peak(fitted.plan.budgets[0].pool),
            "gradient": gradients, "loss": max(losses), "first_loss": losses[0], "weights": weights,
            "choice": str(fitted.choice),
        })  # fmt: skip
        fitted.undo()
    _exact_disk(out, device, shape)


def _exact_disk(out, device, shape):
    """Inference from a file against plain inference."""
    import safetensors.torch
    import torch

    import outsize

    model = fill(llama(*shape[:4], heads=shape[4]), torch.float32).eval()
    path = pathlib.Path(out) / "small.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    batch = {"input_ids": tokens(2, 32, shape[3])["input_ids"]}
    size = sum(p.numel() * 4 for p in model.parameters())
    empty = llama(*shape[:4], heads=shape[4]).eval()
    fitted = outsize.fit(empty, None, None, batch, device=device, budget=max(size // 2, 128 * 2**20), weights=str(path))
    expected = model.to(device)(batch["input_ids"].to(device)).logits
    worst = max(float((fitted.infer(batch).logits - expected).abs().max()) for _ in range(3))
    write(out, {"part": "exact disk", "worst": worst, "largest": float(expected.abs().max())})
    path.unlink()


def part_rates(out, device):
    """The link alone and both ways, AdamW on the host and on the card."""
    import torch

    from outsize.model.fitting.move.mover import open_lane
    from outsize.model.fitting.plan.speeds import measure_rates, time_optimizer

    lane = open_lane(torch.device(device))
    one = torch.nn.Parameter(torch.zeros(1))
    found = measure_rates(lane, torch.optim.AdamW([one]))
    elements = 2**26 if device == "cuda" else 2**20
    fused = time_optimizer(torch.optim.AdamW([one], fused=True), "cpu", elements)
    loop = time_optimizer(torch.optim.AdamW([one]), "cpu", elements)
    write(out, {
        "part": "rates", "in": found.bring, "out": found.send, "both": found.both, "cores": os.cpu_count(),
        "adamw_host_fused_parameters": fused / 4, "adamw_host_parameters": loop / 4,
    })  # fmt: skip


def link_rate(device):
    """Bytes a second from page-locked memory: one gigabyte, several times, the best."""
    import torch

    from outsize.model.fitting.move.pinned_blocks import Block

    size = GiB if device == "cuda" else 2**24
    block = Block(size)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    best = min(timed(lambda: there.copy_(block.bytes, non_blocking=True), device)[0] for _ in range(5))
    block.unlock()
    return size / best


def infer_part(out, device, name, fitted, batch, size, extra, passes=5):
    """Time a few inferences and say what went over the link."""
    fitted.infer(batch)
    rows = []
    for _ in range(passes):
        before = fitted._now.visits.brought
        seconds, logits = timed(lambda: fitted.infer(batch, lambda m, b: m(**b).logits[:, -1]), device)
        rows.append((seconds, fitted._now.visits.brought - before))
    seconds = sorted(row[0] for row in rows)[len(rows) // 2]
    total, moved = sum(row[0] for row in rows), sum(row[1] for row in rows)
    row = {
        "part": name, "weights": size, "budget": fitted.plan.budgets[0].bytes, "streamed": rows[0][1], "seconds": seconds,
        "rate": rows[0][1] / seconds, "mean_rate": moved / total, "whole_model_rate": size / seconds,
        "finite": bool(logits.isfinite().all()), "resident": highest_resident(), "choice": str(fitted.choice)[:400], **extra,
    }  # fmt: skip
    write(out, row)


def part_host(out, device):
    """Inference, weights in host memory."""
    import torch

    import outsize

    layers, length = (40, 128) if device == "cuda" else (8, 16)
    shape = SHAPES[device]
    model = fill(llama(layers, *shape), torch.bfloat16).eval()
    size = sum(p.numel() * 2 for p in model.parameters())
    say(f"made {size / GiB:.1f} GiB")
    budget = size // 4
    rate = link_rate(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        limit_card(budget)
        torch.cuda.reset_peak_memory_stats()
    batch = {"input_ids": tokens(1, length, shape[2])["input_ids"]}
    took, fitted = timed(
        lambda: outsize.fit(model, None, None, batch, device=device, budget=budget, host="64GiB"), device
    )
    say(f"fitted in {took:.1f} s\n{fitted.plan}")
    infer_part(out, device, "host", fitted, batch, size, {"link": rate, "fit_seconds": took, "ratio": None})
    if device == "cuda":
        write(out, {"part": "host peak", "reserved": torch.cuda.max_memory_reserved(), "budget": budget})


def part_disk(out, device):
    """Inference, weights in a file, read directly."""
    import torch

    import outsize

    layers, length = (16, 128) if device == "cuda" else (8, 16)
    shape = SHAPES[device]
    model = llama(layers, *shape).to(torch.bfloat16).eval()
    path = pathlib.Path("outsize-stream.safetensors").absolute()
    took, size = timed(lambda: write_file(path, model), "cpu")
    say(f"wrote {size / GiB:.1f} GiB in {took:.1f} s")
    try:
        first = disk_rate(path)
        say(f"disk {first / 1e9:.2f} GB/s")
        budget = size // 4
        if device == "cuda":
            limit_card(budget)
        batch = {"input_ids": tokens(1, length, shape[2])["input_ids"]}
        took, fitted = timed(
            lambda: outsize.fit(
                model, None, None, batch, device=device, budget=budget, host="16GiB", weights=str(path)
            ),
            device,
        )
        say(f"fitted in {took:.1f} s\n{fitted.plan}")
        before = highest_resident()
        infer_part(
            out, device, "disk", fitted, batch, size, {"disk_before": first, "write": size / took, "before": before}, 3
        )
        write(out, {"part": "disk again", "disk_after": disk_rate(path)})
    finally:
        path.unlink()


def write_file(path, model):
    """A safetensors file of the model's shapes, its values repeated from one drawn block."""
    import torch

    table, at = {}, 0
    for name, tensor in model.state_dict().items():
        size = tensor.numel() * 2
        table[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    head = struct.pack("<Q", -(-(len(text) + 8) // 4096) * 4096 - 8)
    head += text.ljust(struct.unpack("<Q", head)[0])
    block = (torch.randn(2**23) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + at)
    handle = os.open(path, os.O_WRONLY)

    def put(start):
        os.pwrite(handle, block[: min(len(block), at - start)], len(head) + start)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(0, at, len(block))))
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return at


def disk_rate(path):
    """Bytes a second of direct reads of the whole file, several threads, large pieces: the best of two passes."""
    from outsize.array.store.io.file import AlignedFile
    from outsize.model.fitting.move.pinned_blocks import Block
    from outsize.model.fitting.move.weight_files import PIECE, READERS

    file, room = AlignedFile(str(path)), Block(READERS * PIECE)
    free = list(range(READERS))

    def read(start):
        slot = free.pop()
        length = min(PIECE, file.size - start)
        file.read(start, length, room.array[slot * PIECE : (slot + 1) * PIECE])
        free.append(slot)

    rates = []
    for _ in range(2):
        begin = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, range(0, file.size, PIECE)))
        rates.append(file.size / (time.perf_counter() - begin))
    room.unlock()
    return max(rates)


def part_train(out, device, host_budget=64 * GiB, card_budget=8 * GiB):
    """The largest model with AdamW, in both budgets."""
    import torch

    import outsize

    card = device == "cuda"
    shape = SHAPES[device]
    rows, length = (8, 1024) if card else (4, 16)
    batch, switch = tokens(rows, length, shape[2]), {"amp": False}
    loss = make_loss(switch)
    if card:
        limit_card(card_budget)
        torch.zeros(1, device="cuda")
    budget = card_budget if card else 24 * 2**20
    layers, count = 60 if card else 6, 0
    while True:  # weights, two states, the inputs of layers, what the process and its libraries hold
        model = llama(layers, *shape).train()
        count = sum(p.numel() for p in model.parameters())
        if 12 * count + 4 * rows * length * shape[0] * layers + highest_resident() + 2.2 * GiB <= host_budget:
            break
        layers -= 1
    fill(model, torch.float32)
    say(f"made {count / 1e9:.2f} B parameters, {layers} layers")
    while True:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        begin = time.perf_counter()
        try:
            fitted = outsize.fit(model, loss, optimizer, batch, device=device, budget=budget, host=host_budget)
            break
        except outsize.BudgetError as error:
            say(f"{layers} layers: {error}")
            if error.culprit != "host":
                raise
            model.model.layers = model.model.layers[:-1]
            layers, count = layers - 1, sum(p.numel() for p in model.parameters())
    took = time.perf_counter() - begin
    say(f"fitted in {took:.1f} s, rehearsal {fitted.seconds:.2f} s\n{fitted.plan}")
    row = {
        "part": "train", "parameters": count, "layers": layers, "budget": budget, "host_budget": host_budget,
        "fit_seconds": took, "measured": fitted.measured, "projected": fitted.plan.peak(fitted.plan.budgets[0].pool),
        "host_projected": fitted.plan.peak(outsize.core.memory.HOST), "predicted_seconds": fitted.plan.seconds,
        "choice": str(fitted.choice),
    }  # fmt: skip
    write(out, row)
    for kind, amp, more, steps in (("fp32", False, 1, 2), ("bf16 autocast", True, 1, 2), ("bf16 autocast", True, 2, 2)):
        switch["amp"] = amp
        data = tokens(rows * more, length, shape[2])
        try:
            runs = []
            for _ in range(steps):
                moved = fitted._now.visits.brought + getattr(fitted._now.sink, "brought", 0)
                seconds, value = timed(lambda data=data: fitted.step(data), device)
                moved = fitted._now.visits.brought + getattr(fitted._now.sink, "brought", 0) - moved
                runs.append((seconds, float(value), moved))
                say(f"{kind} {rows * more} rows: {seconds:.2f} s, loss {float(value):.4f}, {moved / 1e9:.1f} GB in")
            seconds = min(run[0] for run in runs)
            write(out, {
                "part": "train step", "kind": kind, "tokens": rows * more * length, "seconds": seconds,
                "all": [run[0] for run in runs], "tokens_per_second": rows * more * length / seconds,
                "losses": [run[1] for run in runs], "brought": runs[-1][2], "resident": highest_resident(),
                "reserved": torch.cuda.max_memory_reserved() if card else 0,
            })  # fmt: skip
        except Exception as error:
            write(out, {"part": "train step", "kind": kind, "failed": str(error)[:300]})
            break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--here", action="store_true")
    given = parser.parse_args()
    if given.here:
        globals()[f"part_{given.parts[0]}"](given.out, given.device)
        return
    for part in given.parts or LIMITS:
        begin = time.perf_counter()
        words = [sys.executable, __file__, part, "--here", "--out", given.out, "--device", given.device]
        try:
            code = subprocess.run(words, timeout=LIMITS[part]).returncode
        except subprocess.TimeoutExpired:
            code = "time"
        write(given.out, {"part": f"{part} ended", "code": code, "seconds": time.perf_counter() - begin})
        if part == "exact" and code == 1:
            break


BEGIN = time.perf_counter()
if __name__ == "__main__":
    main()
