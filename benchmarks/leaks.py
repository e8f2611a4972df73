"""Programs that leak and programs that only look like it: what `outsize.watch` says of each.

    python benchmarks/leaks.py [every|paced|free] [blind]

Each program runs in a process of its own (see `tests/monitor/leak_programs.py`; the line that leaks is marked there).
`every` reads at every step, as the tests do; `paced` is what users have, with steps of four milliseconds; `free` marks no
steps. `blind` takes the programs that were written after the search was done."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "monitor"
sys.path.insert(0, str(TESTS))
import leak_programs  # noqa: E402

STEPS = {"every": 260, "paced": 1200, "free": 3500}


def watch(name: str, mode: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TESTS / "leak_runner.py"), folder, str(STEPS[mode]), mode, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return {"findings": [], "notes": [], "error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(mode: str, blind: bool) -> int:
    leaks = leak_programs.BLIND_LEAKS if blind else leak_programs.LEAKS
    clean = leak_programs.BLIND_CLEAN if blind else leak_programs.CLEAN
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, mode {mode}\n")
    print("| program | marked line | said | kind | right |")
    print("|---|---|---|---|---|")
    right = 0
    for name, code in (leaks | clean).items():
        answer = watch(name, mode)
        line = leak_programs.leaking_line(code) if name in leaks else None
        findings = answer["findings"]
        said = [f"{one['where'] or '-'} ({one['name'] or '-'})" for one in findings]  # type: ignore[attr-defined, index]
        first = (findings[0]["where"] or "").rpartition(":")[2] if findings else None  # type: ignore[index]
        good = first == (None if line is None else str(line)) and "error" not in answer
        right += good
        kind = findings[0]["kind"] if findings else ""  # type: ignore[index]
        error = f" {answer['error']}" if "error" in answer else ""
        print(
            f"| {name} | {line or 'clean'} | {'; '.join(said) or 'nothing'}{error} | {kind} | {'yes' if good else 'NO'} |",
            flush=True,
        )
    print(f"\n{right} of {len(leaks) + len(clean)} right")
    return 0 if right == len(leaks) + len(clean) else 1


if __name__ == "__main__":
    words = sys.argv[1:]
    chosen = next((word for word in words if word in STEPS), "every")
    sys.exit(main(chosen, "blind" in words))
