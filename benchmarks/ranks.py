"""fit and estimate over ranks, on this machine's CPU: `python benchmarks/ranks.py [steps] [storages] [published] [accelerate]`.

`steps`: DDP, FSDP2, HSDP and FSDP2 with an offload policy on 2 and 4 processes, 20 steps beside one process with all batches,
with and without memory that runs out on one rank. `storages`: estimates of a rank beside what plain ranks hold. `published`:
Llama 3.1 8B beside torchtitan's figures. `accelerate`: a script that `accelerate launch` starts. Each prints a table.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "model")]

import ranked_storages  # noqa: E402
import ranks  # noqa: E402

import outsize  # noqa: E402
from outsize.core.units import GiB  # noqa: E402

WAYS = {2: ("ddp", "fsdp", "offloaded"), 4: ("ddp", "fsdp", "hsdp", "offloaded")}


def run_steps(folder):
    print(
        "| ranks | spread | fails | slices | gradients differ | weights after 20 steps differ | peak | projected | budget |"
    )
    for count, kinds in WAYS.items():
        for kind in kinds:
            for place in ("", "forward", "backward"):
                begin = time.monotonic()
                by_rank = ranks.run_ranks(folder, count, f"{kind}:0.6:{place}", seconds=600, RANKED_STEPS="20")
                rows = [rows[0] for rows in by_rank]
                assert len({row["last"] for row in rows}) == 1, "one plan on all ranks"
                row = max(rows, key=lambda row: row["weights"])
                held, projected = max(row["peaks"])
                inside = all(held <= projected <= row["budget"] for row in rows for held, projected in row["peaks"])
                print(
                    f"| {count} | {kind} | {place or '-'} | {' then '.join(map(str, dict.fromkeys(row['slices'])))} | "
                    f"{max(r['gradients'] for r in rows):.1e} | {row['weights']:.1e} | {held:,} | {projected:,} | "
                    f"{row['budget']:,} {'inside' if inside else 'PASSED'} | {time.monotonic() - begin:.0f} s",
                    flush=True,
                )


def run_storages(folder):
    print("| ranks | spread | measured, by rank | estimated | difference |")
    program = pathlib.Path(ranked_storages.__file__)
    for count, kinds in {2: ("ddp", "zero1", "fsdp"), 4: ("ddp", "zero1", "fsdp", "hsdp")}.items():
        by_rank = ranks.run_ranks(folder, count, *kinds, program=program, seconds=300)
        for kind, rows in zip(kinds, zip(*by_rank, strict=True), strict=True):
            if kind == "hsdp":
                given = {"build": lambda count=count: ranked_storages.build("hsdp", count)}
            else:
                given = {"build": ranked_storages.build, "sharding": kind}
            found = outsize.estimate(ranked_storages.step, device="cpu", ranks=count, **given).peak_requested.bytes
            peaks = [row["peak"] for row in rows]
            said = ", ".join(f"{peak:,}" for peak in peaks)
            print(f"| {count} | {kind} | {said} | {found:,} | {found - max(peaks):+,} |", flush=True)


def run_published():
    """Llama 3.1 8B as torchtitan trained it with FSDP2 on H100s: bfloat16 gathers, float32 reductions, AdamW, 2 x 8192 tokens."""
    from ranked_llama import build, step

    print("| ranks | checkpointing | allocated | reserved | published, reserved |")
    for checkpointing in ("selective", "full"):
        for count, published in ((8, 82.4), (128, 67.0)):
            found = outsize.estimate(step, build=lambda c=checkpointing: build(c), ranks=count, card="h100", steps=2)
            print(
                f"| {count} | {checkpointing} | {found.peak_allocated.bytes / GiB:.1f} | {found.peak_reserved.bytes / GiB:.1f} | "
                f"{published if checkpointing == 'selective' else '-'} | parts "
                + ", ".join(f"{part.name} {part.bytes / GiB:.1f}" for part in found.parts if part.bytes > GiB // 10),
                flush=True,
            )


def run_accelerate():
    script = ROOT / "benchmarks" / "ranked_accelerate.py"
    words = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "29731", str(script)]
    given = os.environ | {"ACCELERATE_USE_CPU": "true"}  # its launcher starts several processes for cards only
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=given)
    print(done.stdout, done.stderr[-2000:] if done.returncode else "", sep="")


def main():
    wanted = sys.argv[1:] or ["steps", "storages", "published", "accelerate"]
    with tempfile.TemporaryDirectory() as name:
        for word in wanted:
            print(f"== {word}", flush=True)
            if word in ("steps", "storages"):
                {"steps": run_steps, "storages": run_storages}[word](pathlib.Path(name))
            else:
                {"published": run_published, "accelerate": run_accelerate}[word]()


if __name__ == "__main__":
    main()
