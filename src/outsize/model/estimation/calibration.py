"""What was measured on this machine, kept in a file of the user's cache folder.

In: a CUDA card that is really there, or receipts of real runs. Out: the bytes of its context, and how far reserved
memory was above the projection. `estimate` reads them. Without a file it uses constants measured on an H200.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outsize.core.errors import OutsizeError
from outsize.core.extras import need
from outsize.core.footprint import Receipt
from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Noun):
    """What is known about one card on this machine."""

    card: str
    """The card's name."""
    context: int | None = None
    """Device bytes beyond reserved after a training step, None if never measured."""
    reserved_margin: float = 0.0
    """Most that a measured reserved peak was above the projected one, as a fraction."""
    receipts: int = 0
    """How many receipts were kept."""


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outsize"


def _path() -> Path:
    return folder() / "calibration.json"


def _all() -> dict[str, Any]:
    path = _path()
    return json.loads(path.read_text()) if path.exists() else {}


def read(card: str) -> Calibration:
    found = _all().get(card, {})
    return Calibration(card=card, **found)


def _write(calibration: Calibration) -> Calibration:
    kept = _all()
    kept[calibration.card] = {name: value for name, value in asdict(calibration).items() if name != "card"}
    _path().parent.mkdir(parents=True, exist_ok=True)
    _path().write_text(json.dumps(kept, indent=1))
    return calibration


def learn_from_run(receipt: Receipt) -> Calibration:
    """Learn from a real run: `outsize.learn_from_run(footprint.compare(torch.cuda.memory_stats()))`.

    A reserved peak above the projected one widens the margin of the bound. If both reserved and used bytes of the
    device were measured, their difference is the context.
    """
    before = read(receipt.card or "H200")
    margin, context = before.reserved_margin, before.context
    if receipt.measured_reserved:
        margin = max(margin, receipt.measured_reserved / receipt.projected_reserved.bytes - 1 + 0.01, 0.0)
    if receipt.measured_reserved and receipt.measured_use and receipt.measured_use > receipt.measured_reserved:
        context = max(context or 0, receipt.measured_use - receipt.measured_reserved)
    return _write(Calibration(card=before.card, context=context, reserved_margin=margin, receipts=before.receipts + 1))


def calibrate() -> Calibration:
    """Measure the context of this machine's card: a small step is run on it, once."""
    torch = need("torch", "outsize.calibrate")
    if not torch.cuda.is_available():
        raise OutsizeError("there is no CUDA card here to calibrate: estimates use the constants measured on an H200")
    free, total = torch.cuda.mem_get_info()
    before = total - free - torch.cuda.memory_reserved()
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 16)).cuda()
    for kind in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype=kind, enabled=kind != torch.float32):
            layer(torch.rand(4, 3, 32, 32, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    context = max(before, total - free - torch.cuda.memory_reserved())
    known = read(torch.cuda.get_device_name().removeprefix("NVIDIA ").removeprefix("GeForce "))
    return _write(
        Calibration(card=known.card, context=context, reserved_margin=known.reserved_margin, receipts=known.receipts)
    )
