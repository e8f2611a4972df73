"""What the arena of a card may give a step above what the step asks for.

In: a compiled step, its shapes, its device. Out: bytes. XLA's allocator does not cut a free chunk that is a little larger than
a request, so the rule alone says twice the arguments in the worst case. Where the whole arena was taken at the start, the
allocator's own counts say more: only what lies between arrays can be lost, and once the largest request's share at its end.
"""

from __future__ import annotations

from typing import Any

from outsize.allocator import most_lost
from outsize.model.jax import arena
from outsize.model.jax.compiled import Compiled
from outsize.model.jax.private_parts import bytes_of, require_jax


def lost(device: Any, arguments: Any, results: Any, compiled: Compiled) -> int:
    """Most bytes that the arena loses on this step, if the program frees nothing else between planning and the first step."""
    if device.platform == "cpu":
        return 0
    leaves = require_jax().tree_util.tree_leaves
    given, made = ([bytes_of(leaf) or 0 for leaf in leaves(tree)] for tree in (arguments, results))
    made.append(max(0, compiled.outputs - compiled.aliased - sum(made)))
    donated = sum(made) - compiled.outputs + compiled.aliased
    most = arena.most_lost(given, made, donated, compiled.temporaries, compiled.code)
    between = _between(device)
    if between is None:
        return most
    return min(most, between + max(map(most_lost, (*given, *made, compiled.temporaries))))


def _between(device: Any) -> int | None:
    """Bytes of a whole arena that are neither arrays nor the one large free block; None where it grows."""
    counts = device.memory_stats() or {}
    pool, free = counts.get("pool_bytes"), counts.get("largest_free_block_bytes")
    if not pool or free is None or pool < counts.get("bytes_limit", pool):
        return None
    return max(0, int(pool - free - _arrays(device)))


def _arrays(device: Any) -> int:
    """Bytes of the arrays that are on a device now, each memory once."""
    held: dict[int, int] = {}
    for array in require_jax().live_arrays():
        if array.is_deleted() or getattr(array.sharding, "memory_kind", None) not in (None, "device"):
            continue
        for shard in array.addressable_shards:
            if shard.device == device:
                held[shard.data.unsafe_buffer_pointer()] = int(shard.data.nbytes)
    return sum(held.values())
