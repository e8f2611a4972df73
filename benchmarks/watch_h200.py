"""Watching on a card: what it costs a GPT-2's steps, and whose memory on the card grows.

    python benchmarks/watch_h200.py [overhead] [leaks]

Overhead: AMP and AdamW steps of GPT-2 small, 16x512, stretches with and without a watch in turns: the ratio of the medians;
the processor time that `outsize watch PID` takes beside it, and what each of its parts takes. Leaks: programs whose tensors
lie on the card, the line that leaks is marked, and the card must be what is said first; and programs that only look like it,
which must stay silent. Each runs in a process of its own. Needs CUDA."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

HEAD = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def batch(rows=256):
    return torch.randn(rows, 1024, device="cuda"), torch.randint(0, 10, (rows,), device="cuda")
def train(x, y, **more):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward(**more)
    optimizer.step()
    return loss
"""

LEAKS = {
    "losses with graphs": """
losses = []
for step in range(STEPS):
    losses.append(train(*batch(), retain_graph=True))  # LEAK
    pause()
""",
    "a running sum with its graph": """
total = 0.0
for step in range(STEPS):
    loss = train(*batch(), retain_graph=True)
    total = total + loss  # LEAK
    pause()
""",
    "predictions in a list": """
outputs = []
for step in range(STEPS):
    x, y = batch()
    train(x, y)
    with torch.no_grad():
        outputs.append(model[0](x))  # LEAK
    pause()
""",
    "an attribute": """
class Trainer:
    def __init__(self):
        self.seen = {}
    def run(self, step):
        x, y = batch()
        train(x, y)
        self.seen[step] = x  # LEAK
trainer = Trainer()
for step in range(STEPS):
    trainer.run(step)
    pause()
""",
    "a hook that keeps activations": """
kept = []
def keep(module, inputs, output):
    kept.append(output.detach())  # LEAK
model[0].register_forward_hook(keep)
for step in range(STEPS):
    train(*batch())
    pause()
""",
    "pools of CUDA graphs": """
graphs = []
x = torch.randn(512, 1024, device="cuda")
train(*batch())
for step in range(STEPS):
    train(*batch())
    if step % 2 == 0:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model[0](x)
        graphs.append((graph, y))  # LEAK
    pause()
""",
    "a state that is never detached": """
cell = torch.nn.GRUCell(1024, 1024).cuda()
hidden = torch.zeros(64, 1024, device="cuda")
for step in range(STEPS):
    train(*batch())
    hidden = cell(batch(64)[0], hidden)  # LEAK
    pause()
""",
    "page-locked copies": """
copies = []
for step in range(STEPS):
    x, y = batch()
    train(x, y)
    copies.append(x.cpu().pin_memory())  # LEAK
    pause()
""",
}

CLEAN = {
    "warm-up": """
workspace = []
for step in range(STEPS):
    if step < 10:
        workspace.append(torch.empty(4 << 20, device="cuda"))
    train(*batch())
    pause()
""",
    "batches of many sizes": """
import random
random.seed(0)
for step in range(STEPS):
    train(*batch(random.randrange(16, 2048)))
    pause()
""",
    "gradient accumulation": """
for step in range(STEPS):
    x, y = batch()
    torch.nn.functional.cross_entropy(model(x), y).div(4).backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    pause()
""",
    "evaluation phases": """
for step in range(STEPS):
    train(*batch())
    if step % 40 == 39:
        with torch.no_grad():
            outputs = [model(batch(1024)[0]) for _ in range(20)]
            torch.cat(outputs).mean().item()
            del outputs
    pause()
""",
    "a ring of old batches": """
import collections
ring = collections.deque(maxlen=16)
for step in range(STEPS):
    x, y = batch()
    ring.append(x)
    train(x, y)
    pause()
""",
    "an optimizer with state": """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(STEPS):
    train(*batch())
    pause()
""",
}

STEPS = 1500


def run_program(name: str) -> None:
    """One program under a watch, in this process; its findings as a line of JSON."""
    import outsize

    code = textwrap.dedent(HEAD + (LEAKS | CLEAN)[name]).strip() + "\n"
    line = next((number for number, text in enumerate(code.splitlines(), 1) if "# LEAK" in text), None)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.py"
        path.write_text(code)
        with outsize.watch() as w:
            runpy.run_path(str(path), {"STEPS": STEPS, "pause": lambda: time.sleep(0.01)}, run_name="__main__")
            time.sleep(1.0)
            found = w.leaks()
        rows = [finding.to_dict() for finding in found]
    where = [(row["where"] or "").rpartition(":")[2] for row in rows]
    right = str(line) in where[:1] if line else not rows
    if line and name != "page-locked copies":  # what is said first is what grows most: the card
        right = right and rows[0]["device"] == "cuda:0" and "on cuda:0" in rows[0]["text"]
    row = {
        "program": name,
        "line": line,
        "right": right,
        "said": [(row["kind"], row["where"], row["name"], row["device"]) for row in rows],
        "text": rows[0]["text"] if rows else "",
        "notes": list(w.notes),
        "peak MiB": max((one.requested or 0) for reading in w.readings for one in reading.allocators or ()) >> 20
        if any(reading.allocators for reading in w.readings)
        else None,
    }
    print(json.dumps(row), flush=True)


