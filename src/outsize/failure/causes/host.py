"""Rules for a host whose memory ran out: limits, kills, shared memory, address space, a broadcast that exploded."""

from __future__ import annotations

import math
import re

from outsize.core.failure import Cause, CauseName
from outsize.core.units import format_bytes as said
from outsize.failure.case import DMESG, SMALL, Case, make_cause
from outsize.failure.signs import JOB_KILL, MULTIPLIES, POOL_OF_JAVA, RAM, RAM_IS_FULL

_HEAP = re.compile(r"-Xmx[0-9]+[kKmMgG]?")
MANY = 300_000
"""Things of which hardly anybody means a matrix of all pairs."""


def broadcast(case: Case) -> Cause | None:
    """Two long axes that make a matrix nobody meant: (n, 1) with (n,)."""
    shape, need, pair = case.failure.shape, case.need, case.long_pair
    if pair is None or need is None or not (case.on_host or case.failure.framework in {"tensorflow", "jax"}):
        return None
    first, second = pair
    if case.makes_dense:
        return make_cause(
            CauseName.TRUE_NEED,
            f"A sparse matrix of shape {shape} is written out with all its zeros: {said(need)}.",
            decide="how many of its numbers are not zero: x.nnz",
        )
    limit = case.reading.host.total if case.reading else None
    if need < (limit or 16 * 2**30) / 2:
        return None
    if first == second and (
        first < MANY or case.in_package
    ):  # as likely a matrix of pairs that was meant: distances, contacts, neighbours
        return make_cause(
            CauseName.TRUE_NEED,
            f"A square matrix, {first:,} x {first:,}, takes {said(need)}: one number for every pair of {first:,} things "
            "(distances, similarities, neighbours). It grows with the square of their number.",
            decide=f"if no matrix of pairs was meant, print the shapes of the operands: ({first}, 1) met ({first},)",
        )
    if first == second:
        return make_cause(
            CauseName.BROADCAST,
            (
                f"The shape {shape} has the axis {first:,} twice"
                if shape
                else f"{need:,} bytes are one number for every pair of {first:,}"
            )
            + f": an array of shape ({first:,}, 1) met one of shape "
            f"({first:,},) and broadcasting made {said(need)} of them. The two arrays themselves are small.",
            decide=f"print the shapes of the operands: one is ({first}, 1) where a flat array was meant; if every "
            f"pair was meant, work through it in blocks",
        )
    if first - second < 0.01 * first:
        return make_cause(
            CauseName.BROADCAST,
            f"The shape {shape} has two long axes of nearly the same length, {said(need)} in all: hardly a matrix that "
            "was meant. A wrong index or padding makes such shapes, or two long arrays in one expression.",
            decide="print the shapes of the operands, or the padding, just before the call",
        )
    return None


def all_pairs(case: Case) -> Cause | None:
    """A flat array with one number for every pair."""
    if case.paired is None or case.need is None:
        return None
    return make_cause(
        CauseName.TRUE_NEED,
        f"{said(case.need)} are one number for each pair of {case.paired:,} things (distances, similarities, linkage). They "
        "grow with the square of their number.",
    )


def multiplied(case: Case) -> Cause | None:
    """A table of a few rows that became one of millions."""
    shape, need = case.failure.shape, case.need
    if not case.multiplies or shape is None or case.makes_dense:
        return None
    size = "" if need is None else f" ({said(need)})"
    return make_cause(
        CauseName.BROADCAST,
        f"A table became {max(shape):,} rows long{size}: rows were multiplied. A join whose keys repeat, a "
        "cross product, or several columns of lists that are exploded one after the other do that.",
        decide="len(df) before and after each of these calls",
    )


