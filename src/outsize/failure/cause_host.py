"""Rules for a host whose memory ran out: limits, kills, shared memory, address space, a broadcast that exploded."""

from __future__ import annotations

from outsize.core.failure import Cause, CauseName
from outsize.core.units import format_bytes as said
from outsize.failure.case import DMESG, SMALL, Case, make_cause, pair_of_long_axes


def broadcast(case: Case) -> Cause | None:
    """Two long axes that make a matrix nobody meant: (n, 1) with (n,)."""
    shape, need = case.failure.shape, case.need
    pair = None if shape is None else pair_of_long_axes(shape)
    if pair is None or need is None or (not case.on_host and case.failure.framework != "tensorflow"):
        return None
    first, second = pair
    limit = case.reading.host.total if case.reading else None
    if need < (limit or 16 * 2**30) / 2:
        return None
    if first == second:
        return make_cause(
            CauseName.BROADCAST,
            f"The shape {shape} has the axis {first:,} twice: an array of shape ({first:,}, 1) met one of shape "
            f"({first:,},) "
            f"and broadcasting made {said(need)} of them. The two arrays themselves are small.",
            certain=False,
            decide=f"print the shapes of the operands: one is ({first}, 1) where a flat array was meant; if every "
            f"pair was meant, work through it in blocks",
        )
    return None


def outer_product(case: Case) -> Cause | None:
    """Two long axes that differ: perhaps every pair of two long arrays."""
    shape, need = case.failure.shape, case.need
    pair = None if shape is None else pair_of_long_axes(shape)
    limit = case.reading.host.total if case.reading else None
    if pair is None or pair[0] == pair[1] or need is None or limit is None or need < 8 * limit:
        return None
    return make_cause(
        CauseName.BROADCAST,
        f"{pair[0]:,} x {pair[1]:,} may be every element of one long array against every element of another.",
        certain=False,
        decide="print the shapes of the operands and see whether every pair was meant",
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
        "there is a bus error, "
        f"not an exception. Containers get 64 MiB unless told otherwise.{now}",
        certain=case.failure.framework == "pytorch",
        decide="`df -h /dev/shm` while it runs",
    )


def container_kill(case: Case) -> Cause | None:
    """Killed by a limit: cgroup, pod, job, worker."""
    failure = case.failure
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


def machine_kill(case: Case) -> Cause | None:
    """The kernel's last resort, or a daemon before it."""
    failure = case.failure
    if failure.framework == "systemd":
        return make_cause(
            CauseName.MACHINE,
            "systemd-oomd killed a whole unit because its processes "
            "stalled for memory "
            f"({failure.extra.get('pressure_pct', '-')} % of the time): RAM was full, swap was "
            f"churning.",
        )
    if failure.framework == "ray":
        used, total = case.extra("node_used_bytes"), failure.total_bytes
        return make_cause(
            CauseName.MACHINE,
            f"The node used {said(used)} of {said(total)} and Ray killed a "
            f"worker before the kernel would: "
            "the tasks running side by side need more than the node has.",
        )
    if failure.framework == "linux" and failure.extra.get("scope") == "machine":
        held = case.extra("anon_rss_bytes")
        invoker = failure.extra.get("invoker")
        victim = (
            ""
            if invoker in (None, failure.process)
            else f" {invoker} asked for memory and got none; the victim is the largest, not necessarily the one "
            f"at fault."
        )
        return make_cause(
            CauseName.MACHINE,
            f"RAM and swap of the whole machine were full and the kernel "
            f"killed {failure.process or 'a process'}"
            + (f", which held {said(held)}." if held is not None else ".")
            + victim,
        )
    return None


def signal(case: Case) -> Cause | None:
    """SIGKILL without a word."""
    if case.failure.extra.get("signal") != "Killed":
        return None
    return make_cause(
        CauseName.KILLED,
        "The process was ended by SIGKILL without a word. The kernel does that when RAM or a container's limit is "
        "full; so does "
        "anyone with `kill -9`, a scheduler or a time limit.",
        certain=False,
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
    if case.failure.framework in {"java", "node"}:
        return make_cause(
            CauseName.LIMIT,
            "The runtime's own heap is full; it is capped at start (-Xmx, --max-old-space-size), whatever the machine has.",
        )
    if not case.framework.setting:
        return None
    cap = "" if case.failure.limit_bytes is None else f" of {said(case.failure.limit_bytes)}"
    return make_cause(
        CauseName.LIMIT,
        f"{case.failure.framework} keeps itself to a limit{cap} ({case.framework.setting}) and has reached it, "
        "whatever the machine has.",
    )


def small_request(case: Case) -> Cause | None:
    """A request too small to be the reason."""
    need = case.need
    if need is None or need >= SMALL or not (case.on_host or case.failure.framework in {"tensorflow", "jax"}):
        return None
    if case.failure.free_bytes is not None:
        return None
    what = f"The tensor {case.spec} is" if case.spec is not None else "The request was"
    where = "RAM (or the limit on it)" if case.on_host else "the device"
    return make_cause(
        CauseName.ALREADY_FULL,
        f"{what} {need:,} bytes ({said(need)}) and cannot by itself exhaust anything: {where} was already full of "
        f"what the "
        "program, or others, hold. This was only the request that came last.",
        certain=True,
    )
