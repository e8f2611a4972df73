"""Six ways to run out of a card's memory, made for real and explained: from the exception alone, and from the snapshot.

    python benchmarks/real_failures_gpu.py [result.txt]

Each case runs in its own process, records torch's allocation history, runs out on purpose, and hands its exception and its
snapshot to `outsize.explain`. The fragmented case runs once more with expandable segments on, and the peak it then really
reserves is held against the one that the replay of the first run's snapshot predicts. Needs torch with CUDA.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from typing import Any

GiB, MiB = 2**30, 2**20
EXPECTED = {
    "true_need": "true need",
    "fragmentation": "fragmentation",
    "other_process": "other process",
    "fraction": "memory fraction",
    "graph_pool": "CUDA graph pools",
    "larger_than_card": "request larger than the device",
}


def take(torch: Any, size: int) -> Any:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def true_need(torch: Any) -> None:
    held = []
    while True:
        held.append(take(torch, GiB))


def fragmentation(torch: Any) -> None:
    """Segments of 4 GiB cut into 64 MiB blocks, every second one freed; then one request larger than what is free."""
    free, _ = torch.cuda.mem_get_info()
    blocks = []
    for _ in range((free - 18 * GiB) // (4 * GiB)):
        whole = take(torch, 4 * GiB)
        del whole
        blocks += [take(torch, 64 * MiB) for _ in range(64)]
    del blocks[::2]
    take(torch, 24 * GiB)
    torch.cuda.synchronize()


def other_process(torch: Any) -> None:
    code = (
        "import sys, torch\nx = torch.empty(100 * 2**30, dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        true_need(torch)
    finally:
        child.communicate("")


def fraction(torch: Any) -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    true_need(torch)


def graph_pool(torch: Any) -> None:
    """Eight graphs, each with 8 GiB of temporaries in a pool of its own; then plain tensors until the card is full."""
    source = take(torch, 8 * GiB)
    graphs = []
    for _ in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            temporary = source.add(1)
            result = temporary[:MiB].clone()
            del temporary
        graphs.append((graph, result))
    true_need(torch)


def larger_than_card(torch: Any) -> None:
    take(torch, 200 * GiB)


def run_case(name: str, folder: pathlib.Path) -> None:
    """One case in this process: the exception and the snapshot are explained on the spot, the facts go to a file."""
    import torch

    import outsize

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    facts: dict[str, Any] = {"expandable": "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
    try:
        globals()[name](torch)
        facts["fitted"] = True
    except torch.OutOfMemoryError as error:
        snapshot = torch.cuda.memory._snapshot()
        facts |= {
            "message": str(error),
            "said": explain(outsize.explain(str(error))),
            "felt": explain(outsize.explain(error)),
        }
        with open(folder / f"{name}.pickle", "wb") as file:
            pickle.dump(snapshot, file)
        began = time.perf_counter()
        facts["snapshot"] = explain(outsize.explain(folder / f"{name}.pickle", here=True))
        facts["snapshot_seconds"] = time.perf_counter() - began
    facts["peak_reserved"] = torch.cuda.max_memory_reserved()
    facts["text"] = facts.get("snapshot", {}).get("text", "")
    (folder / f"{name}.json").write_text(json.dumps(facts))


def explain(diagnosis: Any) -> dict[str, Any]:
    cause = diagnosis.cause
    return {
        "cause": None if cause is None else cause.name,
        "certain": cause is not None and cause.certain,
        "text": str(diagnosis),
    }


def predicted_peak(folder: pathlib.Path) -> int:
    from outsize.failure.snapshot.explain import replay_settings
    from outsize.failure.snapshot.load import load_snapshot
    from outsize.failure.snapshot.state import read_state

    snapshot = load_snapshot(folder / "fragmentation.pickle")
    return replay_settings(snapshot, read_state(snapshot))["expandable_segments:True"].peak


def start(name: str, folder: pathlib.Path, **environment: str) -> dict[str, Any]:
    subprocess.run(
        [sys.executable, __file__, "--case", name, str(folder)], env=os.environ | environment, check=False, timeout=200
    )
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def main(result: str | None) -> int:
    import torch

    lines = [f"{time.strftime('%Y-%m-%d')}  {torch.cuda.get_device_name()}  torch {torch.__version__}", ""]
    right = 0
    with tempfile.TemporaryDirectory() as text:
        folder = pathlib.Path(text)
        for name, expected in EXPECTED.items():
            facts = start(name, folder)
            said, felt, snapped = (facts.get(key, {}).get("cause") for key in ("said", "felt", "snapshot"))
            ok = said == felt == snapped == expected
            right += ok
            lines.append(
                f"{'ok ' if ok else 'BAD'} {name}: text -> {said}, exception -> {felt}, snapshot -> {snapped} "
                f"(read and replayed in {facts.get('snapshot_seconds', 0):.2f} s)"
            )
            lines += [
                "",
                facts.get("message", ""),
                "",
                facts.get("said", {}).get("text", ""),
                "",
                "-- from the snapshot",
                facts.get("text", ""),
                "=" * 100,
            ]
        predicted = predicted_peak(folder)
        again = start("fragmentation", folder, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        measured = again.get("peak_reserved", 0)
        off = abs(predicted - measured) / measured if measured else 1.0
        lines += [
            "",
            f"fragmentation with expandable segments on: fitted {again.get('fitted', False)}, measured "
            f"peak {measured / GiB:.2f} GiB, "
            f"predicted {predicted / GiB:.2f} GiB, off by {off:.2%}",
            f"{right} of {len(EXPECTED)} named right three ways",
        ]
    output = "\n".join(lines) + "\n"
    print(output)
    if result:
        pathlib.Path(result).write_text(output)
    return 0 if right == len(EXPECTED) and off <= 0.02 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        run_case(sys.argv[2], pathlib.Path(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
