"""Where to cut a program into segments that are computed again, for any framework.

In: the bytes that each of its operators writes, what each reads and makes. Out: places between operators.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def narrowest_cuts(sizes: Sequence[int], crossing: Sequence[int], count: int) -> list[int]:
    """Where to cut into `count` segments: near equal bytes written, at the narrowest place around."""
    if count <= 1 or len(sizes) < 2:
        return []
    total, written, reached = sum(sizes) or 1, 0, []
    for size in sizes:
        written += size
        reached.append(written)
    cuts: set[int] = set()
    for number in range(1, count):
        low, high = ((number + shift) * total / count for shift in (-0.45, 0.45))
        near = [place + 1 for place, size in enumerate(reached[:-1]) if low <= size <= high]
        if near:
            even = number * total / count
            cuts.add(min(near, key=lambda place: (crossing[place], abs(reached[place - 1] - even))))
    return sorted(cuts)


def bytes_across(
    made: Sequence[Sequence[tuple[Hashable, int]]], read: Sequence[Sequence[Hashable]], results: Sequence[Hashable]
) -> list[int]:
    """Bytes of values that are made before each place and read behind it. `made` and `read` are by operator."""
    last: dict[Hashable, int] = {key: place for place, keys in enumerate(read) for key in keys}
    last.update(dict.fromkeys(results, len(made)))
    change = [0] * (len(made) + 2)
    for place, values in enumerate(made):
        for key, size in values:
            if key in last:
                change[place + 1] += size
                change[last[key] + 1] -= size
    alive, found = 0, []
    for difference in change:
        alive += difference
        found.append(alive)
    return found
