"""Compiled steps on a card: what estimate says of them, what fit holds, and what torch's own settings hold and take.

    python benchmarks/compiled_h200.py --out DIR                                        # everything
    python benchmarks/compiled_h200.py --out DIR --models gpt2 --parts 0.5,0.25 --ways eager,estimate,compile,fit_compiled
    python benchmarks/compiled_h200.py --out DIR --tiny --models gpt2                    # small models, to try the script out

Each case runs in a fresh process with a time limit. Several compile at once and share torch's caches; while one is timed, all
others are stopped. Budgets are parts of what the plain eager step reserves, and torch's allocator stops there. Out: a line of
JSON a case, as it ends: seconds of a step (the best of five after two), seconds until then (`before`: building, planning,
compiling), and bytes reserved in all steps, the first with its compilation too. Without a card the CPU takes its place: bytes
are then those of its allocator's events in one step, and nothing stops at a budget.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from fit_h200 import Card
from fit_models import MODELS, build

PARTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15)
WAYS = ("eager", "estimate", "estimate_without_card", "compile", "fit", "fit_compiled")
ACTIVATIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Settings of `activation_memory_budget` that are tried."""

BACKEND = "inductor"


def device():
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Trial:
    """One case, in a process of its own."""

    def __init__(self, case):
        self.case = case
        self.began = time.perf_counter()
        self.device = device()
        self.card = Card(pathlib.Path(case["out"]), self.device, quiet=True)

    def say(self, **what):
        """A line that the parent keeps, whatever happens later."""
        shown = {key: value for key, value in self.case.items() if key != "out"}
        print(json.dumps({**shown, **what}), flush=True)

    def lower(self):
        import torch

        return torch.autocast(self.device, dtype=torch.bfloat16)

    def time(self, step):
        """Two steps beside others, five without them."""
        self.watch()
        for _ in range(2):
            held = self.one(step)
        before = time.perf_counter() - self.began
        self.card.take()
        try:
            took = []
            for _ in range(5):
                self.card.settle()
                begin = time.perf_counter()
                step()
                self.card.settle()
                took.append(time.perf_counter() - begin)
            held = held if self.device == "cpu" else self.card.peaks()["reserved"]
        finally:
            self.card.give()
        return {"seconds": min(took), "held": held, "before": round(before, 1)}

    def watch(self):
        if self.device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()

    def one(self, step):
        """A step; on the CPU its peak beside what was there before it."""
        if self.device == "cuda":
            step()
            return 0
        from outsize.model.torch_port.dispatch import profiled_bytes

        now = most = 0
        for change in profiled_bytes(step)[0]:
            now += change
            most = max(most, now)
        return self.there + most

    def run(self):
        import torch

        import outsize

        case = self.case
        torch.set_float32_matmul_precision("highest")
        if case["way"].startswith("estimate"):
            self.say(**self.estimate())
            return
        model, loss, batch = build(case["model"], self.device, case["tiny"])
        self.there = sum(t.nbytes for t in [*model.parameters(), *batch.values()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.card.limit(case["budget"])
        if case["way"] in ("compile", "fit_compiled"):
            model = torch.compile(model, backend=BACKEND)
        if case["way"].startswith("fit"):
            with self.lower():
                begin = time.perf_counter()
                fitted = outsize.fit(model, loss, optimizer, batch, budget=case["budget"])
                projected = fitted.plan.peak(fitted.plan.pool)
                said = {"planning": round(time.perf_counter() - begin, 1), "projected": projected}
                said["remedies"] = [remedy.how for remedy in fitted.plan.remedies]
                self.say(planned=True, **said)
                found = self.time(lambda: fitted.step(batch))
            self.say(**found, **said, inside=found["held"] <= projected <= case["budget"])
            return
        from torch._functorch import config

        step = self.plain(model, loss, optimizer, batch)
        part = config.patch(activation_memory_budget=case["activations"]) if "activations" in case else None
        with part or contextlib.nullcontext():
            self.say(**self.time(step))

    def plain(self, model, loss, optimizer, batch):
        """The step as people write it."""

        def step():
            optimizer.zero_grad(set_to_none=True)
            with self.lower():
                value = loss(model, batch)
            value.backward()
            optimizer.step()

        return step

    def estimate(self):
        """What the compiled step is said to take on the card; `_without_card`: the card is hidden from the process."""
        import torch

        import outsize

        def made():
            model, loss, batch = build(self.case["model"], "cuda", self.case["tiny"])
            return torch.compile(model), loss, torch.optim.AdamW(model.parameters(), lr=1e-4), batch

        def step(model, loss, optimizer, batch):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                value = loss(model, batch)
            value.backward()
            optimizer.step()

        footprint = outsize.estimate(step, build=made, device="cuda")
        return {
            "likely": footprint.peak_reserved.bytes, "bound": footprint.peak_reserved.bound, "notes": footprint.notes,
            "before": round(time.perf_counter() - self.began, 1),
        }  # fmt: skip


class Trials:
    """The cases of a call, so many at once."""

    def __init__(self, given):
        self.given = given
        self.out = pathlib.Path(given.out)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "rows.jsonl").touch()
        self.crowd = Card(self.out, "cpu")
        self.deadline = time.monotonic() + given.total
        self.writing = threading.Lock()

    def write(self, row):
        with self.writing:
            line = json.dumps(row)
            print(line, flush=True)
            with (self.out / "rows.jsonl").open("a") as file:
                file.write(line + "\n")

    def fresh(self, case):
        """The case in a process of its own, ended with all that it started when its time is over."""
        seconds = min(self.given.seconds, self.deadline - time.monotonic())
        row = {key: value for key, value in case.items() if key != "out"}
        if seconds < 5:
            row["failed"] = "not run: the time was over"
        else:
            row.update(self.outcome(case, seconds))
        self.write(row)
        return row

    def outcome(self, case, seconds):
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if case["way"] == "estimate_without_card" else {}
        cache = str(self.out.resolve() / "cache")
        process = subprocess.Popen(
            [sys.executable, __file__, "--case", json.dumps(case)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, **hidden},
        )  # fmt: skip
        if not hidden:
            (self.crowd.crowd / str(process.pid)).touch()  # it may be stopped from now on
        late = ""
        try:
            said, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, errors = process.communicate()
            late = f"its time was over after {seconds:.0f} s"
        (self.crowd.crowd / str(process.pid)).unlink(missing_ok=True)
        if process.returncode:  # it may have ended with all others stopped
            self.crowd.tell(signal.SIGCONT)
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        found = rows[-1] if rows else {}
        if process.returncode:
            found["failed"] = late or (errors.strip().splitlines() or ["killed"])[-1][:300]
        return found

    def model(self, name, pool):
        """The cases of a model; what stands on the budget waits for the eager step."""
        given = self.given
        base = {"model": name, "tiny": given.tiny, "budget": None, "out": given.out}
        eager = pool.submit(self.fresh, {**base, "way": "eager"})
        cases = [pool.submit(self.fresh, {**base, "way": way}) for way in given.ways if way.startswith("estimate")]
        reserved = eager.result().get("held")
        for part in given.parts if reserved else ():
            ways = [way for way in ("fit_compiled", "fit") if way in given.ways]
            budgeted = {**base, "budget": int(part * reserved), "part": part}
            cases += [pool.submit(self.fresh, {**budgeted, "way": way}) for way in ways]
        for part in given.activations if "compile" in given.ways else ():
            cases.append(pool.submit(self.fresh, {**base, "way": "compile", "activations": part}))
        concurrent.futures.wait(cases)

    def run(self):
        with concurrent.futures.ThreadPoolExecutor(self.given.processes) as pool:
            for name in self.given.models:
                self.model(name, pool)


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def some(kind, text):
        return [kind(word) for word in text.split(",")]

    words.add_argument("--out", default="compiled_h200")
    words.add_argument("--models", type=lambda text: some(str, text), default=list(MODELS))
    words.add_argument("--ways", type=lambda text: some(str, text), default=list(WAYS))
    words.add_argument("--parts", type=lambda text: some(float, text), default=list(PARTS))
    words.add_argument("--activations", type=lambda text: some(float, text), default=list(ACTIVATIONS))
    words.add_argument("--seconds", type=float, default=240.0, help="no case takes longer")
    words.add_argument("--total", type=float, default=3600.0, help="all of it takes no longer")
    words.add_argument("--processes", type=int, default=6, help="so many cases at once")
    words.add_argument("--tiny", action="store_true")
    words.add_argument("--case", help=argparse.SUPPRESS)
    given = words.parse_args()
    unknown = [way for way in given.ways if way not in WAYS]
    if unknown:
        words.error(f"unknown: {', '.join(unknown)}; one of {', '.join(WAYS)}")
    Trial(json.loads(given.case)).run() if given.case else Trials(given).run()


if __name__ == "__main__":
    main()
