"""Projected against peaks that were measured earlier on a card: needs torchvision and transformers, but no GPU.

    python benchmarks/estimate_recorded.py [MEASURED.json] [TABLE.md]

The measured file is written by `record_cuda.py` runs; the one in `results/` is an H200's. Prints the same table and statistics
as `estimate_h200.py`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

from estimate_h200 import project, summarise

HERE = Path(__file__).parent


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "h200_measured_2026-11-15.json"
    recorded = json.loads(source.read_text())
    rows = []
    for row in recorded["rows"]:
        try:
            projected = project(row["case"])
        except Exception as error:
            projected = {"error": f"{type(error).__name__}: {error}"[:300]}
        measured = {"allocated": row["allocated"], "reserved": row["reserved"]}
        rows.append({"case": row["case"], "projected": projected, "measured": measured})
        print(row["case"], projected.get("seconds", projected.get("error")), file=sys.stderr, flush=True)
    table = summarise({"rows": rows, "largest": [], "torch": recorded["torch"]})
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(table)
    print(table)


if __name__ == "__main__":
    main()
