"""Remedies for a host: limits, shared memory, and holding less."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.failure.advice import APPROXIMATE, ROUNDING
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import CONTAINER

_NOT_RAISED = ("java-reserve", "matlab-help")
"""Wordings of a limit that was too high, or that nobody set."""


def raise_limit(case: Case) -> Iterator[Remedy]:
    """More of what the machine has, at least what is known to be needed, and not more than there is."""
    failure, raising = case.failure, case.framework.raising
    limit = failure.limit_bytes or (case.biting.bytes if case.biting else None)
    if (
        failure.framework == "openvino" or case.format in _NOT_RAISED
    ):  # the driver's largest buffer, which nobody raises
        return
    known = case.known_need
    if case.on_device and case.need is not None and case.held is not None:
        known = max(known or 0, case.held + case.need)
    in_group = case.failure.extra.get("scope") == "cgroup" or case.extra("anon_rss_bytes")
    if limit is None and raising is None and not in_group:
        return
    most = case.reading.host.total if case.reading is not None else None
    want = max(known or 0, limit or 0) * 3 // 2
    if limit is None and want < 2**28:  # what one small victim held says little about the limit
        want = 16 * 2**30
    if most is not None and want > most:
        want = most
    if (limit is not None and want <= limit) or (known is not None and want < known):
        return
    mib = -(-want // 2**20)
    name, how = raising or CONTAINER
    gives = None if limit is None else mib * 2**20 - limit
    yield make_remedy(
        name,
        gives,
        how.format(mib=mib, bytes=mib << 20, more=mib - (limit or 0) // 2**20),
        "memory that others on the machine then do not have",
    )


def lift_ulimit(case: Case) -> Iterator[Remedy]:
    """`ulimit -v` counts address space, not memory."""
    limit = case.biting
    if limit is not None and limit.name.startswith("ulimit"):
        gives = 0 if case.reading is None else (case.reading.host.total or 0) - limit.bytes
        yield make_remedy(
            "lift the limit on address space",
            gives if gives > 0 else None,
            f"{limit.name} unlimited   # in the shell or job script",
            "a runaway process is then stopped by the machine only",
            known=Known.EXACT,
        )


def larger_page_file(case: Case) -> Iterator[Remedy]:
    """Windows promises only what RAM and the page file have together."""
    if case.on_windows and case.on_host:
        yield make_remedy(
            "enlarge the page file",
            None,
            "Advanced system settings > Performance > Advanced > Virtual memory: system managed, or twice the RAM",
            "disk; slow once it is used",
        )


def add_swap(case: Case) -> Iterator[Remedy]:
    """A short peak then ends in slowness instead of a kill."""
    how = "fallocate -l 16G /swapfile && chmod 600 /swapfile && mkswap /swapfile && swapon /swapfile"
    name = "add swap, so that a short peak is slow instead of deadly"
    yield make_remedy(name, None, how, "disk, and time while it is used")


def more_shm(case: Case) -> Iterator[Remedy]:
    """Room for batches in flight."""
    shm = case.reading.shm if case.reading else None
    now = shm.total if shm is not None and shm.total is not None else 64 * 2**20
    gives = 8 * 2**30 - now if now < 8 * 2**30 else None
    how = "docker run --shm-size=8g ...   # Kubernetes: emptyDir, medium: Memory"
    yield make_remedy("give the container shared memory", gives, how, "counts as RAM of the container")
    how = "DataLoader(..., num_workers=2, prefetch_factor=1)   # workers x prefetch_factor batches live there"
    yield make_remedy("fewer batches in flight", None, how, "slower loading")
    how = "DataLoader(..., num_workers=0)"
    yield make_remedy("no workers: no shared memory at all", None, how, "loading no longer overlaps the work")


def more_for_the_build(case: Case) -> Iterator[Remedy]:
    """An image is built inside a machine, or a container, of its own."""
    if case.in_image_build:
        yield make_remedy(
            "give Docker more memory, or do less at once in that step",
            None,
            "Docker Desktop > Settings > Resources > Memory: 8 GB   # and less at once: make -j2, pip --no-cache-dir",
            "memory that others on the machine then do not have",
        )


def see_what_it_takes(case: Case) -> Iterator[Remedy]:
    """The last resort, for a program that nothing here knows."""
    how = "/usr/bin/time -v COMMAND   # Maximum resident set size, against `free -g`, `ulimit -a` and the container's limit"
    if case.on_mac:
        how = "/usr/bin/time -l COMMAND   # maximum resident set size, against the memory in Activity Monitor"
    if case.on_windows:
        how = "Task Manager > Details > Peak working set, against Performance > Memory"
    yield make_remedy("see what it takes and what it may have, then give it less at once", None, how)


def see_who_holds_ram(case: Case) -> Iterator[Remedy]:
    """The machine was full, and nothing says of whom."""
    if not case.may_be_python and case.failure.process is None and not case.on_windows:
        how = "ps -eo rss,comm --sort=-rss | head   # the largest first; then give that one less, or the machine more"
        yield make_remedy("see who holds RAM", None, how)


def less_for_the_victim(case: Case) -> Iterator[Remedy]:
    """The kernel names whom it killed, and it is no program of Python."""
    name = case.failure.process
    if name is not None and not case.may_be_python and not case.on_windows and case.failure.framework == "linux":
        how = f"ps -C {name} -o pid,rss,args --sort=-rss   # how many, and how large; then fewer of them, or a machine with more"
        yield make_remedy(f"let {name} hold less, or run fewer of it at once", None, how, "less runs in parallel")


def who_sent_it(case: Case) -> Iterator[Remedy]:
    """A kill that the container's own limit did not make."""
    if case.spared_by_limit:
        how = "dmesg -T | grep -i 'killed process'; journalctl -u docker   # on the host, at that minute; who ran docker stop"
        yield make_remedy("see on the host who sent SIGKILL; only if its kernel did, give the machine more", None, how)


