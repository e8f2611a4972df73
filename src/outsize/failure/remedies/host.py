"""Remedies for a host: limits, shared memory, and holding less."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.failure import signs
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import CONTAINER, framework
from outsize.failure.remedies.texts import remedy
from outsize.failure.signs import IN_A_POD, JOB_KILL, POOL_OF_JAVA
from outsize.failure.work import Work

_NOT_RAISED = ("java-reserve",)
"""Wordings of a limit that was too high."""


def raise_limit(case: Case) -> Iterator[Remedy]:
    """More of what the machine has, at least what is known to be needed, and not more than there is."""
    failure = case.failure
    whose = "slurm" if JOB_KILL.search(case.text) else "kubernetes" if IN_A_POD.search(case.text) else failure.framework
    raising = framework(whose).raising
    limit = failure.limit_bytes or (case.biting.bytes if case.biting else None)
    if (
        failure.framework in ("openvino", "matlab") or case.format in _NOT_RAISED or POOL_OF_JAVA.search(case.text)
    ):  # the driver's largest buffer, which nobody raises; MATLAB has a way of its own
        return
    known = case.known_need
    if case.on_device and case.need is not None and case.held is not None:
        known = max(known or 0, case.held + case.need)
    in_group = case.failure.extra.get("scope") == "cgroup" or case.extra("anon_rss_bytes")
    if raising is None and (case.on_device or (limit is None and not in_group)):  # no container limits a card
        return
    most = case.reading.host.total if case.reading is not None else case.told_ram
    want = max(known or 0, limit or 0) * 3 // 2
    if limit is None and want < 2**28:  # what one small victim held says little about the limit
        want = 16 * 2**30
    if (
        limit is not None and limit < 2**24 and (known or 0) < 2**24
    ):  # no program of today does with that: a unit was misread
        want = 2**30
    if most is not None and want > most:
        want = most
    if (limit is not None and want <= limit * (1 if most is None else 1.1)) or (known is not None and want < known):
        return
    heaps = list(dict.fromkeys(re.findall(r"-Xmx[0-9]+[kKmMgG]?", case.text)))
    if failure.framework == "java" and len(heaps) > 1:
        yield remedy("one_heap", last=heaps[-1], first=heaps[0])
    mib = -(-want // 2**20)
    name, how = raising or CONTAINER
    gives = None if limit is None else mib * 2**20 - limit
    how = how.format(mib=mib, bytes=mib << 20, more=mib - (limit or 0) // 2**20)
    yield make_remedy(name, gives, how, "memory that others on the machine then do not have")


def data_by_batches(case: Case) -> Iterator[Remedy]:
    """One tensor that holds all the data, in RAM: no batch of training makes it smaller."""
    if case.makes_tensor and case.on_host and (case.need or 0) >= 2**30:
        yield remedy("data_by_batches", case.need)


def results_by_batches(case: Case) -> Iterator[Remedy]:
    """What every batch gave, put together in RAM at the end: no batch makes that smaller."""
    if case.joins_results and case.on_host and (case.need or 0) >= 2**30:
        yield remedy("results_by_batches", case.need)


def see_which_limit(case: Case) -> Iterator[Remedy]:
    """The text itself says that memory is free."""
    if case.told_enough and case.on_host and not case.on_windows:
        yield remedy("see_which_limit")


def lift_ulimit(case: Case) -> Iterator[Remedy]:
    """`ulimit -v` counts address space, not memory."""
    limit = case.biting
    if limit is not None and limit.name.startswith("ulimit"):
        gives = 0 if case.reading is None else (case.reading.host.total or 0) - limit.bytes
        yield remedy("lift_ulimit", gives if gives > 0 else None, name=limit.name)


def wider_program(case: Case) -> Iterator[Remedy]:
    """A Python of 32 bits."""
    if case.narrow and not case.failure.extra.get("narrow"):
        yield remedy("wider_program")


def larger_page_file(case: Case) -> Iterator[Remedy]:
    """Windows promises only what RAM and the page file have together."""
    if case.on_windows and case.on_host and not case.is_beyond_page_file:
        yield remedy("larger_page_file")


def larger_page_file_too(case: Case) -> Iterator[Remedy]:
    """The same, after what makes a large request smaller."""
    if case.on_windows and case.on_host and case.is_beyond_page_file:
        yield remedy("larger_page_file")


def add_swap(case: Case) -> Iterator[Remedy]:
    """A short peak then ends in slowness instead of a kill."""
    if case.format != "kubernetes-evicted":  # its nodes have none, as a rule
        yield remedy("add_swap")


def more_shm(case: Case) -> Iterator[Remedy]:
    """Room for batches in flight."""
    shm = case.reading.shm if case.reading else None
    now = shm.total if shm is not None and shm.total is not None else 64 * 2**20
    gives = 8 * 2**30 - now if now < 8 * 2**30 else None
    if signs.NO_CONTAINER.search(case.text) is not None:
        yield remedy("larger_shm", gives)
    else:
        yield remedy("more_shared_memory", gives)
    yield remedy("fewer_batches_in_flight")
    yield remedy("no_workers")


def more_for_the_build(case: Case) -> Iterator[Remedy]:
    """An image is built inside a machine, or a container, of its own."""
    if case.in_image_build:
        yield remedy("more_for_the_build")


def see_what_it_takes(case: Case) -> Iterator[Remedy]:
    """The last resort, for a program that nothing here knows."""
    how = "/usr/bin/time -v COMMAND   # Maximum resident set size, against `free -g`, `ulimit -a` and the container's limit"
    if case.failure.device is None and not case.on_host:
        how += "; nvidia-smi where it uses a card"
    if case.on_mac:
        how = "/usr/bin/time -l COMMAND   # maximum resident set size, against the memory in Activity Monitor"
    if case.on_windows:
        how = "Task Manager > Details > Peak working set, against Performance > Memory"
    yield remedy("see_what_it_takes", how=how)


def see_who_holds_ram(case: Case) -> Iterator[Remedy]:
    """The machine was full, and nothing says of whom."""
    if not case.may_be_python and case.failure.process is None and not case.on_windows:
        yield remedy("see_who_holds_ram")


def less_for_the_victim(case: Case) -> Iterator[Remedy]:
    """The kernel names whom it killed, and it is no program of Python."""
    name = case.failure.process
    if name is not None and not case.may_be_python and not case.on_windows and case.failure.framework == "linux":
        yield remedy("less_for_the_victim", name=name)


def who_sent_it(case: Case) -> Iterator[Remedy]:
    """A kill that the container's own limit did not make."""
    if case.spared_by_limit:
        yield remedy("who_sent_it")


