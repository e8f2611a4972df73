"""The twelve at real sizes on a card, whose memory is limited to the budget so that passing it fails.

    python benchmarks/twelve_steps.py --card --out DIR
    python benchmarks/twelve_steps.py --table DIR/rows.jsonl

A process a plain step, and one a row. The card is one process's at a time; others plan meanwhile, and are stopped while steps
are timed. `plain` is what the plain step reserves (AdamW, the fourth step), the budget a part of that. `held` is the highest
`max_memory_reserved` of ten fitted steps, over the budget; `handed out` the same of `max_memory_allocated`. `time` is the best of
five fitted steps over the best of five plain ones, timed in the plain step's process and again in the row's, after it. `host` is
the part of a fitted step's seconds that Python and launches take: 1.0 where the card waits for them. `grad` is the largest
relative difference of a parameter's gradient (norms; of tiny ones to a thousandth of the largest), by deterministic kernels;
under AMP the second number is without it.
"""

from __future__ import annotations

import contextlib
import cProfile
import fcntl
import importlib
import io
import json
import os
import pathlib
import pstats
import signal
import time
import traceback
import warnings
from typing import Any


def run_all(given: Any) -> None:
    """Fork a process a row, so that libraries are loaded once."""
    import step_models as models
    import torch
    import transformers

    from outsize.model.fitting import binding, training  # noqa: F401

    for name in (
        "torch._dynamo", "torch._decomp", "torch._meta_registrations", "torch._refs", "torch._prims", "sympy",
        "torch.utils.checkpoint", "torch.fx.experimental.symbolic_shapes", "torch.utils.flop_counter", "torch.profiler",
    ):  # fmt: skip
        importlib.import_module(name)
    for name in (
        "BertForMaskedLM",
        "LlamaForCausalLM",
        "DeepseekV3ForCausalLM",
        "SwinForImageClassification",
        "Qwen2ForCausalLM",
    ):
        getattr(transformers, name)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    out = pathlib.Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    given.start = time.time()
    names = [name for name in models.TWELVE if given.only in name]
    names.sort(key=lambda name: (*(not name.startswith(first) for first in given.first), 0))
    left: list[tuple[str, float | None]] = [(name, part) for name in names for part in (None, *given.parts)]
    running: dict[int, tuple[str, float | None]] = {}
    crowd = _card(given)
    while left or running:
        while left and len(running) < given.processes:
            case = left.pop(0)
            pid = os.fork()
            if not pid:
                _work(*case, given)
                os._exit(0)
            running[pid] = case
        pid, status = os.wait()
        (crowd.crowd / str(pid)).unlink(missing_ok=True)
        if status:  # it may have been killed with the card in its hands
            crowd.tell(signal.SIGCONT)
        name, part = running.pop(pid)
        if part is None and not _plain_row(out, name):
            left = [case for case in left if case[0] != name]
    for name in ("card.lock", "card.turn"):
        (out / name).unlink(missing_ok=True)
    crowd.crowd.rmdir()
    print(table(out / "rows.jsonl"))


def _card(given: Any) -> Any:
    from fit_h200 import Card

    return Card(pathlib.Path(given.out), "cpu" if given.tiny else "cuda")


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _plain_row(out: pathlib.Path, name: str) -> dict[str, Any] | None:
    rows = (row for row in _rows(out / "rows.jsonl") if row["step"] == name and row["part"] is None)
    return next((row for row in rows if "seconds" in row), None)


def _work(name: str, part: float | None, given: Any) -> None:
    """A process's whole life: one row, printed and written as it ends."""
    from fit_h200 import lend_while_planning, time_parts

    out, row = pathlib.Path(given.out), {"step": name, "part": part}
    if time.time() - given.start > given.seconds:
        row["failed"] = "not run: the time was over"
    else:
        card = _card(given)
        lend_while_planning(card)
        parts = time_parts(card)
        card.join()
        try:
            row |= _Row(name, part, given, card, parts).run()
        except BaseException as error:
            text = str(error).splitlines() or [""]
            row |= {"failed": f"{type(error).__name__}: {text[0][:400]}", "trace": traceback.format_exc()[-3000:]}
        finally:
            card.leave()
    row["at"] = round(time.time() - given.start, 1)
    with (out / "rows.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")
    print(f"{row['at']:6.1f} s {_line(row, _plain_row(out, name) or {})}", flush=True)


