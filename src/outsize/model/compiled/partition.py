"""Chooses what a compiled region saves for its backward pass, and what it computes again.

In: AOTAutograd's joint graph of forward and backward, what torch would save, and how much of the forward pass is to be computed
again, from its beginning. Out: the nodes to save. Torch's own choice computes cheap operators again and saves the rest. Here
the first part of the graph is cut at its narrow places, and only what crosses them is saved: the backward pass computes one
segment after the other again, each just before it is needed. Random numbers are drawn once and saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outsize.model.torch_port.compiler import NodeInfo, bytes_of, is_opaque, is_random, is_tensor, storage_of

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Into how many segments a graph may be cut."""

NEAR = 0.4
"""How far from its ideal place, in segments, a cut may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The forward part of a joint graph, in its order."""

    nodes: list[Any]
    place: dict[Any, int]
    """Node -> its number."""
    crossing: list[int]
    """Bytes that later nodes still need after each node."""
    saved: list[int]
    """Bytes that torch saves up to each node."""

    @property
    def total(self) -> int:
        """Bytes that torch saves of it."""
        return self.saved[-1] if self.saved else 0

    def alive(self, at: int) -> list[Any]:
        """Tensors up to a place that later nodes need; of an operator with several results these."""
        found = [node for node in self.nodes[: at + 1] if self._last(node) > at]
        several = [user for node in found if not is_tensor(node) for user in node.users if user in self.place]
        return [node for node in (*found, *several) if is_tensor(node)]

    def _last(self, node: Any) -> int:
        return max((self.place.get(user, -1) for user in node.users), default=-1)


def choose_saved(joint: Any, info: NodeInfo, usual: list[Any], part: float) -> list[Any]:
    """The nodes to save where `part` of what torch would save is computed again instead."""
    forward = _read_forward(joint, info, usual)
    if not part or not forward.total or any(is_opaque(node) for node in forward.nodes):
        return usual
    limit = part * forward.total
    cuts = _cut(forward)
    inside = [at for at in cuts if forward.saved[at] <= limit] or cuts[:1]
    if not inside and part < 1:
        return usual
    # of the last region what follows the last cut is needed at once
    end = inside[-1] if part < 1 else len(forward.nodes) - 1
    again = set(forward.nodes[: end + 1])
    kept = [node for at in inside for node in forward.alive(at)]
    drawn = [_smallest_after(node, forward) for node in forward.nodes[: end + 1] if is_random(node)]
    rest = [node for node in usual if node not in again]
    return list(dict.fromkeys((*info.inputs, *(node for nodes in drawn for node in nodes), *kept, *rest)))


def _read_forward(joint: Any, info: NodeInfo, usual: list[Any]) -> Forward:
    nodes = [node for node in joint.nodes if node.op == "call_function" and info.is_required_fw(node)]
    place = {node: number for number, node in enumerate(nodes)}
    last: dict[Any, int] = {}
    for node in nodes:
        uses = [place[user] for user in node.users if user in place]
        last[storage_of(node)] = max(last.get(storage_of(node), -1), *uses, -1)
    change = [0] * (len(nodes) + 1)
    for node, end in last.items():
        if node in place and end > place[node]:
            change[place[node]] += bytes_of(node)
            change[end] -= bytes_of(node)
    chosen = {storage_of(node) for node in usual}
    crossing, saved, held, sum_saved = [], [], 0, 0
    for number, node in enumerate(nodes):
        held += change[number]
        sum_saved += bytes_of(node) if node in chosen else 0
        crossing.append(held)
        saved.append(sum_saved)
    return Forward(nodes=nodes, place=place, crossing=crossing, saved=saved)


def _cut(forward: Forward) -> list[int]:
    """Where to cut: as often as holds least, if all of the graph is computed again."""
    best: tuple[int, list[int]] | None = None
    for count in SEGMENTS:
        cuts = _cut_into(forward, count)
        ends = [0, *(forward.saved[at] for at in cuts), forward.total]
        holds = sum(forward.crossing[at] for at in cuts) + max(b - a for a, b in pairwise(ends))
        if best is None or holds < best[0]:
            best = holds, cuts
    assert best is not None
    return best[1]


def _cut_into(forward: Forward, count: int) -> list[int]:
    """Up to so many cuts, each at the narrowest place near where equal segments would end."""
    size = forward.total / count
    found: list[int] = []
    for number in range(1, count + 1):
        low, high = (number - NEAR) * size, (number + NEAR) * size
        near = [at for at, saved in enumerate(forward.saved[:-1]) if low <= saved <= high]
        if near:
            found.append(min(near, key=forward.crossing.__getitem__))
    return sorted(dict.fromkeys(found))


def _smallest_after(node: Any, forward: Forward) -> list[Any]:
    """What to save of random numbers: themselves, or what is made of them alone and smaller, such as a mask."""
    results = [
        user for user in node.users if user in forward.place and getattr(user.target, "__name__", "") == "getitem"
    ]
    if results:
        return results
    while len(node.users) == 1:
        (user,) = node.users
        if user not in forward.place or len(user.all_input_nodes) > 1 or bytes_of(user) > bytes_of(node):
            break
        node = user
    return [node]