def outer_product(case: Case) -> Cause | None:
    """Two long axes that differ: perhaps every pair of two long arrays."""
    need, pair = case.need, case.long_pair
    limit = case.reading.host.total if case.reading else None
    if pair is not None and pair[0] == pair[1] < MANY and need is not None and case.on_host:
        return make_cause(
            CauseName.BROADCAST,
            f"An array of shape ({pair[0]:,}, 1) met one of shape ({pair[0]:,},), and nobody meant a matrix.",
            decide="print the shapes of the operands just before the call",
        )
    if pair is None or pair[0] == pair[1] or need is None or limit is None or need < 8 * limit:
        return None
    return make_cause(
        CauseName.BROADCAST,
        f"{pair[0]:,} x {pair[1]:,} may be every element of one long array against every element of another.",
        decide="print the shapes of the operands and see whether every pair was meant",
    )


def graph_message(case: Case) -> Cause | None:
    """A graph that no message can hold: no memory is short, but what was put into it is too large."""
    if case.format != "graph-message":
        return None
    return make_cause(
        CauseName.LARGER_THAN_LIMIT,
        "A graph is written as one message of protocol buffers, which holds at most 2 GiB, and an array was put into it as a "
        "constant. RAM is not short: the array has to be an argument of the step, or be read piece by piece.",
    )


def shared_memory(case: Case) -> Cause | None:
    """`/dev/shm` is full."""
    if not (case.failure.extra.get("shared_memory") or case.failure.extra.get("signal") == "Bus error"):
        return None
    shm = case.reading.shm if case.reading else None
    now = f" It has {said(shm.total)} here, {said(shm.available)} of it free now." if shm else ""
    return make_cause(
        CauseName.SHARED_MEMORY,
        "/dev/shm is full: DataLoader workers hand their batches over through it, and a page that cannot be had "
        f"there is a bus error, not an exception. Containers get 64 MiB unless told otherwise.{now}",
        certain=case.failure.framework == "pytorch",
        decide="`df -h /dev/shm` while it runs",
    )


def pinned(case: Case) -> Cause | None:
    """Pinned memory is the host's, whatever the message calls it."""
    if case.format not in ("pinned", "host"):
        return None
    return make_cause(
        CauseName.LIMIT,
        "CUDA could not lock RAM for pinned memory: the host's memory, the container's limit or `ulimit -l` is full, not the "
        "card, whatever the message calls it. WSL2 allows little of it.",
        decide="`outsize memory` inside that container or job, and `ulimit -l`",
    )


def mapping(case: Case) -> Cause | None:
    """`mmap` refused: no RAM was asked for yet."""
    if case.format not in ("shm-map", "file-map"):
        return None
    if case.need is None or case.need < SMALL:
        return make_cause(
            CauseName.ADDRESS_SPACE,
            f"Mapping {said(case.need)} was refused, which takes no RAM: the process has as many mappings as the kernel allows "
            "(vm.max_map_count, 65,530 as a rule). Each tensor that a DataLoader's worker hands over is one.",
            decide="`wc -l /proc/PID/maps` before it fails; `sysctl vm.max_map_count`; `ulimit -v`",
        )
    return make_cause(
        CauseName.ADDRESS_SPACE,
        f"A file of {said(case.need)} could not be mapped: no RAM was asked for yet, but the kernel promises no more than RAM "
        "and swap have in all (overcommit), or `ulimit -v` is smaller.",
        decide="`cat /proc/sys/vm/overcommit_memory`, `free -g`, `ulimit -v`",
    )


def container_kill(case: Case) -> Cause | None:
    """Killed by a limit: cgroup, pod, job, worker."""
    failure = case.failure
    if case.format == "kubernetes-evicted":
        used = case.extra("used_bytes")
        held = "" if used is None else f", which used {said(used)}"
        return make_cause(
            CauseName.MACHINE,
            f"The whole node ran short of memory and the kubelet evicted {failure.process or 'a pod'}{held}: those go first that "
            "use more than they requested.",
        )
    if case.framework.killer or failure.extra.get("scope") == "cgroup":
        cap = "" if failure.limit_bytes is None else f" of {said(failure.limit_bytes)}"
        used = case.extra("anon_rss_bytes")
        asked = case.extra("asked_bytes")
        who = (failure.process or "The process") + ("" if failure.pid is None else f" (pid {failure.pid})")
        root = failure.extra.get("root_pid")
        who += f", started by your program (pid {root})," if root not in (None, failure.pid) else ""
        held = "" if not used else f" when it held {said(used)}"
        held += f" and had asked for {said(asked)}" if asked else ""
        return make_cause(
            CauseName.LIMIT,
            f"{who} was killed by the memory limit{cap} of its "
            f"{case.framework.killer or 'container or control group'}{held}; "
            "the machine itself may have had memory left.",
        )
    return None


