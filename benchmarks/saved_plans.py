"""Plans that are saved by one process and taken by another, for the steps of `twelve_steps.py`, on the CPU.

    python benchmarks/saved_plans.py                           # a table
    python benchmarks/saved_plans.py --only VAE --part 0.3

Each row is two fresh processes. The first plans and saves; the second takes the plan, and trains a step beside a plain one.
`first` and `again` are seconds of the processor in `outsize.fit`; `said` is whether both say the same bytes; `held` the peak of
the second step over what the plan says, by the events of torch's allocator; `grad` as in `twelve_steps.py`.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--part", type=float, default=0.5, help="of what the plain step holds")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.one[0], given.part, pathlib.Path(given.one[1]))))
        return 0
    import step_models as models

    print(
        "| step | first s | again s | again / first | said | held | grad | remedies |\n|---|---|---|---|---|---|---|---|"
    )
    bad, shares = 0, []
    for name in {**models.TWELVE, **models.BLIND}:
        if given.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--part", str(given.part), "--one", name, f"{folder}/plan.json"]
            rows: list[dict[str, Any]] = []
            for _ in range(2):
                done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
                if done.returncode:
                    print(f"| {name} | error: {done.stderr.strip().splitlines()[-1][:200]} |", flush=True)
                    bad += 1
                    break
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        if len(rows) < 2:
            continue
        first, again = rows
        same = (first["choice"], first["steps"]) == (again["choice"], again["steps"])
        wrong = not same or again["held"] > 1 or again["worst"] > 1e-3
        bad += wrong
        shares.append(again["took"] / first["took"])
        said = "the same" if same else "OTHER"
        print(
            f"| {name} | {first['took']:.2f} | {again['took']:.2f} | {shares[-1]:.0%} | {said} | {again['held']:.3f} | "
            f"{again['worst']:.0e} | {again['remedies']}{' **BAD**' if wrong else ''} |",
            flush=True,
        )
    print(
        f"{bad} bad; the second takes {sorted(shares)[len(shares) // 2]:.1%} of the first's time at the median"
        if shares
        else bad
    )
    return int(bad > 0)


def run(name: str, part: float, path: pathlib.Path) -> dict[str, Any]:
    """Plan and save, or take what was saved."""
    import step_models as models
    import torch
    import twelve_steps

    import outsize

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss, batch = {**models.TWELVE, **models.BLIND}[name]()
    model.train()
    plain = copy.deepcopy(model)
    own, other = (torch.optim.SGD(m.parameters(), twelve_steps.RATE, momentum=0.9) for m in (model, plain))
    little = torch.nn.Linear(2, 2)  # imports are nobody's planning
    outsize.fit(
        little, lambda m, b: m(b).sum(), torch.optim.SGD(little.parameters(), 0.1), torch.ones(4, 2), budget="1GiB"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.exists():
            began = time.process_time()
            fitted = outsize.fit(model, loss, own, batch, plan=path)
            took = time.process_time() - began
        else:
            peak = outsize.fit(model, loss, own, batch, budget="1TiB", dry_run=True).plan.plain
            began = time.process_time()
            try:
                fitted = outsize.fit(model, loss, own, batch, budget=int(part * peak))
            except outsize.BudgetError as error:
                began = time.process_time()
                fitted = outsize.fit(model, loss, own, batch, budget=error.smallest)
            took = time.process_time() - began
            fitted.plan.save(path)
        said = {step.name: step.peak(fitted.plan.pool) for step in fitted.plan.steps}
        torch.manual_seed(1)
        fitted.step(batch)
        fitted.gather()
        got = twelve_steps.gradients(model, own)
        fitted.step(batch)  # what was gathered leaves again
        held = twelve_steps.held(lambda: fitted.step(batch), model, own, batch) / fitted.plan.peak()
    torch.manual_seed(1)
    loss(plain, batch).backward()
    other.step()
    wanted = twelve_steps.gradients(plain, other)
    floor = 1e-3 * max(float(w.abs().max()) for w in wanted)
    worst = max(float((g - w).abs().max() / w.abs().max().clamp_min(floor)) for g, w in zip(got, wanted, strict=True))
    return {
        "took": took, "choice": str(fitted.choice), "steps": said, "held": held, "worst": worst,
        "remedies": ", ".join(remedy.name for remedy in fitted.plan.remedies),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
