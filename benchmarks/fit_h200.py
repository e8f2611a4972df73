"""Fit against what people do today, on a card limited to a share of the plain step's memory.

    python benchmarks/fit_h200.py gpt2 --percent 50 --out fit.json      one model, one budget: a few minutes
    python benchmarks/fit_h200.py --table fit.json                      the table

Every row is a fresh process whose share of the card is set by `set_per_process_memory_fraction`, so that passing the
budget dies. Peers: plain, accumulation (2, 4, 8 slices), every block checkpointed, `save_on_cpu`, and accelerate's way
(smaller batches until one fits, with accumulation to keep the effective batch).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

MODELS = ("gpt2", "gpt2-medium", "llama-1.3b", "resnet50", "vit_b_16", "t5-small")
WAYS = ("plain", "micro2", "micro4", "micro8", "checkpoint", "save_on_cpu", "finder", "outsize")


def build(name, device):
    """(model, loss, batch): weights without training, tokens and pictures without meaning."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    if name in ("resnet50", "vit_b_16"):
        import torchvision

        model = getattr(torchvision.models, name)()
        batch = {"x": torch.randn(128, 3, 224, 224, device=device), "y": torch.randint(0, 1000, (128,), device=device)}
        return model.to(device), lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]), batch
    import transformers

    if name == "t5-small":
        model, rows, length, words = (
            transformers.T5ForConditionalGeneration(transformers.T5Config(dropout_rate=0.0)),
            32,
            512,
            32000,
        )
    elif name == "llama-1.3b":
        config = transformers.LlamaConfig(
            hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16, vocab_size=32000
        )
        model, rows, length, words = transformers.LlamaForCausalLM(config), 8, 1024, 32000
    else:
        shape = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16)}[name]
        config = transformers.GPT2Config(
            n_embd=shape[0], n_layer=shape[1], n_head=shape[2], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        model, rows, length, words = transformers.GPT2LMHeadModel(config), 16 if name == "gpt2" else 8, 1024, 50257
    tokens = torch.randint(0, words, (rows, length), device=device)
    return model.to(device), lambda m, b: m(**b).loss, {"input_ids": tokens, "labels": tokens}


def make_step(way, model, loss, optimizer, batch, budget, amp):
    """One training step done this way."""
    import torch

    inner = loss
    if amp:

        def loss(m, b):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return inner(m, b)

    if way == "outsize":
        import outsize

        fitted = outsize.fit(model, loss, optimizer, batch, budget=budget)
        print(fitted.plan, file=sys.stderr)
        return lambda: fitted.step(batch)
    if way == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        for module in [m for m in model.modules() if type(m).__name__ in BLOCKS]:
            forward = module.forward
            module.forward = lambda *a, forward=forward, **k: checkpoint(forward, *a, use_reentrant=False, **k)
        if hasattr(model, "config"):
            model.config.use_cache = False
    slices = int(way[5:]) if way.startswith("micro") else 1

    def run(slices):
        rows = next(iter(batch.values())).shape[0]
        size = -(-rows // slices)
        optimizer.zero_grad(set_to_none=True)
        for start in range(0, rows, size):
            part = {key: value[start : start + size] for key, value in batch.items()}
            count = next(iter(part.values())).shape[0]
            (loss(model, part) * (count / rows)).backward()
        optimizer.step()

    if way == "finder":
        slices = 1
        while True:
            failed = False
            try:
                run(slices)
            except torch.OutOfMemoryError:
                failed = True
            if not failed:
                break
            slices *= 2
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    if way == "save_on_cpu":

        def saved():
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                run(1)

        return saved
    return lambda: run(slices)


BLOCKS = ("GPT2Block", "LlamaDecoderLayer", "T5Block", "EncoderBlock", "Bottleneck")


def one(name, way, budget, amp):
    """Time and reserved bytes of one way; prints JSON."""
    import torch

    if budget:
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    row = {"model": name, "way": way, "budget": budget, "amp": amp}
    try:
        model, loss, batch = build(name, "cuda")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        step = make_step(way, model, loss, optimizer, batch, budget, amp)
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        row |= {"seconds": statistics.median(times[2:]), "reserved": torch.cuda.max_memory_reserved()}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(json.dumps(row))


def case(name, percent, amp, out):
    """All ways of one model at one budget, each in a fresh process."""

    def ask(way, budget):
        command = [sys.executable, __file__, name, "--way", way, "--budget", str(budget)] + (["--amp"] if amp else [])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else {"model": name, "way": way, "failed": done.stderr[-300:]}

    plain = ask("plain", 0)
    rows = [plain | {"percent": 100}]
    budget = plain["reserved"] * percent // 100
    rows += [ask(way, budget) | {"percent": percent} for way in WAYS]
    with pathlib.Path(out).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def table(path):
    """Time ratios to the plain step, a line a case."""
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    print(f"| model | amp | budget | {' | '.join(WAYS)} |\n|---|---|---|{'---|' * len(WAYS)}")
    for key in dict.fromkeys((r["model"], r.get("amp"), r["percent"]) for r in rows if r.get("budget")):
        mine = {r["way"]: r for r in rows if (r["model"], r.get("amp"), r["percent"]) == key and r.get("budget")}
        base = next(r for r in rows if r["model"] == key[0] and r.get("amp") == key[1] and not r.get("budget"))
        said = [f"{mine[w]['seconds'] / base['seconds']:.2f}x" if "seconds" in mine.get(w, {}) else "-" for w in WAYS]
        print(f"| {key[0]} | {key[1]} | {key[2]} % | {' | '.join(said)} |")


def main():
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("--percent", type=int, default=50)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--out", default="fit_h200.jsonl")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--table")
    given = parser.parse_args()
    if given.table:
        table(given.table)
    elif given.way:
        one(given.model, given.way, given.budget, given.amp)
    else:
        case(given.model, given.percent, given.amp, given.out)


if __name__ == "__main__":
    main()
