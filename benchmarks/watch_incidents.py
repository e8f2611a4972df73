"""Growing programs under a real memory limit, and every trouble a watch can meet: what `outsize watch` says, and when.

    python benchmarks/watch_incidents.py [growing] [troubles]

`growing`: programs that grow run under `outsize watch --record` in a control group of 300 MiB until the kernel kills them.
The middle of each "full in" that a line said, to the very end, is compared with the time that was really left; the recording on
disk must name the culprit. `troubles`: a tree of a thousand processes, a process that ends in the
middle, a full disk (a small tmpfs), a process of another user. Needs root."""

from __future__ import annotations

import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import cgroup  # noqa: E402

from outsize.monitor.recorder import load  # noqa: E402

LIMIT = 300 * 2**20
GROWING = {
    "a line": """
import time
kept = []
def work():
    kept.append(bytearray(700_000))  # LEAK
while True:
    work()
    time.sleep(0.05)
""",
    "steps": """
import time
kept = {}
def checkpoint(number):
    kept[number] = bytearray(18 << 20)  # LEAK
number = 0
while True:
    number += 1
    time.sleep(0.05)
    if number % 25 == 0:
        checkpoint(number)
""",
    "a line with peaks": """
import random, time
rng = random.Random(0)
class Run:
    def __init__(self):
        self.outputs = []
run = Run()
def work():
    run.outputs.append(bytearray(600_000))  # LEAK
    scratch = b"x" * rng.randrange(6 << 20)
    time.sleep(0.05)
while True:
    work()
""",
    "a saw on a rising floor": """
import time
kept, batch = [], []
def work(number):
    batch.append(bytearray(1_500_000))
    if number % 20 == 0:
        batch.clear()
        kept.append(bytearray(9_000_000))  # LEAK
for number in range(10**6):
    work(number)
    time.sleep(0.05)
""",
    "faster and faster": """
import time
kept = []
def work(number):
    kept.append(bytearray(2500 * number))  # LEAK
for number in range(10**6):
    work(number)
    time.sleep(0.05)
""",
    "slower and slower": """
import time
kept = []
def work(number):
    kept.append(bytearray(int(9_000_000 / (number + 4) ** 0.5)))  # LEAK
for number in range(10**6):
    work(number)
    time.sleep(0.05)
""",
    "an array appended by copies": """
import time
kept = bytearray()
def work():
    global kept
    kept = kept + bytes(400_000)  # LEAK
while True:
    work()
    time.sleep(0.05)
""",
    "epochs with rests": """
import time
seen = {}
def train(number):
    seen[number] = bytearray(900_000)  # LEAK
number = 0
while True:
    for _ in range(20):
        number += 1
        train(number)
        time.sleep(0.05)
    time.sleep(0.8)
""",
    "uneven steps": """
import random, time
rng = random.Random(4)
kept = []
def work():
    kept.append(bytearray(rng.randrange(18 << 20)))  # LEAK
while True:
    work()
    time.sleep(rng.expovariate(1.2))
""",
}


def grow(name: str, code: str) -> None:
    line = next(number for number, text in enumerate(code.strip().splitlines(), 1) if "# LEAK" in text)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "grow.py").write_text(code.strip() + "\n")
        command = [sys.executable, "-m", "outsize", "watch", "--every", "1s", "--record", "run.watch", "--", "grow.py"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        outcome = cgroup.run(command, LIMIT, 240, cwd=folder, env=environment)
        recording = load(f"{folder}/run.watch")
    end = recording.samples[-1].time
    said = re.findall(
        r"^ *([0-9.]+) s  held[^:]*?full in ([0-9.]+) (?:to ([0-9.]+) )?(s|min)", outcome.stderr, re.MULTILINE
    )
    scale = {"s": 1.0, "min": 60.0}
    told = [
        (float(at), (float(low) + float(high or low)) / 2 * scale[unit], end - float(at), high)
        for at, low, high, unit in said
        if float(at) < end
    ]
    errors = [abs(middle - left) / left for _, middle, left, _ in told]
    if "-v" in sys.argv:
        print([(at, round(middle, 1), round(left, 1)) for at, middle, left, _ in told])
    warned = next((note.time for note in recording.notes if "full in" in note.text), None)
    culprit = recording.findings[0] if recording.findings else None
    found = f"{culprit.name} {culprit.where}, {end - culprit.time:.0f} s before the end" if culprit else "nobody"
    typical = f"{statistics.median(errors):.0%}, worst {max(errors):.0%}" if errors else "-"
    within = f"{sum(error <= 0.2 for error in errors)} of {len(errors)}"
    first = f"{told[0][2]:.0f} s before the end" if told else "never"
    before = f"{end - warned:.0f} s before the end" if warned is not None else "never"
    cells = (
        name,
        f"{'killed' if outcome.killed else outcome.status} after {end:.0f} s",
        within,
        typical,
        first,
        before,
        f"{found} (marked {line})",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def troubles() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fork = "import os, time\nfor _ in range(1000):\n    if os.fork() == 0: time.sleep(60); os._exit(0)\ntime.sleep(60)\n"
        many = subprocess.Popen([sys.executable, "-c", fork], start_new_session=True)
        time.sleep(8)
        show("a tree of 1,000 processes", ["--for", "12s", "--every", "4s", str(many.pid)], folder)
        os.killpg(many.pid, 9)
        many.wait()
        short = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"])
        show("a process that ends in the middle", ["--for", "9s", str(short.pid)], folder, reap=short)
        other = subprocess.Popen(["setpriv", "--reuid", "65534", "--clear-groups", "sleep", "30"])
        user = ("setpriv", "--reuid", "65533", "--clear-groups")
        show("a process of another user, without permission", ["--for", "3s", str(other.pid)], "/", before=user)
        other.kill()
        other.wait()
        full = pathlib.Path(folder) / "full"
        full.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(full)], check=True)
        try:
            show(
                "a full disk",
                ["--for", "5s", "--every", "2s", "--record", str(full / "run.watch"), str(os.getpid())],
                folder,
            )
            kept = load(full / "run.watch")
            print(f"    {len(kept.samples)} whole samples on the full disk, complete: {kept.complete}")
        finally:
            subprocess.run(["umount", str(full)], check=True)
        show("no process", ["999999999"], folder)


def show(
    title: str, words: list[str], folder: str, before: tuple[str, ...] = (), reap: subprocess.Popen[bytes] | None = None
) -> None:
    began = time.monotonic()
    command = [*before, sys.executable, "-m", "outsize", "watch", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if reap is not None:
        reap.wait()
    text, _ = process.communicate()
    lines = [line for line in text.splitlines() if line.startswith(("outsize:", "Traceback", "- "))]
    said = "; ".join(dict.fromkeys(lines)) or "no line"
    print(f"{title}: exit {process.returncode} after {time.monotonic() - began:.0f} s, {said}", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["growing", "troubles"]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    if "growing" in chosen:
        print(
            "| program | end | within 20 % | error, median | first said | warned | culprit in the recording |\n"
            "|---|---|---|---|---|---|---|"
        )
        for name, code in GROWING.items():
            grow(name, code)
    if "troubles" in chosen:
        troubles()
