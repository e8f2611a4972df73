"""Training scripts that others wrote, as they are: what `outsize estimate train.py` says, beside a real run.

In: `--root`, a folder in which each client of the table is checked out under its repository's name at the stated commit, and the
names of clients (all that are there). Their data sets are synthetic and made here. Out: a table. With `--real`, on a machine with
a card, each script also runs for real, as far as the estimate followed it, and the peaks of torch's allocator stand beside the
estimate.

    python benchmarks/clients.py --root clients --real nanogpt imagenet dcgan llama2c
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from outsize.core.errors import OutsizeError
from outsize.core.units import format_bytes
from outsize.model.scripts.start import estimate_script

RANDOM = np.random.default_rng(0)


def no_data(folder: Path) -> None:
    """The script makes its own."""


def tokens(*names: str, vocabulary: int) -> Callable[[Path], None]:
    """Files of random tokens of 16 bits."""

    def make(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            RANDOM.integers(0, vocabulary, 500_000, dtype=np.uint16).tofile(folder / name)

    return make


def digits(place: str) -> Callable[[Path], None]:
    """MNIST's four files with random pictures."""

    def write(path: Path, numbers: Any) -> None:
        head = struct.pack(">BBBB", 0, 0, 8, numbers.ndim) + struct.pack(f">{numbers.ndim}I", *numbers.shape)
        path.write_bytes(head + numbers.tobytes())

    def make(folder: Path) -> None:
        raw = folder / place / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", 6000), ("t10k", 2000)):
            write(raw / f"{name}-images-idx3-ubyte", RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8))
            write(raw / f"{name}-labels-idx1-ubyte", RANDOM.integers(0, 10, count, dtype=np.uint8))

    return make


def words(folder: Path) -> None:
    """A corpus of 33,000 different words, as many as WikiText-2 has."""
    place = folder / "word_language_model" / "data" / "wikitext-2"
    place.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 60_000), ("valid", 20_000), ("test", 20_000)):
        chosen = np.concatenate([np.arange(33_000), RANDOM.integers(0, 33_000, count)])
        (place / f"{name}.txt").write_text(
            "\n".join(" ".join(f"w{i}" for i in row) for row in np.array_split(chosen, 2000))
        )


def pictures_and_masks(folder: Path) -> None:
    """Photographs of the size that Carvana's have, and their masks."""
    from PIL import Image

    for name in ("imgs", "masks"):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
    for number in range(12):
        photograph = RANDOM.integers(0, 256, (1280, 1918, 3), dtype=np.uint8)
        Image.fromarray(photograph).save(folder / "data" / "imgs" / f"{number}.jpg")
        mask = (RANDOM.integers(0, 2, (1280, 1918)) * 255).astype(np.uint8)
        Image.fromarray(mask).save(folder / "data" / "masks" / f"{number}_mask.gif")


@dataclass(frozen=True, kw_only=True)
class Client:
    """One script."""

    repository: str
    commit: str
    script: str
    words: str = ""
    data: Callable[[Path], None] = no_data
    path: str = ""
    """A folder of the repository from which the script imports without being installed."""


CLIENTS = {
    "nanogpt": Client(
        repository="karpathy/nanoGPT", commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291", script="train.py",
        words="--dataset=synthetic --compile=False --eval_iters=2 --gradient_accumulation_steps=4",
        data=tokens("data/synthetic/train.bin", "data/synthetic/val.bin", vocabulary=50257),
    ),
    "llama2c": Client(
        repository="karpathy/llama2.c", commit="350e04fe35433e6d2941dce5a1f53308f87058eb", script="train.py",
        words="--compile=False --eval_iters=2",
        data=tokens(*(f"data/TinyStories_all_data/data0{i}.bin" for i in range(3)), vocabulary=32000),
    ),
    "mingpt": Client(
        repository="karpathy/minGPT", commit="37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        script="projects/adder/adder.py", path=".",
    ),
    "mnist": Client(
        repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8", script="mnist/main.py",
        words="--save-model", data=digits("data"),
    ),
    "vae": Client(
        repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8", script="vae/main.py",
        data=digits("data"),
    ),
    "imagenet": Client(
        repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8", script="imagenet/main.py",
        words="--dummy -a resnet50 -b 64",
    ),
    "dcgan": Client(
        repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8", script="dcgan/main.py",
        words="--dataset fake --accel",
    ),
    "words": Client(
        repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8", script="word_language_model/main.py",
        words="--accel --model Transformer --emsize 512 --nhead 8 --nhid 2048 --batch_size 64", data=words,
    ),
    "ddp": Client(
        repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
        script="distributed/ddp-tutorial-series/multigpu.py", words="5 5",
    ),
    "wgan_gp": Client(
        repository="eriklindernoren/PyTorch-GAN", commit="36d3c77e5ff20ebe0aeefd322326a134a279b93e",
        script="implementations/wgan_gp/wgan_gp.py", data=digits("data/mnist"),
    ),
    "unet": Client(
        repository="milesial/Pytorch-UNet", commit="21d7850f2af30a9695bbeea75f3136aa538cfc4a", script="train.py",
        words="--amp -b 2", data=pictures_and_masks,
    ),
    "xtransformers": Client(
        repository="lucidrains/x-transformers", commit="9252ed7838021ee61e6c5be0930b3a9a88efdf06", script="train_copy.py",
    ),
}  # fmt: skip