def job_kill(case: Case) -> Cause | None:
    """A scheduler says beside the program's own words that its job was killed for memory."""
    if not case.on_host or JOB_KILL.search(case.text) is None:
        return None
    asked = "" if case.need is None else f" The program had asked for {said(case.need)}."
    return make_cause(
        CauseName.LIMIT, f"Slurm says that the job reached its memory limit (--mem) and was killed there.{asked}"
    )


def address_space_check(case: Case) -> Cause | None:
    """YARN's check of virtual memory, which programs reserve without using it."""
    if case.format != "yarn-virtual":
        return None
    used, limit = case.extra("used_bytes"), case.failure.limit_bytes
    counted = "" if used is None or limit is None else f": {said(used)} of {said(limit)}"
    return make_cause(
        CauseName.ADDRESS_SPACE,
        f"YARN killed the container for its address space{counted}. Programs reserve far more of that than they use "
        "(threads, CUDA, mapped files), so this says little about RAM.",
    )


def fork(case: Case) -> Cause | None:
    """A process that was not made: no RAM was asked for yet."""
    if case.format != "fork":
        return None
    return make_cause(
        CauseName.ALREADY_FULL,
        "A new process was refused: the kernel has to promise it all the memory of its parent, and nearly all there is was "
        "promised. A large parent, many workers or a container's limit do that.",
        decide="`free -g`, `cat /proc/sys/vm/overcommit_memory`, the parent's size, the container's limit",
    )


def narrow_program(case: Case) -> Cause | None:
    """A program of 32 bits, whatever the machine has."""
    if not (case.failure.extra.get("narrow") or (case.narrow and case.on_host and case.framework.python)):
        return None
    return make_cause(
        CauseName.ADDRESS_SPACE,
        "The program is one of 32 bits: it can address 4 GiB at most, whatever the machine has.",
    )


def commit_limit(case: Case) -> Cause | None:
    """Windows counts what is promised, not what is used."""
    if case.failure.framework != "windows":
        return None
    return make_cause(
        CauseName.LIMIT,
        "Windows promises no more memory than RAM and the page file have together, and all of it is promised. Each process "
        "that loads CUDA libraries takes gigabytes of it, used or not.",
    )


def machine_kill(case: Case) -> Cause | None:
    """The kernel's last resort, or a daemon before it."""
    failure = case.failure
    if failure.framework == "systemd":
        return make_cause(
            CauseName.MACHINE,
            "systemd-oomd killed a whole unit because its processes stalled for memory "
            f"({failure.extra.get('pressure_pct', '-')} % of the time): RAM was full, swap was churning.",
        )
    if case.format == "earlyoom":
        return make_cause(
            CauseName.MACHINE,
            "earlyoom, a daemon, ends the largest process while a little RAM and swap are left: the machine was nearly full.",
        )
    if failure.framework == "ray":
        used, total = case.extra("node_used_bytes"), failure.total_bytes
        full = "The node was nearly full" if used is None else f"The node used {said(used)} of {said(total)}"
        return make_cause(
            CauseName.MACHINE,
            f"{full} and Ray killed a worker before the kernel would: the "
            "tasks running side by side need more than the node has.",
        )
    if failure.framework == "linux" and failure.extra.get("scope") == "machine":
        held, invoker = case.extra("anon_rss_bytes"), failure.extra.get("invoker")
        text = f"RAM and swap of the whole machine were full and the kernel killed {failure.process or 'a process'}"
        text += f", which held {said(held)}." if held is not None else "."
        if invoker not in (None, failure.process):
            text += f" {invoker} asked for memory and got none; the victim is the largest, not necessarily the one at fault."
        return make_cause(CauseName.MACHINE, text)
    return None


