"""Compiled steps on a card: what estimate says without it, what fit holds, and what torch's own settings hold and take.

python benchmarks/compiled_h200.py [--models gpt2,...] [--parts 1.0,0.7,...] [--tiny]

Each case runs in a fresh process, with the card's allocator stopped at the budget. Budgets are parts of what the plain eager step
reserves. Out: a line of JSON a case: seconds of a step (best of five after two), and bytes reserved in all steps, the first with
its compilation too.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time

from fit_models import MODELS, build

PARTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15)
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Settings of `activation_memory_budget` that are tried."""


def timed(step):
    """(seconds, bytes reserved) of steps."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return min(took[2:]), torch.cuda.max_memory_reserved()


def limit(budget):
    import torch

    if budget:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))


def lower():
    import torch

    return torch.autocast("cuda", dtype=torch.bfloat16)


def run(case):
    """One case: `way` is eager, compile, fit (eager) or fit_compiled."""
    import torch

    import outsize

    model, loss, batch = build(case["model"], "cuda", case["tiny"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    limit(case["budget"])
    if case["way"] in ("compile", "fit_compiled"):
        model = torch.compile(model)
    said = {}
    if case["way"].startswith("fit"):
        with lower():
            begin = time.perf_counter()
            fitted = outsize.fit(model, loss, optimizer, batch, budget=case["budget"])
            said = {"planning": time.perf_counter() - begin, "projected": fitted.plan.peak(fitted.plan.pool)}
            seconds, held = timed(lambda: fitted.step(batch))
        said["remedies"] = [remedy.how for remedy in fitted.plan.remedies]
        said["inside"] = held <= said["projected"] <= case["budget"]
    else:
        from torch._functorch import config

        def step():
            optimizer.zero_grad(set_to_none=True)
            with lower():
                value = loss(model, batch)
            value.backward()
            optimizer.step()

        part = case.get("activations", 1.0)
        with config.patch(activation_memory_budget=part) if case["way"] == "compile" else contextlib.nullcontext():
            seconds, held = timed(step)
    return {**case, "seconds": seconds, "held": held, **said}


def estimate(case):
    """The compiled step, followed without the card."""
    import torch

    import outsize

    def made():
        model, loss, batch = build(case["model"], "cuda", case["tiny"])
        return torch.compile(model), loss, torch.optim.AdamW(model.parameters(), lr=1e-4), batch

    def step(model, loss, optimizer, batch):
        optimizer.zero_grad(set_to_none=True)
        with lower():
            value = loss(model, batch)
        value.backward()
        optimizer.step()

    footprint = outsize.estimate(step, build=made, device="cuda")
    return {
        **case,
        "likely": footprint.peak_reserved.bytes,
        "bound": footprint.peak_reserved.bound,
        "notes": footprint.notes,
    }


def fresh(case):
    """The case in a process of its own."""
    out = subprocess.run([sys.executable, sys.argv[0], "--case", json.dumps(case)], capture_output=True, text=True)
    if out.returncode:
        return {**case, "failed": (out.stderr.strip().splitlines() or ["killed"])[-1][:300]}
    return json.loads(out.stdout.splitlines()[-1])


def main():
    words = argparse.ArgumentParser()
    words.add_argument("--models", default=",".join(MODELS))
    words.add_argument("--parts", default=",".join(map(str, PARTS)))
    words.add_argument("--tiny", action="store_true")
    words.add_argument("--case")
    given = words.parse_args()
    if given.case:
        case = json.loads(given.case)
        print(json.dumps((estimate if case["way"] == "estimate" else run)(case)))
        return
    for name in given.models.split(","):
        base = {"model": name, "tiny": given.tiny, "budget": 0}
        eager = fresh({**base, "way": "eager"})
        rows = [eager, fresh({**base, "way": "estimate"})]
        rows += [fresh({**base, "way": "compile", "activations": part}) for part in BUDGETS]
        for part in map(float, given.parts.split(",")) if "held" in eager else ():
            budget = int(part * eager["held"])
            rows += [fresh({**base, "way": way, "budget": budget, "part": part}) for way in ("fit", "fit_compiled")]
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
