"""A machine or a process tree watched from outside: `Outside.read()` gives what is new, until the process has gone.

Processes that watch themselves (`outsize.watch()`, or started by us) publish their allocators and findings; these are
merged in. Where the limit comes near at the present rate, a note says so once, and again each time the time left has
halved. Where memory rises too unevenly to say when, it says when that may be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from outsize.core.errors import InputError
from outsize.core.outcomes.outlook import Outlook, host_outlook
from outsize.core.outcomes.recording import AllocatorSample, Finding, Head, Mark, Note, Recording, Sample
from outsize.core.units import format_span
from outsize.machine import memory
from outsize.monitor.history import History
from outsize.monitor.pace import Paced, Pause
from outsize.monitor.processes.access import why_unseen
from outsize.monitor.processes.tree import TreeReading, read_process
from outsize.monitor.publication import Publication, is_ours, read_publication, user_folder
from outsize.monitor.recorder import Item
from outsize.monitor.sampler import Sampler
from outsize.monitor.tree_growth import TreeGrowth

_SOON = 600.0
"""Seconds to the limit from which on it is said."""


_START, _NOW = 10.0, 60.0
"""In its first seconds a program loads itself, and fast: then only a limit that is seconds away is spoken of. So it is where
nobody knows when it is reached."""
_FAR_AGAIN = 8
"""Where so many times the time of the next warning is left, the danger is over, and warnings begin anew."""


class Outside:
    """What is seen of a process tree, or of the machine where `pid` is None."""

    def __init__(
        self, pid: int | None, *, command: Sequence[str] = (), folder: str | None = None, interval: float = 0.1
    ) -> None:
        if pid is not None and read_process(pid) is None:
            raise InputError(why_unseen(pid))
        words = tuple(command) or (() if pid is None else read_command(pid))
        self.head = Head(command=words, pid=pid, started=time.time(), interval=interval, machine=memory())
        self.history = History()
        self._pause = Pause(interval)
        self._spent = time.process_time()
        self._interval = interval
        self._folders = [folder] if folder else []
        self._sampler = Sampler(pid, self.head.started, self._tell)
        self._published: dict[int, Publication] = {}
        self._look_up = Paced(self._read_publications, every=0.5, share=0.002)
        self._pids: tuple[int, ...] = () if pid is None else (pid,)
        self._tree_growth = TreeGrowth()
        self._said: set[Finding | str] = set()
        self._open: dict[int, tuple[Finding, ...]] = {}
        self._soon, self._slow = _SOON, False
        self._outlook = Paced(lambda: host_outlook(self.history.samples), every=1.0, share=0.001)

    @property
    def pause(self) -> float:
        """Seconds to wait before the next reading, so that the cost stays bounded."""
        return self._pause.seconds

    def read(self, tree: TreeReading | None = None) -> list[Item] | None:
        """What is new since the last time; None where the process has gone."""
        self._look_up(time.monotonic())
        last = max(self._published.values(), key=lambda one: one.time, default=None)
        sample = self._sampler.read(tree, step=last.step if last else None, phase=last.phase if last else "")
        if sample is None:
            return None
        self._pids = tuple(process.pid for process in sample.processes)
        items = self._keep([sample, *self._news(sample)])
        before, self._spent = self._spent, time.process_time()
        self._pause.note(self._spent - before)
        if (
            self.head.pid is not None
            and sample.process_count > 50
            and self.pause > 3 * self._interval
            and not self._slow
        ):
            self._slow = True
            seconds = f"{self.pause:.1f} s"
            items += self.note(
                f"{sample.process_count:,} processes: they are read every {seconds}, to keep the cost low"
            )
        return items

    def close(self, name: str) -> list[Item]:
        """The end: what is left to say."""
        self._read_publications()
        now = time.time() - self.head.started
        return self._keep([*self._news(None), Mark(time=now, kind="end", name=name)])

    def recording(self) -> Recording:
        """Everything so far as one value."""
        complete = any(mark.kind == "end" for mark in self.history.marks)
        return self.history.recording(self.head, complete)

    def note(self, text: str) -> list[Item]:
        """Say something once."""
        return self._keep(self._note(text))

    def _keep(self, items: list[Item]) -> list[Item]:
        for item in items:
            self.history.add(item)
        return items

    def _news(self, sample: Sample | None) -> list[Item]:
        """Findings and notes that were not said yet."""
        now = time.time() - self.head.started
        items: list[Item] = []
        for publication in self._published.values():
            items += [replace(finding, time=now) for finding in publication.findings if self._is_new(finding)]
            before = self._open.get(publication.pid, ())
            left = {_culprit(finding) for finding in publication.findings}
            items += [replace(finding, time=now, ended=True) for finding in before if _culprit(finding) not in left]
            self._open[publication.pid] = publication.findings
            for note in publication.notes:
                items += self._note(note.text)
        if sample is not None:
            if self.head.pid is not None:
                items += list(self._tree_growth.add(sample))
            for text in self._sampler.news():
                items += self._note(text)
            items += self._warn()
        return items

    def _warn(self) -> list[Item]:
        outlook = self._outlook(time.monotonic())
        if outlook is None:
            return []
        left, last = outlook.middle, self.history.samples[-1]
        self._soon = _SOON if left > _FAR_AGAIN * self._soon else self._soon
        if left >= self._soon or not warns(outlook, last.time):
            return []
        self._soon = left / 2
        host = last.host
        culprits = [finding.text for one in self._published.values() for finding in one.findings]
        who = f"; {culprits[0]}" if culprits else ""
        span = format_span(outlook.earliest, outlook.latest)
        when = (
            f"is full in {span} at this rate" if outlook.is_known else f"may be full in {span}: memory rises unevenly"
        )
        text = f"{host.limit_name} {when}{who}"
        return self._note(text)

    def _is_new(self, finding: Finding) -> bool:
        key = replace(finding, time=0.0, full_in=None)
        fresh = key not in self._said
        self._said.add(key)
        return fresh

    def _note(self, text: str) -> list[Item]:
        if text in self._said:
            return []
        self._said.add(text)
        note = Note(time=time.time() - self.head.started, text=text)
        return [note]

    def _tell(self) -> tuple[AllocatorSample, ...]:
        return tuple(one for publication in self._published.values() for one in publication.allocators)

    def _read_publications(self) -> None:
        own = user_folder()
        folders = [*self._folders, *([own] if is_ours(own) else [])]
        for pid in self._pids:
            for folder in folders:
                found = read_publication(folder, pid)
                if found is not None and found.pid == pid:
                    self._published[pid] = found
                    break


def warns(outlook: Outlook, seen: float) -> bool:
    """True where an outlook is near enough to be warned of, after so many seconds."""
    if outlook.is_known:
        return outlook.middle < (_SOON if seen >= _START else _NOW)
    return outlook.middle < min(_NOW, seen / 2)


def _culprit(finding: Finding) -> tuple[str, str, str | None, str | None]:
    return finding.kind, finding.device, finding.name, finding.where


def read_command(pid: int) -> tuple[str, ...]:
    """The words a process was started with, empty where they cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return tuple(os.fsdecode(word) for word in file.read(65536).split(b"\0") if word)
    except OSError:
        return ()
