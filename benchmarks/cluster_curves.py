"""How work scales on clusters that are not there: the table and the picture of docs/scale.md.

python benchmarks/cluster_curves.py            prints the table, writes docs/pictures/scale.svg
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import outsize

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "scale.svg"
WORKERS = (1, 16, 64, 250, 1000, 4000)
ROWS = 10**15 // 2048
"""A petabyte of float32 in rows of 512."""
MACHINES: dict[str, Any] = {
    "memory": "64GiB",
    "link": "1GB",
    "storage": "500GB",
    "failures": 0.02,
    "slow": 0.005,
    "restart": 120,
    "price": 0.5,
}
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")


def works() -> dict[str, Any]:
    x = outsize.cluster.on_paper((ROWS, 512))
    return {
        "z-score of 1 PB": (x - x.mean(axis=0)) / x.std(axis=0),
        "mean of 1 PB": x.mean(axis=0),
        "transpose of 1 PB": x.T,
    }


def main() -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    print("| work | workers | time | through storage | busy | lost and run again | cost | limited by |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name, work in works().items():
        curves[name] = []
        for workers in WORKERS:
            made = outsize.cluster.simulate(work, "z.npy", workers=workers, **MACHINES)
            curves[name].append((workers, made.seconds))
            moved, lost = f"{made.moved / 1e15:.3g} PB", f"{made.lost:,}"
            print(f"| {name} | {workers:,} | {hours(made.seconds)} | {moved} | {made.busy:.0%} | {lost} | {made.cost:,.0f} | "
                  f"{made.limited_by} |", flush=True)  # fmt: skip
    PICTURE.write_text(draw(curves))


def hours(seconds: float) -> str:
    return f"{seconds / 3600:,.3g} h" if seconds >= 5400 else f"{seconds / 60:,.3g} min"


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Hours over workers, both in powers of ten; dashed is the first point divided by the number of workers."""
    width, height, left, bottom, top = 720, 400, 70, 350, 20
    low = math.floor(math.log10(min(s for rows in curves.values() for _, s in rows) / 3600))
    high = math.ceil(math.log10(max(s for rows in curves.values() for _, s in rows) / 3600))
    most = math.log10(WORKERS[-1])

    def at(workers: int, seconds: float) -> str:
        x = left + (width - left - 180) * math.log10(workers) / most
        y = bottom - (bottom - top) * (math.log10(max(seconds / 3600, 10**low)) - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for power in range(low, high + 1):
        y = bottom - (bottom - top) * (power - low) / (high - low)
        parts.append(f'<line x1="{left}" x2="{width - 180}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} h</text>')
    for workers in WORKERS:
        x = at(workers, 3600 * 10.0**low).split(",")[0]
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{workers:,}</text>')
    parts.append(f'<text x="{(left + width - 180) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">workers</text>')
    for place, ((name, rows), colour) in enumerate(zip(curves.items(), COLOURS, strict=True)):
        ideal = [at(workers, rows[0][1] / workers) for workers, _ in rows]
        line = [at(*row) for row in rows]
        parts.append(
            f'<polyline points="{" ".join(ideal)}" fill="none" stroke="{colour}" stroke-dasharray="3 4" opacity="0.5"/>'
        )
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 172}" y="{top + 20 + 20 * place}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
