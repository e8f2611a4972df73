"""Estimates of the steps in `blind_models`, made without a card and before any of them was measured.

    python benchmarks/blind_estimate.py OUT.json [name ...]

With `SECOND=1` the second set, with `PART=1/4` only every fourth case from the second on. Writes, for every case, the projected
peaks with their bounds, or the error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from blind_models import cases, prepare, second_cases


def project(case: dict[str, Any]) -> dict[str, Any]:
    """Our estimate of one case."""
    import outsize

    begin = time.time()
    try:
        found = outsize.estimate(lambda step: step(), build=lambda: (prepare(case),))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    out: dict[str, Any] = {
        kind: [amount.bytes, amount.bound]
        for kind, amount in (("allocated", found.peak_allocated), ("reserved", found.peak_reserved))
    }
    return {**out, "use": found.device_use.bytes, "seconds": round(time.time() - begin, 1), "notes": list(found.notes)}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    part, parts = map(int, os.environ.get("PART", "0/1").split("/"))
    for case in (second_cases() if os.environ.get("SECOND") else cases())[part::parts]:
        if len(sys.argv) > 2 and case["model"] not in sys.argv[2:]:
            continue
        rows.append({"case": case, "projected": project(case)})
        print(list(case.values()), rows[-1]["projected"], flush=True)
        Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
