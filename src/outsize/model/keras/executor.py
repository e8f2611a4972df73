"""The order in which TensorFlow's executor runs a graph, and what it frees when.

A node is ready when all that it reads or awaits has run. Cheap nodes run at once, in the order in which they became ready;
of the others one goes on in the same thread and the rest wait for a thread (`ExecutorState::ScheduleReady`). An input is let
go when its reader has run. On a card every node is cheap: its kernel is only handed over.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from math import prod
from typing import NamedTuple

from outsize.model.keras.any_order import Lives
from outsize.model.keras.buffers import Buffer, Memory, Tensor
from outsize.model.keras.graph import Flat
from outsize.model.keras.kernels import Kernels

LIGHT = frozenset(("NoOp", "Identity", "Reshape", "Shape", "ReadVariableOp", "Const"))
CHEAP = 2**15
"""Bytes that a node reads and gives below which it costs less than handing it to a thread."""


class Order(NamedTuple):
    """Which of the ready nodes runs next."""

    threads: int
    """Threads that run nodes; 0 where one thread runs all of them, in the order in which they became ready (a card)."""
    in_place: bool = True
    """Operators write over inputs that nobody else reads."""
    seed: int = -1
    """Takes any ready node, and any time for it, by these random numbers; -1 for what is likely."""


class Executor:
    """Runs graphs on tensors without contents."""

    def __init__(self, memory: Memory, order: Order, lives: Lives | None = None) -> None:
        self.memory, self.order = memory, order
        self.lives = lives
        """Who makes and reads what is noted here."""
        self._depth, self._now = 0, -1
        self.chance = None if order.seed < 0 else random.Random(order.seed)
        self.kernels = Kernels(memory, lambda _, flat, given: self.run(flat, given, 1), self._writes_over)

    def run(self, flat: Flat, given: list[Tensor], threads: int | None = None) -> list[Tensor]:
        """The graph's outputs, each held once; takes over one hold of each argument."""
        pending = list(flat.pending)
        made: dict[tuple[int, int], Tensor] = {}
        queue = _Queue(flat, self.order.threads > 0, self.chance)
        for place, tensor in zip(flat.inputs, given, strict=True):
            self.memory.keep(tensor.buffer, flat.uses.get((place, 0), 0))
            self.memory.drop(tensor.buffer)
            made[place, 0] = tensor
        arguments = set(flat.inputs)
        roots = [number for number, count in enumerate(pending) if count == 0 and flat.needed[number]]
        queue.begin([number for number in roots if number not in arguments])
        for place in flat.inputs:
            if flat.needed[place]:
                queue.begin(_ready(flat, place, pending))
        self._depth += 1
        self._work(flat, made, pending, queue, max(1, self.order.threads) if threads is None else threads)
        self._depth -= 1
        return [made[each] for each in flat.outputs]

    def _work(
        self, flat: Flat, made: dict[tuple[int, int], Tensor], pending: list[int], queue: _Queue, threads: int
    ) -> None:
        """Threads take nodes as they come free; what a node reads is held until its time is over."""
        running: list[tuple[float, int, int, _Running]] = []
        inline: list[deque[int]] = [deque() for _ in range(threads)]
        idle, now, count = list(range(threads)), 0.0, 0
        while True:
            for thread in sorted(idle):
                number = queue.next(inline[thread])
                if number is not None:
                    idle.remove(thread)
                    node = self._start(flat, number, made)
                    heapq.heappush(running, (now + node.cost, count, thread, node))
                    count += 1
            if not running:
                return
            now, _, thread, node = heapq.heappop(running)
            self._finish(flat, node)
            queue.done(_ready(flat, node.number, pending), node.size, inline[thread])
            idle.append(thread)

    def _start(self, flat: Flat, number: int, made: dict[tuple[int, int], Tensor]) -> _Running:
        node = flat.nodes[number]
        given = [made[source] for source in node.inputs]
        lives = self.lives if self._depth == 1 else None
        if lives is not None:
            self._now = number
            lives.begins(number, given, self.memory)
        results = self.kernels.execute(node, given, flat)
        if lives is not None:
            lives.made(number, node.type, self.memory)
        unread: list[Buffer] = []
        for place, tensor in enumerate(results):
            uses = flat.uses.get((number, place), 0)
            made[number, place] = tensor
            self.memory.keep(tensor.buffer, uses)
            if tensor.buffer is not None and not uses:
                self.memory.keep(tensor.buffer)
                unread.append(tensor.buffer)
        size = sum(tensor.bytes for tensor in results)
        cost = (size + sum(tensor.bytes for tensor in given) + _products(node.type, given, results)) / FAST
        if self.chance is not None:
            cost *= self.chance.random()
        return _Running(number, given, unread + self.kernels.let_go(), size, cost)

    def _writes_over(self, buffer: Buffer) -> bool:
        """True if the operator that runs may write over an input that nobody else will read: in this order, or in every one."""
        if self.lives is None:
            return self.order.in_place
        return self._depth == 1 and self.lives.surely_last(buffer, self._now)

    def _finish(self, flat: Flat, node: _Running) -> None:
        for tensor in node.given:
            self.memory.drop(tensor.buffer)
        for buffer in node.dropped:
            self.memory.drop(buffer)


class _Running(NamedTuple):
    number: int
    given: list[Tensor]
    dropped: list[Buffer]
    """Buffers that it holds once and that nobody reads after it."""
    size: int
    """Bytes of its results."""
    cost: float


FAST = 1e4
"""Bytes that pass while a node is handed on."""


def _products(kind: str, given: list[Tensor], results: list[Tensor]) -> float:
    """Work of products and convolutions beyond their bytes, in bytes that would take as long."""
    if not results or ("MatMul" not in kind and "Conv2D" not in kind):
        return 0.0
    sizes = sorted(prod(tensor.shape) for tensor in (*given[:2], results[0]))
    return float(max(1, prod(sizes)) ** 0.5 / 4)


def _ready(flat: Flat, number: int, pending: list[int]) -> list[int]:
    """Readers of a node that wait for nothing else."""
    found = []
    for reader in flat.readers[number]:
        pending[reader] -= 1
        if pending[reader] == 0:
            found.append(reader)
    return found


class _Queue:
    """Nodes that may run."""

    def __init__(self, flat: Flat, threads: bool, chance: random.Random | None) -> None:
        self.flat, self.threads, self.chance = flat, threads, chance
        self.waiting: deque[int] = deque()

    def begin(self, numbers: list[int]) -> None:
        """Nodes that wait for nothing go to threads, one by one."""
        self.waiting.extend(numbers)

    def next(self, inline: deque[int]) -> int | None:
        """The node that a thread runs now: one of its own first."""
        for queue in (inline, self.waiting):
            if queue and self.chance is not None:
                queue.rotate(self.chance.randrange(len(queue)))
            if queue:
                return queue.popleft()
        return None

    def done(self, ready: list[int], size: int, inline: deque[int]) -> None:
        """Nodes that became ready when one had run in a thread, whose results have `size` bytes."""
        if not self.threads or self.chance is not None:
            self.waiting.extend(ready)
            return
        last: int | None = None
        for number in ready:
            if size < CHEAP or self.flat.nodes[number].type in LIGHT:
                inline.append(number)
                continue
            if last is not None:
                self.waiting.appendleft(last)
            last = number
        if last is not None:
            if inline:
                self.waiting.appendleft(last)
            else:
                inline.append(last)
