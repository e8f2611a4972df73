"""The largest flow through a network, which is its smallest cut: Dinic's algorithm (1970) on lists."""

from __future__ import annotations

from collections import deque


class Network:
    """Directed edges with capacities."""

    def __init__(self, size: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(size)]
        self.to: list[int] = []
        self.room: list[float] = []
        """What an edge can still carry; an edge and its reverse stand side by side."""

    def add(self, start: int, end: int, capacity: float) -> None:
        self.edges[start].append(len(self.to))
        self.to.append(end)
        self.room.append(capacity)
        self.edges[end].append(len(self.to))
        self.to.append(start)
        self.room.append(0)

    def flow(self, source: int, sink: int) -> float:
        """The largest flow."""
        total: float = 0
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return total
            total += self._block(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        level = [-1] * len(self.edges)
        level[source] = 0
        left = deque((source,))
        while left and level[sink] < 0:
            node = left.popleft()
            for edge in self.edges[node]:
                end = self.to[edge]
                if self.room[edge] > 0 and level[end] < 0:
                    level[end] = level[node] + 1
                    left.append(end)
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> float:
        """Fills every shortest path."""
        next_edge = [0] * len(self.edges)
        total: float = 0
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                least = min(self.room[edge] for edge in path)
                total += least
                first = len(path)
                for number, edge in enumerate(path):
                    self.room[edge] -= least
                    self.room[edge ^ 1] += least
                    if first == len(path) and self.room[edge] == 0:
                        first = number
                node = self.to[path[first] ^ 1]
                del path[first:]
                continue
            edges = self.edges[node]
            while next_edge[node] < len(edges):
                edge = edges[next_edge[node]]
                if self.room[edge] > 0 and level[self.to[edge]] == level[node] + 1:
                    break
                next_edge[node] += 1
            if next_edge[node] < len(edges):
                path.append(edge)
                node = self.to[edge]
            elif not path:
                return total
            else:
                level[node] = -1
                node = self.to[path.pop() ^ 1]
