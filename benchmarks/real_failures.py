"""Out-of-memory failures of a host, made for real and explained.

    python benchmarks/real_failures.py [--tensorflow PYTHON] [result.txt]

Each case is a small program run unchanged under `outsize run`; its cause must be the one we built, and what the case is
about must be in the report. TensorFlow and JAX run with the Python given (they may live in another environment). The kill by
a control group and the full `/dev/shm` need root; where they cannot be made the case is skipped and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import cgroup


@dataclass
class Case:
    name: str
    script: str
    cause: str
    said: tuple[str, ...]
    """Texts that the report must hold."""
    python: str = sys.executable
    before: str = ""
    """Shell words put in front of the whole `outsize run`."""
    inside: str = ""
    """Shell line run before the program, in its own shell."""


NUMPY = "import numpy as np\nx = np.ones((3075200, 51200), dtype=np.float32)\n"
TORCH = "import torch\nx = torch.empty(10**12, dtype=torch.float64)\n"
BROADCAST = """
import numpy as np
predicted = np.zeros((3075200, 1), dtype=np.float32)
target = np.zeros(3075200, dtype=np.float32)
error = ((predicted - target) ** 2).mean()
"""
TENSORFLOW = "import tensorflow as tf\nx = tf.ones([3075200, 51200])\n"
JAX = "import jax.numpy as jnp\nx = jnp.ones((3075200, 51200))\nprint(x.sum())\n"
GROW = """
import time
import numpy as np

kept = []

def load(number):
    return np.ones(4 * 2**20)  # 32 MiB

def main():
    for number in range(1000):
        kept.append(load(number))
        time.sleep(0.02)

main()
"""
ULIMIT = "import numpy as np\nheld = np.ones(50_000_000)\nmore = np.ones((20000, 20000))\n"
SHM = """
import torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(3, 1024, 1024)

if __name__ == "__main__":
    for batch in DataLoader(Images(), batch_size=16, num_workers=2):
        pass
"""


def find_cases(tensorflow: str | None, group: cgroup.Group | None) -> list[Case]:
    cases = [
        Case(
            "numpy",
            NUMPY,
            "request larger than the machine",
            ("float32[3075200, 51200] is exactly 629,800,960,000 bytes",),
        ),
        Case("torch on the CPU", TORCH, "request larger than the machine", ("7.28 TiB",)),
        Case("broadcast", BROADCAST, "broadcast explosion", ("3,075,200", "ravel")),
        Case("ulimit -v", ULIMIT, "address space", ("ulimit -v", "unlimited"), inside="ulimit -v 3000000;"),
    ]
    if tensorflow:
        cases.insert(
            3,
            Case(
                "tensorflow on the CPU",
                TENSORFLOW,
                "request larger than the machine",
                ("629,800,960,000",),
                python=tensorflow,
            ),
        )
        cases.insert(
            4, Case("jax on the CPU", JAX, "request larger than the machine", ("586.55 GiB",), python=tensorflow)
        )
    if group:
        enter = f"echo $BASHPID > {group.procs};"
        cases.append(Case("control group", GROW, "limit", ("600.00 MiB", "in load", "at its peak"), before=enter))
    if os.geteuid() == 0:
        mount = "mount -t tmpfs -o size=32m tmpfs /dev/shm;"
        cases.append(
            Case(
                "full /dev/shm",
                SHM,
                "shared memory",
                ("/dev/shm is full", "32.00 MiB", "--shm-size"),
                before=f"MOUNT {mount}",
            )
        )
    return cases


def run_case(case: Case, folder: pathlib.Path) -> tuple[bool, str]:
    script = folder / ("run_" + case.name.replace(" ", "_").replace("/", "") + ".py")
    script.write_text(case.script)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    program = f"{case.python} {script}"
    if case.inside:
        program = f"bash -c '{case.inside} exec {program}'"
    line = f"{sys.executable} -m outsize run --report {report} {program}"
    if case.before.startswith("MOUNT "):
        shell = ["unshare", "-m", "bash", "-c", f"{case.before.removeprefix('MOUNT ')} exec {line}"]
    else:
        shell = ["bash", "-c", f"{case.before} exec {line}"]
    answer = subprocess.run(shell, capture_output=True, text=True, timeout=300)
    found = json.loads(report.read_text())["cause"]["name"] if report.exists() else None
    screen = answer.stderr.partition("outsize: why memory ran out")[2].strip("\n")
    plain = " ".join(screen.split())
    missing = [text for text in case.said if text not in plain]
    right = found == case.cause and not missing and answer.returncode != 0
    lines = [f"{'ok ' if right else 'BAD'} {case.name}: {found} (exit status {answer.returncode})"]
    lines += [f"    expected {case.cause}; missing {missing}\n{answer.stderr[-3000:]}"] if not right else [screen]
    return right, "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def hide_paths(text: str) -> str:
    """The report without folders of the machine it was made on."""
    for folder, name in (
        (str(pathlib.Path(os.__file__).parent), "/python/lib"),
        (sys.prefix, "/env"),
        (tempfile.gettempdir(), "/tmp"),
    ):
        text = text.replace(folder, name)
    return re.sub(r"/tmp/tmp\w+/", "/tmp/", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has tensorflow and jax")
    parser.add_argument("result", nargs="?")
    args = parser.parse_args()
    pieces, right = [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        group = None
        with contextlib.suppress(cgroup.Unavailable):
            group = stack.enter_context(cgroup.limited(600 * 2**20))
        cases = find_cases(args.tensorflow, group)
        for case in cases:
            ok, text = run_case(case, pathlib.Path(folder))
            right += ok
            pieces.append(text)
            print(text, "", sep="\n", flush=True)
    last = f"{time.strftime('%Y-%m-%d')}: {right} of {len(cases)} real failures explained right"
    print(last)
    if args.result:
        pathlib.Path(args.result).write_text(hide_paths("\n\n".join([*pieces, last])) + "\n")
    return 0 if right == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