def tell(name: str) -> str:
    """What a program in a process of its own said last."""
    command = [sys.executable, __file__, "--program", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return json.dumps({"program": name, "error": "took more than 120 s"})
    return (done.stdout.strip().splitlines()[-1:] or [json.dumps({"program": name, "error": done.stderr[-600:]})])[0]


def leaks() -> None:
    """Seven programs at a time: what is found does not depend on the clock."""
    right = 0
    with ThreadPoolExecutor(7) as crew:
        for said in crew.map(tell, LEAKS | CLEAN):
            print(said, flush=True)
            right += bool(json.loads(said).get("right"))
    print(f"leaks: {right} of {len(LEAKS | CLEAN)} right", flush=True)


def processor_seconds(pid: int) -> float:
    """What all threads of a process have taken so far."""
    threads = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def watcher(meanwhile, parts: bool = False) -> tuple[float, dict[str, str], float]:
    """(share of a processor, processor time by part, samples a second) of a watcher beside this process, from its second to
    its twelfth second: its start is left out. Parts are timed in a watcher of their own, since that takes time too."""
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "run.watch"
        program = [sys.executable, __file__, "--parts"] if parts else [sys.executable, "-m", "outsize"]
        words = ["watch", "--record", str(record), "--for", "15s", str(os.getpid())]
        child = subprocess.Popen([*program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not (record.exists() and '{"sample"' in record.read_text()) and child.poll() is None:
            time.sleep(0.1)
        counts = []
        for seconds in (2, 10):
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                meanwhile()
            samples = record.read_text().count('{"sample"')
            counts.append((time.perf_counter(), processor_seconds(child.pid), samples))
        said = child.communicate(timeout=60)[1].strip().splitlines()
    (began, before, first), (ended, after, last) = counts
    share, rate = (after - before) / (ended - began), (last - first) / (ended - began)
    return share, json.loads(said[-1]) if parts else {}, round(rate, 1)


def run_parts(words: list[str]) -> None:
    """A watcher that tells in the end what each of its parts took: calls, and milliseconds in all and each."""
    from outsize.cli import main, watch
    from outsize.monitor import gpus, outside, recorder, sampler
    from outsize.monitor.processes import follower

    taken: dict[str, list[float]] = {}

    def time_calls(owner, name: str) -> None:
        function, key = getattr(owner, name), f"{getattr(owner, '__name__', '')}.{name}"

        def timed(*given, **named):
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                taken.setdefault(key, []).append(time.thread_time() - began)

        setattr(owner, name, timed)

    try:
        import pynvml

        for name in ("MemoryInfo", "UtilizationRates", "ComputeRunningProcesses", "GraphicsRunningProcesses"):
            time_calls(pynvml, f"nvmlDeviceGet{name}")
    except ImportError:
        taken["no pynvml"] = [0.0]
    for owner, names in (
        (outside.Outside, ("read", "_read_publications")), (outside, ("host_full_in",)), (recorder, ("encode",)),
        (recorder.Recorder, ("_write",)), (watch, ("draw_line", "_say_the_end")), (gpus.Gpus, ("read",)),
        (sampler.Sampler, ("read", "_read_limits", "_read_private")), (follower.TreeFollower, ("read", "_find_all")),
    ):  # fmt: skip
        for name in names:
            time_calls(owner, name)
    main(words)
    rows = sorted(taken.items(), key=lambda row: -sum(row[1]))
    table = {
        name: f"{len(each)} calls, {sum(each) * 1e3:.2f}, median {statistics.median(each) * 1e3:.3f}, most {max(each) * 1e3:.2f}"
        for name, each in rows
    }
    table["whole process, its start too"] = f"{time.process_time() * 1e3:.0f}"
    print(json.dumps(table), file=sys.stderr, flush=True)


def overhead() -> None:
    """GPT-2 steps with and without a watch, in turns; and with a watcher beside the process."""
    import torch
    import transformers

    import outsize

    config = transformers.GPT2Config(use_cache=False)
    model = transformers.GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, config.vocab_size, (16, 512), device="cuda")

    def stretch(count: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        wall, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - wall) / count, (time.process_time() - used) / count

    stretch(20)
    plain, watched, beside = [], [], []
    for _ in range(6):
        plain.append(stretch(50))
        with outsize.watch() as w:
            stretch(5)
            began, before = time.perf_counter(), len(w.readings)
            watched.append(stretch(50))
            rate = (len(w.readings) - before) / (time.perf_counter() - began)
        assert w.leaks() == (), w.leaks()
    share, _, samples = watcher(lambda: beside.append(stretch(10)))
    parts = watcher(lambda: stretch(10), parts=True)[1]
    median = lambda rows, at: statistics.median(row[at] for row in rows)  # noqa: E731
    print(
        json.dumps(
            {
                "plain ms": [round(row[0] * 1e3, 2) for row in plain],
                "watched ms": [round(row[0] * 1e3, 2) for row in watched],
                "watched / plain": round(median(watched, 0) / median(plain, 0), 4),
                "processor time, watched / plain": round(median(watched, 1) / median(plain, 1), 4),
                "samples a second": round(rate, 1),
                "watched from outside / plain": round(median(beside, 0) / median(plain, 0), 4),
                "watcher, share of a processor": round(share, 4),
                "watcher, samples a second": samples,
                "watcher by parts, ms": parts,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--program"]:
        run_program(words[1])
    elif words[:1] == ["--parts"]:
        run_parts(words[1:])
    else:
        for part in words or ("overhead", "leaks"):
            {"overhead": overhead, "leaks": leaks}[part]()
