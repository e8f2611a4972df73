"""Starts a process that follows a script, and gives its answer.

In: a script, its arguments, where it should fit. Out: a `Footprint`. The script has a process and a throw-away folder of its own,
so that whatever it does stays there. What it prints comes line by line to `heard`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outsize.core.cards import find_card
from outsize.core.errors import InputError, OutsizeError
from outsize.core.footprint import Footprint
from outsize.core.units import parse_bytes

SECONDS = 600
"""How long a script may take to do its steps."""

ANSWER = "answer"
"""Name of the file in which the child leaves what it found."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true", "COMET_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg",
}  # fmt: skip
"""Environment of the script: libraries that would go to the network do not try."""


def estimate_script(
    script: str, words: Sequence[str] = (), *, device: str = "cuda", card: str | None = None,
    budget: int | str | None = None, steps: int = 3, seconds: float = SECONDS,
    heard: Callable[[str], None] = lambda line: None,
) -> Footprint:  # fmt: skip
    """The memory that a training script takes in its first steps. It runs as it is, on tensors without contents."""
    if not os.path.isfile(script):
        raise InputError(f"there is no script {script} here")
    if card is not None:
        find_card(card)
    request: dict[str, Any] = {
        "script": script, "words": list(words), "device": device, "card": card, "steps": steps, "seconds": seconds,
        "budget": None if budget is None else parse_bytes(budget), "uncompiled": "",
    }  # fmt: skip
    found = _follow(request, heard)
    if not isinstance(found, Footprint) and found[0] == "uncompiled":
        found = _follow({**request, "uncompiled": found[1]}, heard)
    if isinstance(found, Footprint):
        return found
    kind, sentence = found
    raise (InputError if kind == "mistake" else OutsizeError)(sentence)


def _follow(request: dict[str, Any], heard: Callable[[str], None]) -> Footprint | tuple[str, str]:
    """What a process of its own finds: the memory, or the kind of an error and its sentence."""
    with tempfile.TemporaryDirectory(prefix="outsize-script-") as folder:
        os.mkdir(os.path.join(folder, "tmp"))
        environment = {**os.environ, **OFFLINE, "TMPDIR": os.path.join(folder, "tmp")}
        command = [sys.executable, "-m", f"{__package__}.follow", json.dumps({**request, "folder": folder})]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            printed = tuple(_lines(child, heard))
            status = child.wait()
        finally:
            child.kill()
            child.wait()
        place = Path(folder) / ANSWER
        answer = place.read_bytes() if place.exists() else b""
    if not answer:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        last = f", after it printed {printed[-1]!r}" if printed else ""
        raise OutsizeError(f"the process that followed {request['script']} was ended {how}{last}")
    found: Footprint | tuple[str, str] = pickle.loads(answer)
    return dataclasses.replace(found, printed=printed) if isinstance(found, Footprint) else found


def _lines(child: subprocess.Popen[str], heard: Callable[[str], None]) -> list[str]:
    """What the child prints, each line told as it comes."""
    lines = []
    assert child.stdout is not None
    for line in child.stdout:
        lines.append(line.rstrip("\n"))
        heard(lines[-1])
    return lines
