"""The lines that `shrink.py` wrote -> Markdown tables: means over seeds, each seed, each set.

What was taken is compared with two methods alone, of those that are as small:

- the *chosen* one: of the lowest loss on the batches that `shrink` got, healed or not. A user who tries all would take it.
- the *luckiest* one: of the lowest loss on the held-out batches themselves. Of equals one is lowest there by chance, so what is
  taken looks a little worse beside it than it is.

A difference below 0 is a lower loss on held-out data. Standard errors of a seed come from its batches, those of a mean from
its seeds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

Line = dict[str, Any]
Key = tuple[str, bool]
"""The name of a set, and whether it is healed."""


def show(lines: list[Line]) -> None:
    rows = [make_row(list(group)) for _, group in group_by(lines, row_of)]
    show_means(rows)
    show_rows(rows)
    for _, group in group_by(lines, mean_of):
        show_sets(list(group))


def row_of(line: Line) -> tuple[Any, ...]:
    """What a row is about; its lines are the parts of the data that are held out in turn."""
    return line["whole"]["model"], -line["size"], line["healing"], line["whole"]["seed"]


def mean_of(line: Line) -> tuple[Any, ...]:
    return row_of(line)[:3]


def group_by(lines: Iterable[Any], key: Callable[[Any], Any]) -> Iterable[tuple[Any, Iterable[Any]]]:
    return itertools.groupby(sorted(lines, key=key), key)


def losses(line: Line, where: str) -> dict[Key, list[float]]:
    """The losses of the batches, of every set: `data` or `held`."""
    found = {(one["name"], False): one[where] for one in line["sets"]}
    if line["healing"]:
        found |= {(one["name"], True): one[f"{where}_healed"] for one in line["sets"]}
    return found


def alone(keys: Iterable[Key]) -> list[Key]:
    return [key for key in keys if not key[0].startswith("mixture")]


def make_row(lines: list[Line]) -> dict[str, Any]:
    """One row: what was taken, beside the chosen and the luckiest method alone."""
    held = [losses(line, "held") for line in lines]
    taken = [one[line["taken"], line["healed"]] for one, line in zip(held, lines, strict=True)]
    chosen = [choose(line) for line in lines]
    everywhere = set.intersection(*(set(alone(one)) for one in held))
    luckiest = min(everywhere, key=lambda key: sum(sum(one[key]) for one in held))
    return {
        "about": row_of(lines[0]), "taken": [(line["taken"], line["healed"]) for line in lines], "chosen": chosen,
        "luckiest": [luckiest], "before": statistics.mean(sum(line["whole"]["held"]) for line in lines),
        "loss": statistics.mean(map(sum, taken)),
        "beside chosen": compare(taken, [one[key] for one, key in zip(held, chosen, strict=True)]),
        "beside luckiest": compare(taken, [one[luckiest] for one in held]),
    }  # fmt: skip


def choose(line: Line) -> Key:
    """The method alone of the lowest loss on the batches that `shrink` got."""
    data = losses(line, "data")
    return min(alone(data), key=lambda key: sum(data[key]))


def compare(taken: list[list[float]], other: list[list[float]]) -> tuple[float, float]:
    """The mean difference and its standard error, over the batches of all parts."""
    changes = [
        (one - two) / len(taken) for pair in zip(taken, other, strict=True) for one, two in zip(*pair, strict=True)
    ]
    return math.fsum(changes), statistics.stdev(changes) * math.sqrt(len(changes))


def verdict(change: float, error: float) -> str:
    if change <= 0:
        return "at least as good"
    for count, words in ((1, "within one standard error"), (2, "within two standard errors")):
        if change <= count * error:
            return words
    return f"worse by {change / error:.1f} standard errors" if error else "worse"


def start(*titles: str) -> None:
    print("\n| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))


def cells(*values: Any) -> None:
    print("| " + " | ".join(map(str, values)) + " |")


def spell(keys: list[Key]) -> str:
    """bf16 (2), int8 healed"""
    counts = Counter(f"{name} healed" if healed else name for name, healed in keys)
    return "; ".join(name if count == 1 else f"{name} ({count})" for name, count in counts.items())


def about(row: dict[str, Any]) -> tuple[str, str, str]:
    model, size, healing, *_ = row["about"]
    return model, f"{-size:.0%}", "yes" if healing else "no"


def show_means(rows: list[dict[str, Any]]) -> None:
    start("model", "size", "healing", "seeds", "loss before", "taken", "beside the chosen one", "standard error", "",
          "beside the luckiest one", "standard error", "")  # fmt: skip
    for _, group in group_by(rows, lambda row: row["about"][:3]):
        found = list(group)
        said: list[str] = []
        for other in ("beside chosen", "beside luckiest"):
            changes = [row[other][0] for row in found]
            mean, error = statistics.mean(changes), found[0][other][1]
            if len(changes) > 1:
                error = statistics.stdev(changes) / math.sqrt(len(changes))
            said += [f"{mean:+.5f}", f"{error:.5f}", verdict(mean, error)]
        means = (statistics.mean(row[what] for row in found) for what in ("before", "loss"))
        cells(*about(found[0]), len(found), *(f"{mean:.5f}" for mean in means), *said)


def show_rows(rows: list[dict[str, Any]]) -> None:
    start("model", "size", "healing", "seed", "loss before", "taken", "its loss", "chosen alone", "difference",
          "standard error", "", "luckiest alone", "difference", "standard error", "")  # fmt: skip
    for row in rows:
        said: list[str] = []
        for other in ("chosen", "luckiest"):
            change, error = row[f"beside {other}"]
            said += [spell(row[other]), f"{change:+.5f}", f"{error:.5f}", verdict(change, error)]
        cells(*about(row), row["about"][3], f"{row['before']:.5f}", spell(row["taken"]), f"{row['loss']:.5f}", *said)


def show_sets(lines: list[Line]) -> None:
    """Every set that is small enough, a mean over all trained models."""
    whole = [line["whole"] for line in lines]
    model, size, healing = mean_of(lines[0])
    ram, file, peak = (statistics.mean(one[what] for one in whole) for what in ("bytes", "file", "peak"))
    before = [sum(one["held"]) for one in whole]
    print(f"\n### {model} to {-size:.0%}, {'with' if healing else 'without'} healing: RAM {ram:,.0f}, file {file:,.0f}, "
          f"peak {peak:,.0f}, held-out loss {statistics.mean(before):.5f}, {len(lines)} trained models")  # fmt: skip
    more = ("loss healed", "change") if healing else ()
    start("set", "small enough", "taken", "RAM", "share", "file", "peak", "held-out loss", "change", *more)
    names = dict.fromkeys(one["name"] for line in lines for one in line["sets"])
    for name in names:
        pairs = [(line, one) for line in lines for one in line["sets"] if one["name"] == name]
        taken = [(name, line["healed"]) for line, _ in pairs if line["taken"] == name]
        means = [statistics.mean(one[what] for _, one in pairs) for what in ("bytes", "file", "peak")]
        was = statistics.mean(sum(line["whole"]["held"]) for line, _ in pairs)
        after = [statistics.mean(sum(one[what]) for _, one in pairs) for what in ("held", *["held_healed"] * healing)]
        said = [text for loss in after for text in (f"{loss:.5f}", f"{(loss - was) / was:+.2%}")]
        count = f"{len(taken)}, healed {sum(healed for _, healed in taken)}" if healing else len(taken)
        cells(name, f"{len(pairs)} of {len(lines)}", count, f"{means[0]:,.0f}", f"{means[0] / ram:.1%}", f"{means[1]:,.0f}",
              f"{means[2]:,.0f}", *said)  # fmt: skip