def grown(case: Case) -> Cause | None:
    """A process that a log, or who watched it, shows growing until it was ended."""
    killed = (
        case.failure.extra.get("signal") == "Killed" and case.failure.framework == "linux" and case.failure.pid is None
    )
    told = case.format == "all-used" or (case.format == "told" and case.place == "cpu")
    if killed and case.in_frames and MULTIPLIES.search(case.text) is not None:  # few rows that became many
        return None
    torch = case.failure.framework == "pytorch" and case.on_host and case.says_rising
    if torch or (case.grows and (told or (killed and case.rise is None and RAM.search(case.text)))):
        return make_cause(
            CauseName.LEAK,
            "Its memory is said to rise until none is left: something is kept that should go, call after call.",
            decide="memory after each call: flat is need, rising is a leak",
        )
    if case.rise is None or not (case.on_host or case.failure.extra.get("signal") == "Killed"):
        return None
    ended = ", and then it was killed" if case.failure.extra.get("signal") == "Killed" else ""
    return make_cause(
        CauseName.LEAK,
        f"The log shows its memory rising from {said(case.rise[0])} to {said(case.rise[1])}{ended}: something in RAM grows "
        "without a bound (a queue, a buffer of the data loader, a list), or one input is far larger than the others.",
        decide="what the program did in the lines where it begins to rise",
    )


def signal(case: Case) -> Cause | None:
    """SIGKILL without a word."""
    if case.failure.extra.get("signal") != "Killed":
        return None
    if case.format in ("workers-gone", "loader-gone"):
        return make_cause(
            CauseName.KILLED,
            "A worker process is gone without a word of its own: as a rule the kernel killed it because RAM, or the container's "
            "limit, was full. Any other error of a worker stands further up in the log.",
            decide=DMESG,
        )
    if case.failure.framework == "notebook":
        return make_cause(
            CauseName.KILLED,
            "The notebook's process is gone without a word: as a rule the system killed it because RAM, or the limit on it, was "
            "full. A crash inside a compiled library looks the same.",
            decide="the terminal or log of Jupyter; `dmesg -T | grep -i 'killed process'`; free RAM just before that cell ends",
        )
    if case.spared_by_limit:
        return make_cause(
            CauseName.KILLED,
            "The process was ended by SIGKILL, and not by its container's limit: OOMKilled is false. The kernel of the host "
            "does that when the whole machine is full; so does whoever stops containers (`docker stop` after its grace "
            "period, a health check, an update of the daemon).",
            decide="the host's kernel log and the daemon's at that minute",
        )
    return make_cause(
        CauseName.KILLED,
        "The process was ended by SIGKILL without a word. The kernel does that when RAM or a container's limit is "
        "full; so does anyone with `kill -9`, a scheduler or a time limit.",
        decide=DMESG,
    )


def rlimit(case: Case) -> Cause | None:
    """A limit of this machine, seen from inside."""
    limit = case.biting
    if not case.on_host or limit is None:
        return None
    asked = "more does not go" if case.need is None else f"{said(case.need)} more do not go"
    return make_cause(
        CauseName.ADDRESS_SPACE if limit.name.startswith("ulimit") else CauseName.LIMIT,
        f"{limit.name} allows {said(limit.bytes)} and {said(limit.used)} of it were taken: {asked}, "
        f"though the machine has {said(case.reading.host.total if case.reading else None)}.",
        certain=case.need is not None,
        decide=f"run it once after `{limit.name} unlimited`",
    )