def stop_growing(case: Case) -> Iterator[Remedy]:
    """RAM that a log shows rising."""
    in_ram = case.place == "cpu" or case.failure.extra.get("signal") == "Killed"
    if case.rise is None or not in_ram or case.watched:
        return
    how = "fewer workers, smaller shuffle and prefetch buffers, queues with a length"
    if case.may_be_python:
        how += "   # outsize run your_script.py names the line"
    yield make_remedy(
        "find what grows without a bound where it begins to rise: data loader, queue, list", None, how, "slower loading"
    )


def see_whether_it_was_memory(case: Case) -> Iterator[Remedy]:
    """A kill that nobody explains, of a program that nothing here knows."""
    if case.may_be_python or case.in_image_build or case.failure.process is not None or case.on_windows:
        return
    how = "dmesg -T | grep -i 'killed process'   # or journalctl -k; free -g; what it held: anon-rss"
    if case.on_mac:
        how = "log show --last 1h --predicate 'eventMessage contains \"memorystatus\"'   # and Activity Monitor while it runs"
    yield make_remedy("see whether it was memory; then give it more, or less to do at once", None, how)


def _who_grows() -> Remedy:
    how = "outsize run your_script.py   # peak, timeline and the growing line"
    return make_remedy("see who grows, with the line", None, how, "under 1 % of time")


def in_frames(case: Case) -> Iterator[Remedy]:
    """Tables of pandas: fewer columns, narrower types, pieces; a join whose keys repeat multiplies rows."""
    if not case.on_device and case.in_frames:
        merges = "merge" in case.text
        then = "and see whether keys repeat: df.key.duplicated().sum()" if merges else "or chunksize= when it is read"
        yield make_remedy(
            "only the columns you need, in narrow types, in pieces",
            case.need,
            f'df = df[[...]].astype({{"name": "category", "x": "float32"}})   # {then}',
            "other types, several passes",
            known=Known.BOUND,
        )


def lighter_weights(case: Case) -> Iterator[Remedy]:
    """A model that is read into RAM before it goes anywhere."""
    if case.loads_shards and not case.on_device:
        yield make_remedy(
            "read the weights in 16 bits, one part after the other, or a quantized model",
            None,
            'from_pretrained(..., torch_dtype="bfloat16", low_cpu_mem_usage=True, device_map="auto")   # else more RAM, or swap',
            "weights in lower precision",
            APPROXIMATE,
        )


def name_the_victim(case: Case) -> Iterator[Remedy]:
    """A kernel's log that breaks off before it names whom it killed."""
    if (
        case.failure.framework == "linux"
        and case.format not in ("dead child", "earlyoom")
        and case.failure.process is None
    ):
        how = "dmesg -T | grep -i 'killed process'   # the name, and anon-rss: what it held"
        yield make_remedy("see whom the kernel killed, and what it held", None, how)


def see_what_fills_ram(case: Case) -> Iterator[Remedy]:
    """A small request of a Python program: what fills RAM is elsewhere (weights, copies of them in each rank, workers)."""
    if case.on_host and not case.watched and case.may_be_python and case.failure.framework not in ("linux", "c++"):
        yield _who_grows()


def less_in_ram(case: Case) -> Iterator[Remedy]:
    """A process that holds too much of the host."""
    if not case.may_be_python or case.on_torch or case.failure.process == "DataLoader worker":
        return
    if not case.watched and not case.has_line:
        yield _who_grows()
    mib = min(2**31, (case.host_room or 2**32) // 2) // 2**20
    if mib and case.library is None and (case.spec is None or case.spec.bytes < 2**26):
        text = "   # text: for line in file, not file.read()" if case.has_line else ""
        yield make_remedy(
            "stream large arrays instead of holding them",
            None,
            f'outsize.open("x.npy")   # then .save("y.zarr", budget="{mib}MiB"){text}',
            "time to read and write the disk",
            ROUNDING,
        )
    if not case.watched and case.has_line:
        yield _who_grows()
