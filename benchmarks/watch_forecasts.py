"""Random growing programs: how often "full in" is said, how well, how early; and who is warned of nothing.

    python benchmarks/watch_forecasts.py [first seed] [last seed]

Every program of `tests/monitor/growing_programs.py` is read ten times a second until it is full. At 40 moments of it (at
most one a second) the outlook is taken as `outsize watch` takes it. The middle of its range is compared with the time that
was left. Constants were chosen on seeds below 100; other seeds judge."""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "monitor"))
from growing_programs import CALM, KINDS, Program, make  # noqa: E402

from outsize.core.outcomes.outlook import Outlook, look_ahead  # noqa: E402
from outsize.monitor.outside import warns  # noqa: E402

MOMENTS = 40


def follow(program: Program) -> Iterator[tuple[float, Outlook | None]]:
    """(seconds since its start, outlook), moment by moment."""
    end, due = program.held[-1][0], 0.0
    for index, (at, _) in enumerate(program.held[:-1]):
        if at >= due:
            due = at + max(1.0, end / MOMENTS)
            yield at, look_ahead(program.limit, program.held[: index + 1])


def judge(kind: str, seeds: range) -> tuple[int, int]:
    """One row of the table of programs that are killed; (within 20 %, said)."""
    moments, inside, errors, first, warned, silent = 0, 0, [], [], [], 0
    for seed in seeds:
        program = make(kind, seed)
        end = program.held[-1][0]
        said, warning = None, None
        for at, outlook in follow(program):
            moments += 1
            if outlook is None:
                continue
            warning = at if warning is None and warns(outlook, at) else warning
            if outlook.is_known:
                said = at if said is None else said
                errors.append(abs(outlook.middle - (end - at)) / (end - at))
                inside += outlook.earliest <= end - at <= outlook.latest
        first += [] if said is None else [(end - said) / end]
        warned += [] if warning is None else [(end - warning) / end]
        silent += warning is None
    within = sum(error <= 0.2 for error in errors)
    cells = [kind, f"{len(errors)} of {moments}"]
    if errors:
        cells += [f"{within / len(errors):.1%}", f"{statistics.median(errors):.1%}", f"{max(errors):.0%}"]
        cells += [f"{inside / len(errors):.0%}", f"{statistics.median(first):.0%} ({len(first)})"]
    else:
        cells += ["-"] * 5
    cells += [f"{statistics.median(warned):.0%}, {min(warned):.0%}", str(silent)]
    print(f"| {' | '.join(cells)} |", flush=True)
    return within, len(errors)


def judge_calm(kind: str, seeds: range) -> None:
    """One row of the table of programs that are never full."""
    moments = known = warnings = 0
    runs = 0
    for seed in seeds:
        alarms = 0
        for at, outlook in follow(make(kind, seed)):
            moments += 1
            known += outlook is not None and outlook.is_known
            alarms += outlook is not None and warns(outlook, at)
        warnings += alarms
        runs += alarms > 0
    print(f"| {kind} | {known / moments:.1%} | {warnings / moments:.1%} | {runs} of {len(seeds)} |", flush=True)


if __name__ == "__main__":
    low, high = (int(word) for word in (sys.argv[1:3] or ("100", "140")))
    seeds = range(low, high)
    print(f"seeds {low} to {high - 1}\n")
    columns = "program | said, of moments | within 20 % | median | worst | inside the range | first said, runs"
    print(f"| {columns} | warned, median and last | silent |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = [judge(kind, seeds) for kind in KINDS]
    print(f"\nall: {sum(row[0] for row in rows) / sum(row[1] for row in rows):.2%} of {sum(row[1] for row in rows)}\n")
    print(
        "| program that is never full | said, of moments | would be warned of, of moments | programs |\n|---|---|---|---|"
    )
    for kind in CALM:
        judge_calm(kind, seeds)
