"""How a watched program ended -> `Diagnosis`: its last words, or whom the kernel killed and under which limit.

In: `Watched`, the errors that its processes wrote (`child/sitecustomize.py`), readings of the machine before and after, the
kernel's counts and, where it may be read, its log. The log names the victim and what it held; without it the counts say
that somebody was killed, and the process that ended then is the one. A limit that the program inherited is told as a limit.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
from dataclasses import dataclass, replace

from outsize.core.failure import Diagnosis, Evidence, Failure
from outsize.core.footprint import Moment
from outsize.core.memory import Limit, Part, Reading
from outsize.core.noun import Known
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case, process_settings
from outsize.failure.evidence import add_readings
from outsize.failure.explain import NOTHING, diagnose
from outsize.failure.message import read
from outsize.machine import memory
from outsize.machine.cgroup import Counters, read_numbers
from outsize.monitor.processes.tree import ProcessReading
from outsize.monitor.watched import NOTABLE, Watched, growth_by_line, thin

KERNEL_LOG = "/dev/kmsg"
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_BUS = (-signal.SIGBUS, 128 + signal.SIGBUS)
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9]+)")
_LIMITS = {"AS": ("ulimit -v", "VmPeak"), "DATA": ("ulimit -d", "DataPeak")}


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The machine around a run."""

    before: Reading
    """Read before the start."""
    group: tuple[Counters, Counters]
    """The kernel's counts for our control group, before and after."""
    machine: tuple[int | None, int | None]
    """Its count of kills on the whole machine, before and after."""
    log: str
    """What it logged meanwhile; empty where that may not be read."""

    @property
    def kills_in_group(self) -> int:
        """Kills for memory in our control group."""
        return (self.group[1].kills or 0) - (self.group[0].kills or 0)

    @property
    def kills(self) -> int:
        """Kills for memory, wherever."""
        return max(self.kills_in_group, (self.machine[1] or 0) - (self.machine[0] or 0))

    def tells_of(self, pid: int) -> bool:
        """True where the kernel's log says what this process held when it was killed."""
        return re.search(rf"Killed process {pid}\b.*anon-rss:[1-9]", self.log) is not None

    @property
    def limit(self) -> Limit | None:
        """The limit of the container that leaves least."""
        return next(
            (limit for limit in self.before.host.limits if not limit.name.startswith(("ulimit", "commit"))), None
        )


class KernelLog:
    """The kernel's log from now on."""

    def __init__(self) -> None:
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            self._handle = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._handle, 0, os.SEEK_END)

    def close(self) -> str:
        """Lines about kills since it was opened."""
        lines: list[str] = []
        if self._handle is None:
            return ""
        with contextlib.suppress(OSError):  # EAGAIN at its end; EPIPE where it was overwritten meanwhile
            while len(lines) < 100:
                line = os.read(self._handle, 8192).decode("utf-8", "replace").partition(";")[2].partition("\n")[0]
                lines += [line] if "Killed process" in line else []
        os.close(self._handle)
        return "\n".join(lines)


def explain_ending(watched: Watched, folder: pathlib.Path, around: Surroundings) -> Diagnosis:
    """Its last words if it had any, else how it ended."""
    diagnosis, text = NOTHING, ""
    victim = _find_victim(watched, around)
    if watched.status == 0:  # the program may have gone on without one of its processes
        return NOTHING if victim is None else _tell_story(_explain_kill(watched, around, victim, None), watched, around)
    for file in sorted(folder.glob("error.*"), key=lambda file: file.stat().st_mtime):
        head, _, words = file.read_text(errors="replace").partition("\n\n")
        text += words
        failure = read(words)
        if failure is not None and diagnosis.failure is None:
            diagnosis = diagnose(_case(failure, words, watched, around, read_numbers(head)))
    reported = diagnosis.failure is not None and diagnosis.failure.extra.get("signal") == "Killed"
    if (diagnosis.failure is None or reported) and (victim is not None or watched.status in _KILLED + _BUS):
        worker = _WORKER.search(text)
        diagnosis = _explain_kill(watched, around, victim, int(worker.group(1)) if worker else None)
    return diagnosis if diagnosis.failure is None else _tell_story(diagnosis, watched, around)


def _case(failure: Failure, text: str, watched: Watched, around: Surroundings, had: dict[str, int]) -> Case:
    """The case of an error, with the limits of the process that raised it: it may have set them itself. What it held was freed on
    the way out of the error; the kernel keeps the peak of the address space, and what comes and goes in it is data."""
    host = around.before.host
    if {"VmData", "VmPeak", "VmSize"} <= had.keys():
        had = had | {"DataPeak": had["VmData"] + max(0, had["VmPeak"] - had["VmSize"])}
    own = [
        Limit(name=name, bytes=had[key], used=had.get(used), source=f"RLIMIT_{key} of the child")
        for key, (name, used) in _LIMITS.items()
        if key in had
    ]
    others = [limit for limit in host.limits if not limit.name.startswith("ulimit")]
    limits = tuple(sorted((*own, *others), key=lambda limit: limit.available))
    reading = replace(
        around.before,
        rss=had.get("RssAnon", watched.last.bytes if watched.last else watched.peak),
        host=replace(host, limits=limits, available=min([host.available or 0, *(limit.available for limit in limits)])),
    )
    return Case(
        failure=failure,
        text=text,
        reading=reading,
        growth=watched.growth,
        settings=process_settings(),
        watched=True,
        peak=watched.peak,
        library=watched.libraries.get(watched.pid),
    )