def heap(case: Case) -> Cause | None:
    """Runtimes with their own heap, and programs that keep themselves to a limit."""
    if case.format == "java-array":
        text = (
            "One array of Java holds 2^31 elements at most, and more were asked for: no heap is large enough for that."
        )
        return make_cause(CauseName.TRUE_NEED, text)
    if case.format == "java-reserve":
        return make_cause(
            CauseName.ADDRESS_SPACE,
            "Java asks for its whole heap when it starts, and did not get it: -Xmx is more than the machine has "
            "free, or this Java is "
            "one of 32 bits, which can have about 1.5 GiB.",
            decide="`java -version`: 64-Bit or not; free RAM against -Xmx",
        )
    if case.format == "java-native":
        return make_cause(
            CauseName.ALREADY_FULL,
            "The system gave Java no more memory: its heap (-Xmx), threads and buffers together are more than RAM, or the "
            "container, has left. The heap itself is not full.",
            decide="`free -m` and the container's limit against -Xmx",
        )
    if case.failure.framework == "java" and POOL_OF_JAVA.search(case.text) is not None:
        return make_cause(
            CauseName.LIMIT,
            "A pool of Java beside its heap (classes, direct buffers) is full; it has a cap of its own.",
        )
    if case.failure.framework in {"java", "node"}:
        told = list(dict.fromkeys(_HEAP.findall(case.text)))
        several = f" Several sizes are given ({', '.join(told)}): the last one counts." if len(told) > 1 else ""
        return make_cause(
            CauseName.LIMIT,
            "The runtime's own heap is full; it is capped at start (-Xmx, --max-old-space-size), whatever the machine "
            f"has.{several}",
        )
    if not case.framework.setting or (
        case.framework.optional and case.failure.limit_bytes is None and not case.failure.extra.get("limited")
    ):
        return None
    cap = "" if case.failure.limit_bytes is None else f" of {said(case.failure.limit_bytes)}"
    return make_cause(
        CauseName.LIMIT,
        f"{case.framework.title or case.failure.framework} keeps itself to a limit{cap} ({case.framework.setting}) and has "
        "reached it, whatever the machine has.",
    )


def free_though(case: Case) -> Cause | None:
    """The text says that several times as much was free, or that there was enough."""
    if not case.told_enough or not case.on_host or case.reading is not None:
        return None
    told = "enough is" if case.told_free is None else f"{said(case.told_free)} are"
    asked = "Memory" if case.need is None else said(case.need)
    if case.on_windows:
        return make_cause(
            CauseName.LIMIT,
            f"{asked} could not be had while {told} said to be free: Windows refuses what RAM and the page file cannot "
            "promise together, used or not. What is promised counts, not what the task manager shows as free.",
            decide="Task Manager > Performance > Memory: Committed, against its limit",
        )
    return make_cause(
        CauseName.LIMIT,
        f"{asked} could not be had while {told} said to be free: RAM is not short. A limit of this one process is "
        "reached: its address space (`ulimit -v`, a program of 32 bits), its container or job, its number of mappings, or what "
        "the kernel is ready to promise; or others, workers of its own among them, took the rest for a moment.",
        decide="`ulimit -v`, `cat /sys/fs/cgroup/memory.max`, `sysctl vm.max_map_count vm.overcommit_memory`",
    )


def told_full(case: Case) -> Cause | None:
    """Killed without a word of the kernel, and the text says that RAM was full."""
    if case.failure.extra.get("signal") != "Killed" or RAM_IS_FULL.search(case.text) is None:
        return None
    return make_cause(
        CauseName.MACHINE,
        "The process was killed, and RAM is said to have been full: that is what the kernel does then. The card is not what ran "
        "out.",
        certain=False,
        decide=DMESG,
    )


def small_request(case: Case) -> Cause | None:
    """A request too small to be the reason."""
    need, shape = case.need, case.failure.shape
    bound = need if need is not None or shape is None else 16 * math.prod(shape)
    if (
        bound is None
        or bound >= (8 * SMALL if case.on_host else SMALL)
        or not (case.on_host or case.failure.framework in {"tensorflow", "jax"})
    ):
        return None
    if case.failure.free_bytes is not None:
        return None
    what = f"The tensor {case.spec} is" if case.spec is not None else "The request was"
    size = f"{what} {need:,} bytes ({said(need)})" if need is not None else f"A tensor of shape {shape} is small"
    where = "RAM (or the limit on it)" if case.on_host else "the device"
    return make_cause(
        CauseName.ALREADY_FULL,
        f"{size} and cannot by itself exhaust anything: {where} was already full of what the program, or others, hold. "
        "This was only the request that came last.",
    )