COLUMNS = (
    "client",
    "steps",
    "allocated",
    "reserved",
    "bound",
    "real allocated",
    "real reserved",
    "off",
    "guesses",
    "s",
)


def run(name: str, root: Path, steps: int, card: str | None, real: bool) -> dict[str, Any]:
    """One row of the table."""
    client = CLIENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "client"
        shutil.copytree(root / client.repository.partition("/")[2], copy, ignore=shutil.ignore_patterns(".git"))
        client.data(copy)
        script = copy / client.script
        if client.path:
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(copy / client.path), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        before = os.getcwd()
        os.chdir(script.parent)
        began = time.perf_counter()
        try:
            found = estimate_script(script.name, client.words.split(), card=card, steps=steps)
        except OutsizeError as error:
            return {"client": name, "error": str(error)}
        finally:
            os.chdir(before)
        seconds = time.perf_counter() - began
        measured = measure(script, client.words.split(), steps) if real else {}
    return {
        "client": name, "steps": found.steps, "allocated": found.peak_allocated.bytes, "reserved": found.peak_reserved.bytes,
        "bound": found.peak_reserved.bound, "real allocated": measured.get("allocated"),
        "real reserved": measured.get("reserved"),
        "off": found.peak_reserved.bytes / measured["reserved"] - 1 if measured.get("reserved") else None,
        "guesses": len(found.guesses), "s": round(seconds, 1), "phases": found.to_dict()["phases"], "notes": found.notes,
        "error": measured.get("error"),
    }  # fmt: skip


def measure(script: Path, words: list[str], steps: int) -> dict[str, Any]:
    """The peaks of a real run on the card, in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(steps), script.name, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("measured ")]
    if lines:
        return dict(json.loads(lines[-1].removeprefix("measured ")))
    return {"error": (done.stderr.strip().splitlines() or ["ended without a measurement"])[-1]}


def measured_run(steps: int, script: str, words: list[str]) -> None:
    """Run a script for real and stop where its estimate stops."""
    import torch
    from torch.nn.modules import module
    from torch.utils.data import DataLoader

    from outsize.model.scripts.follower import Follower

    owners = SimpleNamespace(depth=0, evaluating=False)
    ledger = SimpleNamespace(step=-1, events=[], live={})
    tracer: Any = SimpleNamespace(owners=owners, ledger=ledger, device="cuda:0", guess=lambda sentence: None)

    def enter(*_: Any) -> None:
        owners.depth += 1

    def leave(*_: Any) -> None:
        owners.depth -= 1

    def stop() -> None:
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        sys.stdout.write(f"\nmeasured {json.dumps(peaks)}\n")
        sys.stdout.flush()
        os._exit(0)

    module.register_module_forward_pre_hook(enter)
    module.register_module_forward_hook(leave, always_call=True)
    follower = Follower(tracer, steps, stop)
    DataLoader.__iter__ = lambda loader: follower.batches(loader)  # type: ignore[method-assign]
    sys.argv = [script, *words]
    sys.path.insert(0, os.getcwd())
    with follower.watching(), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    stop()


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    if row.get("error"):
        return f"| {row['client']} | {row['error']} |"
    cells = []
    for column in COLUMNS:
        value = row[column]
        if value is None:
            cells.append("")
        elif column == "off":
            cells.append(f"{value:+.2%}")
        elif column in ("client", "steps", "guesses", "s"):
            cells.append(str(value))
        else:
            cells.append(format_bytes(value))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measured_run(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--card")
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    args = parser.parse_args()
    there = [name for name, client in CLIENTS.items() if (args.root / client.repository.partition("/")[2]).is_dir()]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows = []
    for name in args.names or there:
        rows.append(run(name, args.root.resolve(), args.steps, args.card, args.real))
        print(show(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
