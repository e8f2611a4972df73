"""What is seen of a program that runs under `outsize run`: its memory over time, its growing lines, and whom the kernel
killed.

In: readings of its process tree, each with the kernel's count of kills. Out: `Watched`, from which `ending` makes a
diagnosis. A process that ends just when the count rises is the one that was killed; one that ended with another status is
not.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

from outsize.core.footprint import Moment
from outsize.monitor.processes.tree import ProcessReading, TreeReading

NOTABLE = 64 * 2**20
"""Growth in bytes that is worth a word in the report."""
_MOMENTS = 4096


@dataclass(kw_only=True)
class Watched:
    """What was seen of a child."""

    command: list[str]
    pid: int
    began: float
    """Seconds since the epoch."""
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_MOMENTS))
    """Bytes of the tree over time, in seconds since the start."""
    peak: int = 0
    """The most the tree held at a reading, or one of its processes at any time: the kernel counts the latter without
    gaps."""
    last: TreeReading | None = None
    """The last reading of it alive."""
    seen: dict[int, ProcessReading] = field(default_factory=dict)
    """Every process of the tree, with the most that was seen of each number."""
    libraries: dict[int, str] = field(default_factory=dict)
    """Process -> framework for tensors it has loaded."""
    killed: list[ProcessReading] = field(default_factory=list)
    """Processes that the kernel killed for memory, the first first."""
    kills: int = 0
    """The kernel's count of kills at the last reading."""
    lines: Counter[str] = field(default_factory=Counter)
    """Bytes of growth between two stacks a few milliseconds apart that were in the same line: what that line does."""
    passed: Counter[str] = field(default_factory=Counter)
    """Bytes of growth since the stack before, by the line reached then: also counts lines that only wait."""
    stacks: int = 0
    """How often it was asked where it is."""
    largest: int | None = None
    """The most that one of its processes held, file pages included, as the kernel counted it."""
    seconds: float = 0.0
    status: int = 0
    """Exit status as subprocess gives it: negative for a signal."""
    _alive: set[int] = field(default_factory=set)
    _unexplained: int = 0

    def note(self, tree: TreeReading, kills: int) -> None:
        """Take one reading, and the kernel's count of kills read after it."""
        alive = [process for process in tree.processes if process.ended is None]
        ended = {process.pid: process.ended for process in tree.processes if process.ended is not None}
        if alive:
            self.last = TreeReading(time=tree.time, processes=tuple(alive))
            self.moments.append(Moment(time=tree.time - self.began, bytes=self.last.bytes))
            self.peak = max(self.peak, self.last.bytes, *(process.highest for process in alive))
        for process in alive:
            before = self.seen.get(process.pid, process)
            names = ("anonymous", "shared", "address_space", "highest", "files", "asked")
            most = {name: max(getattr(before, name), getattr(process, name)) for name in names}
            self.seen[process.pid] = replace(process, **most)
        self._unexplained += kills - self.kills
        self.kills = kills
        gone = self._alive - {process.pid for process in alive}
        lost = [self.seen[pid] for pid in gone if ended.get(pid, -signal.SIGKILL) == -signal.SIGKILL]
        victims = sorted(lost, key=lambda process: -process.anonymous)[: self._unexplained]
        self.killed += victims
        self._unexplained -= len(victims)
        self._alive = {process.pid for process in alive}

    @property
    def growth(self) -> int | None:
        """Bytes by which it grew in its last minute, None where that is nothing to speak of."""
        if len(self.moments) < 2:
            return None
        end = self.moments[-1]
        start = next(moment for moment in self.moments if moment.time >= end.time - 60)
        return end.bytes - start.bytes if end.bytes - start.bytes >= NOTABLE else None


def growth_by_line(watched: Watched) -> Counter[str]:
    """The growth that was seen, shared out by what grew while a line was watched; a line only passed by counts for
    little."""
    weights = {line: watched.lines[line] + watched.passed[line] // 1000 for line in watched.passed}
    total, grown = sum(weights.values()), sum(watched.passed.values())
    return Counter({line: grown * weight // total for line, weight in weights.items()}) if total else Counter()


def thin(watched: Watched, most: int = 60) -> tuple[Moment, ...]:
    """The course of it in at most `most` moments, its peak and end among them."""
    moments = list(watched.moments)
    if len(moments) <= most:
        return tuple(moments)
    edges = [index * len(moments) // most for index in range(most + 1)]
    chosen = [max(moments[low:high], key=lambda moment: moment.bytes) for low, high in pairwise(edges)]
    return (*chosen[:-1], moments[-1])