class _Row:
    """One step: plain where `part` is None, else fitted into that part of what the plain one reserves."""

    def __init__(self, name: str, part: float | None, given: Any, card: Any, parts: dict[str, float]) -> None:
        self.name, self.part, self.given, self.card, self.parts = name, part, given, card, parts

    def run(self) -> dict[str, Any]:
        import step_models as models
        import torch

        torch.set_num_threads(2)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.card.wake()
        device, self.amp = self.card.device, self.name in models.AMP
        self.card.take()
        try:
            with self.card.shared():
                torch.manual_seed(0)
                with torch.device(device):
                    self.model, loss, self.batch = models.TWELVE[self.name](not self.given.tiny)
                self.model.to(device).train()

            def amp_loss(m: Any, b: Any) -> Any:
                with torch.autocast(device, dtype=torch.bfloat16, enabled=self.amp):
                    return loss(m, b)

            self.loss = amp_loss
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
            return self.plain() if self.part is None else self.fitted()
        finally:
            self.card.limit(None)
            self.card.give()

    def plain_step(self) -> None:
        self.loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain(self) -> dict[str, Any]:
        if self.given.tiny:
            import outsize

            fitted = outsize.fit(self.model, self.loss, self.optimizer, self.batch, budget="100GiB", dry_run=True)
            return {"reserved": fitted.plan.plain, "allocated": fitted.plan.plain, **self.clock(self.plain_step)}
        self.card.watch()
        for _ in range(3):
            self.plain_step()
        return {**self.clock(self.plain_step), **self.card.peaks()}

    def clock(self, step: Any) -> dict[str, Any]:
        """Seconds of the best of five steps; others are stopped meanwhile."""
        best, host = float("inf"), 0.0
        self.card.tell(signal.SIGSTOP)
        try:
            for _ in range(5):
                self.card.settle()
                began = time.perf_counter()
                step()
                given = time.perf_counter() - began
                self.card.settle()
                took = time.perf_counter() - began
                if took < best:
                    best, host = took, given / took
        finally:
            self.card.tell(signal.SIGCONT)
        return {"seconds": best, "host": round(host, 2)}

    def look(self, step: Any) -> dict[str, Any]:
        """Where the seconds of one more step go, on the card and in Python."""
        if not self.given.profile or self.given.tiny:
            return {}
        import torch
        from torch.profiler import ProfilerActivity, profile

        step()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            self.card.settle()
        sums: dict[str, list[float]] = {"kernels": [0, 0], "to host": [0, 0], "to card": [0, 0]}
        for event in seen.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                name = event.name()
                key = "to host" if "DtoH" in name else "to card" if "HtoD" in name else "kernels"
                sums[key][0] += 1
                sums[key][1] += event.duration_ns() / 1e6
        python = cProfile.Profile()
        python.enable()
        step()
        python.disable()
        self.card.settle()
        text = io.StringIO()
        pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(14)
        with (pathlib.Path(self.given.out) / "profiles.txt").open("a") as file:
            file.write(f"\n=== {self.name} {self.part}\n" + "\n".join(text.getvalue().splitlines()[4:]) + "\n")
        return {"device": {key: [int(count), round(ms, 1)] for key, (count, ms) in sums.items()}}

    def gradients(self, fitted: Any) -> list[Any]:
        """Of the whole batch, on the host, by deterministic kernels: of the plain step or as a fitted one makes them."""
        from dataclasses import replace

        import torch

        from outsize.model.fitting.learn.findings import preserved
        from outsize.model.fitting.learn.gradients_equal import collect

        wanted = [p for p in self.model.parameters() if p.requires_grad]
        torch.backends.cudnn.deterministic = True
        with preserved(self.model):
            torch.manual_seed(1)
            if fitted is None:
                self.loss(self.model, self.batch).backward()
                found = [None if p.grad is None else p.grad.detach().to("cpu", copy=True) for p in wanted]
                self.optimizer.zero_grad()
            else:
                runner = fitted._now
                choice = replace(fitted.choice, in_backward=False, state_away=False, gradients_away=True)
                kept = collect(runner.work, choice, self.batch, runner.weights.store)
                found = []
                for parameter in wanted:
                    gradient = kept.take(parameter)
                    self.card.settle()
                    found.append(None if gradient is None else gradient.detach().to("cpu", copy=True))
        torch.backends.cudnn.deterministic = False
        return found

    def both(self, fitted: Any) -> list[list[Any]]:
        """Gradients as they are computed, and under AMP without it as well."""
        found = [self.gradients(fitted)]
        if self.amp:
            self.amp = False
            found.append(self.gradients(fitted))
            self.amp = True
        self.card.clear()
        return found

    def fitted(self) -> dict[str, Any]:
        import outsize

        base = self.wait_for_plain()
        with self.card.shared():
            expected = self.both(None)
        budget, row = int(self.part * base["reserved"]), {}
        self.card.limit(budget)
        while True:
            self.card.watch()
            self.parts.clear()
            waited, began = self.card.waited, time.perf_counter()
            try:
                fitted = outsize.fit(self.model, self.loss, self.optimizer, self.batch, budget=budget)
                break
            except outsize.BudgetError as error:
                if "refused" in row or not error.smallest:
                    raise
                row["refused"] = round(error.smallest / base["reserved"], 3)
                budget = error.smallest
                self.card.limit(budget)
        row["planning"] = round(time.perf_counter() - began - (self.card.waited - waited), 2)
        plan = fitted.plan
        row |= {"parts": dict(self.parts), "budget": budget, "projected": plan.peak(plan.budgets[0].pool)}
        row |= {
            "predicted": round(plan.slow_down, 3),
            "away": plan.away,
            "remedies": [remedy.name for remedy in plan.remedies],
        }
        with (pathlib.Path(self.given.out) / "plans.txt").open("a") as file:
            file.write(f"\n=== {self.name} {self.part} budget {budget}\n{plan}\n{str(fitted.choice)[:1500]}\n")
        self.card.limit(None)
        with self.card.shared():
            got = self.both(fitted)
            compared = [self.worst(a, b) for a, b in zip(got, expected, strict=True)]
            row |= {"grad": [c[0] for c in compared], "grad_of": [c[1] for c in compared]}
            del got, expected
        self.card.watch()
        self.card.limit(budget)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                fitted.step(self.batch)
            retries = self.card.peaks().get("retries", 0)
            row |= self.clock(lambda: fitted.step(self.batch))
            row |= self.card.peaks()
            row["retries"] = row.get("retries", 0) - retries
            row["notes"] = list(fitted.plan.notes)
            row["warned"] = [str(w.message)[:300] for w in caught]
            with self.card.shared():
                row |= self.look(lambda: fitted.step(self.batch))
            self.card.limit(None)
            with contextlib.suppress(Exception):
                fitted.undo()
        self.card.clear()
        self.plain_step()
        row["plain_again"] = self.clock(self.plain_step)["seconds"]
        return row

    def worst(self, got: list[Any], expected: list[Any]) -> tuple[float, str]:
        """The largest relative difference, and whose it is; of tiny gradients to a thousandth of the largest of all."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        floor = 1e-3 * max(float(e.norm()) for e in expected if e is not None)
        found = [(0.0, "")]
        for name, a, b in zip(names, got, expected, strict=True):
            if (a is None) != (b is None):
                found.append((float("inf"), name))
            elif a is not None:
                found.append((float((a - b).norm()) / max(float(b.norm()), floor), name))
        return max(found)

    def wait_for_plain(self) -> dict[str, Any]:
        with self.card.lent():
            while time.time() - self.given.start < self.given.seconds:
                row = _plain_row(pathlib.Path(self.given.out), self.name)
                if row:
                    return row
                time.sleep(0.1)
        raise TimeoutError("the plain step has not come")


def _line(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """A row of the table."""
    gib = 2**30
    if row["part"] is None:
        if "seconds" not in row:
            return f"| {row['step']} | plain | {row.get('failed')} |"
        ms = 1e3 * row["seconds"]
        return f"| {row['step']} | plain | {row['reserved'] / gib:.2f} GiB | | | {ms:.1f} ms | {row['host']:.2f} | | |"
    begun = f"| {row['step']} | {row['part']:.0%} |"
    if "seconds" not in row or not plain:
        return f"{begun} {row.get('failed', 'no plain step')} |"
    took = row["seconds"] / min(plain["seconds"], row["plain_again"])
    refused = f"refused, {row['refused']:.1%} would do: " if "refused" in row else ""
    held = f"{row['reserved'] / row['budget']:.3f}, {row['allocated'] / row['budget']:.3f}"
    grad = ", ".join(f"{g:.0e}" for g in row["grad"])
    bad = " **OVER**" if row["reserved"] > row["budget"] else ""
    return (
        f"{begun} {row['budget'] / gib:.2f} GiB | {refused}{held}{bad} | {grad} | **{took:.2f}x** | {row['host']:.2f} | "
        f"{row['planning']:.1f} | {', '.join(row['remedies'])} |"
    )


def table(path: Any) -> str:
    """All rows of a run."""
    rows = _rows(pathlib.Path(path))
    lines = ["| step | budget | GiB | held, handed out / budget | grad | time | host | plan s | remedies |"]
    lines.append("|---" * 9 + "|")
    order = {None: 0, **{part: 1 - part for part in {row["part"] for row in rows} - {None}}}
    for name in dict.fromkeys(row["step"] for row in rows):
        mine = sorted((row for row in rows if row["step"] == name), key=lambda row: order[row["part"]])
        plain = next((row for row in mine if row["part"] is None and "seconds" in row), {})
        lines += [_line(row, plain) for row in mine]
    return "\n".join(lines)
