"""Steps of twelve kinds (or `--blind`: of a dozen others) inside 50 and 30 % of what the plain step holds, on the CPU.

    python benchmarks/twelve_steps.py                          # a table
    python benchmarks/twelve_steps.py --only VAE --parts 0.3
    python benchmarks/twelve_steps.py --card --out DIR         # real sizes, see twelve_card.py

Each row runs in a fresh process. `held` is the peak of a real step by the events of torch's allocator, on top of the storages
that are there when the step begins; nothing of the plan is in it. `grad` is the largest difference of a parameter's gradient,
over the largest element of that gradient (of tiny ones: a thousandth of the largest of all). `time` is that of a fitted step
over that of a plain one in seconds of the processor, the best of five in turn; `plan` is in them too. Where a budget is
refused, the smallest one that the error names is given back.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import subprocess
import sys
import time
import warnings
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

RATE = 1e-4
"""Learning rate."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--parts", type=float, nargs="*", default=[0.5, 0.3])
    parser.add_argument("--card", action="store_true", help="real sizes on a CUDA device")
    parser.add_argument("--out", default="twelve_card", help="of --card: a folder for rows, plans and profiles")
    parser.add_argument("--seconds", type=float, default=280.0, help="of --card: no row begins after so many")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument(
        "--first", type=lambda text: text.split(","), default=[], help="of --card: steps that come first"
    )
    parser.add_argument("--profile", action="store_true", help="of --card: where the seconds of a step go")
    parser.add_argument("--tiny", action="store_true", help="of --card: on the CPU, to try the script out")
    parser.add_argument("--table", help="of --card: the table of a file of rows")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.one[0], float(given.one[1]))))
        return 0
    if given.card or given.table:
        import twelve_card

        print(twelve_card.table(given.table)) if given.table else twelve_card.run_all(given)
        return 0
    import step_models as models

    cases = models.BLIND if given.blind else models.TWELVE
    print(
        "| step | budget | plain MiB | held / budget | grad | time | plan s | remedies |\n|---|---|---|---|---|---|---|---|"
    )
    bad = 0
    for name in cases:
        if given.only not in name:
            continue
        for part in given.parts:
            command = [sys.executable, __file__, "--one", name, str(part)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ})
            if done.returncode:
                bad += 1
                print(f"| {name} | {part:.0%} | error: {done.stderr.strip().splitlines()[-1][:200]} |", flush=True)
                continue
            row = json.loads(done.stdout.strip().splitlines()[-1])
            bad += row["bad"]
            print(f"| {name} | {part:.0%} | {row['plain']:.1f} | {row['said']} |", flush=True)
    print(f"{bad} bad")
    return int(bad > 0)


def run(name: str, part: float) -> dict[str, Any]:
    """One step in one budget."""
    import step_models as models
    import torch

    import outsize

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss, batch = {**models.TWELVE, **getattr(models, "BLIND", {})}[name]()
    model.train()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), RATE, momentum=0.9)

    def plain_step() -> None:
        loss(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    plain_step()
    wanted = gradients(plain, optimizer)
    buffers = [b.clone() for b in plain.buffers()]
    most = held(plain_step, plain, optimizer, batch)
    budget, said = int(part * most), ""
    own = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = outsize.fit(model, loss, own, batch, budget=budget)
        except outsize.BudgetError as error:
            said = f"refused, {(error.smallest or 0) / most:.0%} would do: "
            budget = error.smallest or 0
            fitted = outsize.fit(model, loss, own, batch, budget=budget)
        planned = time.process_time() - began
        torch.manual_seed(1)
        fitted.step(batch)
        fitted.gather()
        floor = 1e-3 * max(float(w.abs().max()) for w in wanted)
        got = gradients(model, own)
        worst = max(
            float((g - w).abs().max() / w.abs().max().clamp_min(floor)) for g, w in zip(got, wanted, strict=True)
        )

        same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(model.buffers(), buffers, strict=True))
        fitted.step(batch)
        peak = held(lambda: fitted.step(batch), model, own, batch)
        took, own_took = quickest(plain_step, lambda: fitted.step(batch))
        ratio = own_took / took
    bad = peak > budget or worst > 1e-3 or not same
    words = ", ".join(remedy.name for remedy in fitted.plan.remedies)
    said += f"{peak / budget:.3f} | {worst:.0e}{'' if same else ' BUFFERS'} | {ratio:.2f}x | {planned:.1f} | {words}"
    return {"plain": most / 2**20, "said": said + (" **BAD**" if bad else ""), "bad": int(bad)}


def held(step: Any, model: Any, optimizer: Any, batch: Any) -> int:
    """Most bytes that a step holds."""
    import torch

    from outsize.model.torch_port.dispatch import leaves_of, profiled_bytes

    there = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    there += [v for state in optimizer.state.values() for v in state.values()] + leaves_of(batch)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there if isinstance(t, torch.Tensor)
    }
    now = most = sum(storages.values())
    for change in profiled_bytes(step)[0]:
        now += change if abs(change) != 5056 else 0  # the state of a generator
        most = max(most, now)
    return most


def gradients(model: Any, optimizer: Any) -> list[Any]:
    """Those of the first step: SGD's momentum begins with them."""
    return [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters() if p in optimizer.state]


def quickest(*steps: Any) -> list[float]:
    """Seconds of the processor of each in the best of five rounds, in turn: the machine's other work is the same for all."""
    best = [float("inf")] * len(steps)
    for _ in range(5):
        for number, step in enumerate(steps):
            began = time.process_time()
            step()
            best[number] = min(best[number], time.process_time() - began)
    return best


if __name__ == "__main__":
    raise SystemExit(main())
