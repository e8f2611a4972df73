"""Training scripts of other projects, followed as they are on the CPU, beside the allocator peak of a real run.

In: scripts, each with its words, as `SCRIPT [WORDS...]` in quotes. Out: a row for each: what was foreseen, its bound, the real
peak of torch's CPU allocator in a process of its own (stopped where the estimate stops), and what the estimate says it does not
know. A silent miss is a real peak above the bound, or an estimate more than 5 % off, without such a word. What NumPy holds under
a tensor (`from_numpy`) is copied in the real run, so that torch's allocator counts it as the estimate does.

    python benchmarks/blind_scripts.py "speech.py --layers 4" "detect.py"
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 3


def main(commands: list[str]) -> None:
    from outsize.core.errors import OutsizeError
    from outsize.core.units import format_bytes
    from outsize.model.scripts.start import estimate_script

    print("| script | estimate | bound | real | off | said | s |\n|---|---|---|---|---|---|---|")
    for command in commands:
        script, *words = shlex.split(command)
        before = os.getcwd()
        os.chdir(Path(script).parent or ".")
        name, began = Path(script).name, time.perf_counter()
        try:
            found: Any = estimate_script(name, words, device="cpu", steps=STEPS)
        except OutsizeError as error:
            found = str(error)
        seconds = time.perf_counter() - began
        real = measure(name, words)
        os.chdir(before)
        if isinstance(found, str) or isinstance(real, str):
            refused, failed = (value if isinstance(value, str) else "" for value in (found, real))
            print(
                f"| {name} | refused: {refused[:300]} | | {failed[:200] or format_bytes(int(real))} | | | {seconds:.0f} |"
            )
            continue
        likely = found.peak_requested
        off, missed = likely.bytes / real - 1, real > likely.bound
        wrong = missed or abs(likely.bytes - real) > max(2**16, 0.05 * real)
        said = found.guesses or (found.notes if wrong else ())
        word = "; ".join(said) or ("SILENT MISS" if wrong else "")
        print(
            f"| {name} | {format_bytes(likely.bytes)} | {format_bytes(likely.bound)} | {format_bytes(real)} | {off:+.1%}"
            f"{' MISSED' if missed else ''} | {word} | {seconds:.0f} |",
            flush=True,
        )


def measure(script: str, words: list[str]) -> int | str:
    """The real peak, or why there is none."""
    command = [sys.executable, __file__, "--measure", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("measured ")]
    return json.loads(lines[-1].removeprefix("measured ")) if lines else (done.stderr.strip().splitlines() or ["-"])[-1]


def copying(make: Any) -> Any:
    """The same tensor in memory of torch's own."""
    return lambda *args, **kwargs: make(*args, **kwargs).clone()


def measured_run(script: str, words: list[str]) -> None:
    """Run a script for real and stop where its estimate stops."""
    import torch
    from torch.nn.modules import module
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.data import DataLoader

    from outsize.model.scripts.follower import Follower

    torch.set_num_threads(1)
    for name in ("from_numpy", "frombuffer"):
        setattr(torch, name, copying(getattr(torch, name)))
    owners = SimpleNamespace(depth=0, evaluating=False)
    ledger = SimpleNamespace(step=-1, events=[], live={})
    tracer: Any = SimpleNamespace(owners=owners, ledger=ledger, device="cpu", guess=lambda sentence: None)
    seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    seen.__enter__()

    def enter(*_: Any) -> None:
        owners.depth += 1

    def leave(*_: Any) -> None:
        owners.depth -= 1

    def stop() -> None:
        seen.__exit__(None, None, None)
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        sys.stdout.write(f"\nmeasured {peak}\n")
        sys.stdout.flush()
        os._exit(0)

    module.register_module_forward_pre_hook(enter)
    module.register_module_forward_hook(leave, always_call=True)
    follower = Follower(tracer, STEPS, stop)
    DataLoader.__iter__ = lambda loader: follower.batches(loader)  # type: ignore[method-assign]
    sys.argv = [script, *words]
    sys.path.insert(0, os.getcwd())
    with follower.watching(), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    stop()


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measured_run(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