def stop_growing(case: Case) -> Iterator[Remedy]:
    """RAM that a log shows rising."""
    in_ram = case.place == "cpu" or case.failure.extra.get("signal") == "Killed"
    told = case.failure.framework == "unknown" or (case.failure.framework == "pytorch" and case.on_host)
    if not (case.rise or (told and (case.grows or case.says_rising))) or not in_ram or case.watched:
        return
    how = "fewer workers, smaller shuffle and prefetch buffers, queues with a length"
    if case.may_be_python:
        how += "   # outsize run your_script.py names the line"
    yield remedy("stop_growing", how=how)


def see_whether_it_was_memory(case: Case) -> Iterator[Remedy]:
    """A kill that nobody explains: what tells comes before any cure."""
    if case.watched or case.in_image_build or case.failure.process is not None or case.on_windows:
        return
    how = "dmesg -T | grep -i 'killed process'   # or journalctl -k; free -g; what it held: anon-rss"
    if case.may_be_python:
        how += "; outsize run your_script.py: what grew"
    if case.on_mac:
        how = "log show --last 1h --predicate 'eventMessage contains \"memorystatus\"'   # and Activity Monitor while it runs"
    yield remedy("see_whether_it_was_memory", how=how)


def _who_grows() -> Remedy:
    return remedy("who_grows")


def in_frames(case: Case) -> Iterator[Remedy]:
    """Tables of pandas: fewer columns, narrower types, pieces; a join whose keys repeat multiplies rows."""
    if not case.on_device and case.in_frames:
        merges = "merge" in case.text
        then = "and see whether keys repeat: df.key.duplicated().sum()" if merges else "or chunksize= when it is read"
        yield remedy("in_frames", case.need, then=then)


def lighter_weights(case: Case) -> Iterator[Remedy]:
    """A model that is read into RAM before it goes anywhere."""
    reads = case.on_host and case.on_torch and case.work is Work.LOADS
    if reads or (case.loads_shards and not case.on_device):
        yield remedy("lighter_weights_in_ram")


def name_the_victim(case: Case) -> Iterator[Remedy]:
    """A kernel's log that breaks off before it names whom it killed."""
    if (
        case.failure.framework == "linux"
        and case.format not in ("dead child", "earlyoom")
        and case.failure.process is None
    ):
        yield remedy("name_the_victim")


def see_what_fills_ram(case: Case) -> Iterator[Remedy]:
    """A small request of a Python program: what fills RAM is elsewhere (weights, copies of them in each rank, workers)."""
    if case.on_host and not case.watched and case.may_be_python and case.failure.framework not in ("linux", "c++"):
        yield _who_grows()


def less_in_ram(case: Case) -> Iterator[Remedy]:
    """A process that holds too much of the host."""
    if not case.may_be_python or case.on_torch or case.failure.process == "DataLoader worker":
        return
    data_first = case.has_line or (case.names_data and case.need is None)
    if not case.watched and not data_first:
        yield _who_grows()
    mib = min(2**31, (case.host_room or 2**32) // 2) // 2**20
    if mib and case.library is None and (case.spec is None or case.spec.bytes < 2**26):
        text = "   # text: for line in file, not file.read()" if case.has_line else ""
        yield remedy("less_in_ram", mib=mib, text=text)
    if not case.watched and data_first:
        yield _who_grows()