def _find_victim(watched: Watched, around: Surroundings) -> ProcessReading | None:
    """The first of the program's processes that the kernel killed: by its log, else by who ended when its count rose. Its
    `anonymous` bytes are what it held then, 0 where unknown; its name is empty where unknown."""
    nothing = ProcessReading(pid=watched.pid, name="", anonymous=0, shared=0, address_space=0)
    for line in around.log.splitlines():
        killed = read(line)
        if killed is not None and killed.pid is not None and (killed.pid in watched.seen or killed.pid == watched.pid):
            known = watched.seen.get(killed.pid, nothing)
            held = max(killed.extra.get("anon_rss_bytes", 0), known.anonymous)
            return replace(known, pid=killed.pid, name=killed.process or "", anonymous=held)
    if around.kills <= 0:
        return None
    if watched.killed:
        return watched.killed[0]
    return replace(nothing, anonymous=watched.peak) if watched.status in _KILLED else None


def _explain_kill(
    watched: Watched, around: Surroundings, victim: ProcessReading | None, worker: int | None
) -> Diagnosis:
    """SIGKILL or SIGBUS: the kernel's counts say whether memory was the reason."""
    limit = around.limit
    extra: dict[str, object] = {"format": "dead child", "peak_bytes": watched.peak, "root_pid": watched.pid}
    pid, name = worker or watched.pid, ""
    if victim is not None:
        pid, name = victim.pid, victim.name
        in_group = around.kills_in_group > 0 or (limit is not None and watched.peak > 0.8 * limit.bytes)
        extra["scope"] = "cgroup" if in_group else "machine"
        held = victim.anonymous
        if in_group and limit and not around.tells_of(victim.pid):
            beside = watched.last.processes if watched.last else ()
            others = sum(process.anonymous for process in beside if process.pid != pid)
            full = (
                limit.available - others if around.kills_in_group > 0 else 0
            )  # it may have grown since the last reading
            held = min(max(held, full), limit.bytes)
        extra |= {"anon_rss_bytes": held} if held else {}
        extra |= {"asked_bytes": victim.asked} if victim.asked > 1.25 * held + NOTABLE else {}
    else:
        extra["signal"] = "Bus error" if watched.status in _BUS else "Killed"
    is_worker = worker == pid or name.startswith("pt_data")
    failure = Failure(
        framework="linux",
        limit_bytes=limit.bytes if extra.get("scope") == "cgroup" and limit else None,
        pid=pid,
        process="DataLoader worker" if is_worker else name or (watched.seen[pid].name if pid in watched.seen else None),
        extra=extra,
    )
    diagnosis = diagnose(
        Case(
            failure=failure,
            reading=memory(),
            growth=watched.growth,
            watched=True,
            peak=watched.peak,
            library=watched.libraries.get(pid) or watched.libraries.get(watched.pid),
        )
    )
    if around.kills <= 0:
        return diagnosis
    times = "once" if around.kills == 1 else f"{around.kills} times"
    counted = Evidence(kind="machine", text=f"the kernel killed {times} for memory while it ran")
    return replace(diagnosis, evidence=(*diagnosis.evidence, counted))


def _tell_story(diagnosis: Diagnosis, watched: Watched, around: Surroundings | None = None) -> Diagnosis:
    """The diagnosis with peak, timeline and who grew."""
    highest = max(watched.moments, key=lambda moment: moment.bytes, default=Moment(time=0, bytes=0))
    when = f", {highest.time:.1f} s after its start" if highest.bytes >= watched.peak else ""
    texts = [f"the program held {said(watched.peak)} of RAM at its peak{when}"]
    if around is not None and (around.group[1].peak or 0) > (around.group[0].peak or 0) and around.limit is not None:
        texts.append(f"its control group held {said(around.group[1].peak)} at its peak, file pages included")
    lines = growth_by_line(watched).most_common(5)
    if lines and lines[0][1] >= NOTABLE:
        texts.append(f"it grew most at {lines[0][0]}: {said(lines[0][1])}")
    holders = [
        Part(name=f"grew at {line}", bytes=grown, known=Known.ESTIMATE)
        for line, grown in lines
        if grown >= NOTABLE // 4
    ]
    if len(watched.seen) > 1:
        ranked = sorted(watched.seen.values(), key=lambda process: -process.anonymous)[:5]
        holders += [
            Part(name=f"pid {process.pid} {process.name}", bytes=process.anonymous, known=Known.EXACT)
            for process in ranked
        ]
    return replace(
        diagnosis,
        evidence=add_readings(diagnosis.evidence, texts),
        holders=tuple(holders),
        timeline=thin(watched),
    )
