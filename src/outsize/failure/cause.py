"""Why it ran out: rules over a `Case`, asked in the order of `RULES`.

In: a `Case`. Out: the causes that the numbers allow, likeliest first; the first is *the* cause, certain only where the
numbers decide. PyTorch releases every unsplit cached block before it raises, so what it still holds unused is stuck in
split segments: that is what makes `free + unused >= request` mean fragmentation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from outsize.core.failure import Cause
from outsize.core.units import format_bytes as said
from outsize.failure.case import SMALL, Case, pair_of_long_axes

Rule = Callable[[Case], Cause | None]

_NVIDIA_SMI = "`nvidia-smi` on that machine, or `outsize memory`: who holds the card"
_DMESG = "`dmesg -T | grep -i 'killed process'` (or `journalctl -k`), and `memory.events` of the container: an oom_kill there settles it"


def _cause(name: str, text: str, certain: bool = True, decide: str = "") -> Cause:
    return Cause(name=name, text=text, certain=certain, decide=decide)


def impossible(case: Case) -> Cause | None:
    """More bytes than any address space: a length that overflowed or was read from garbage."""
    asked = case.failure.requested_bytes
    if asked is None or asked <= 2**57:
        return None
    return _cause(
        "impossible request",
        f"{asked:,} bytes were asked for, more than any machine can address: a length wrapped below zero, overflowed, or "
        "was read from corrupt or misaligned data. More memory will not help.",
    )


def warning_only(case: Case) -> Cause | None:
    """An allocator's remark that ends nothing."""
    if not case.failure.extra.get("not_a_failure"):
        return None
    return _cause(
        "warning only",
        f"This is a remark of the allocator about a request of {said(case.need)}, not a failure: the program goes on. "
        "If it died later, the message that counts comes after this one.",
    )


def broadcast(case: Case) -> Cause | None:
    """Two long axes that make a matrix nobody meant: (n, 1) with (n,)."""
    shape, need = case.failure.shape, case.need
    pair = None if shape is None else pair_of_long_axes(shape)
    if pair is None or need is None or not case.on_host and case.failure.framework != "tensorflow":
        return None
    first, second = pair
    limit = case.reading.host.total if case.reading else None
    if need < (limit or 16 * 2**30) / 2:
        return None
    if first == second:
        return _cause(
            "broadcast explosion",
            f"The shape {shape} has the axis {first:,} twice: an array of shape ({first:,}, 1) met one of shape ({first:,},) "
            f"and broadcasting made {said(need)} of them. The two arrays themselves are small.",
            certain=False,
            decide=f"print the shapes of the operands: one is ({first}, 1) where a flat array was meant; if every pair was meant, work through it in blocks",
        )
    if need < 8 * (limit or 2**60):
        return None
    return _cause(
        "broadcast explosion",
        f"{first:,} x {second:,} is every element of one long array against every element of another ({said(need)}): an outer "
        "product or a broadcast, many times what the machine has.",
        certain=False,
        decide="print the shapes of the operands and see whether every pair was meant",
    )


def larger_than_device(case: Case) -> Cause | None:
    """The request alone passes the capacity, or the cap."""
    need, total, limit = case.need, case.failure.total_bytes, case.failure.limit_bytes
    if need is None:
        return None
    if total is not None and need > total and case.failure.framework not in {"ray"}:
        return _cause(
            "request larger than the device",
            f"One request of {said(need)} is larger than all of {_place(case)} ({said(total)}): nothing that frees memory can help, "
            "the tensor itself has to become smaller or be worked on in pieces.",
        )
    if case.on_host and case.reading is not None and need > (case.reading.host.total or 2**63) + case.reading.swap_total:
        return _cause(
            "request larger than the machine",
            f"One request of {said(need)} is larger than all the RAM and swap here ({said((case.reading.host.total or 0) + case.reading.swap_total)}): "
            "it has to become smaller or be worked on in pieces.",
        )
    if limit is not None and need > limit and case.format not in {"tpu-hbm"} and limit < 2**57:
        return _cause(
            "request larger than the limit",
            f"One request of {said(need)} is larger than the whole limit of {said(limit)}.",
        )
    return None


def fragmentation(case: Case) -> Cause | None:
    """Enough is unused, but not in one piece."""
    need, free, slack = case.need, case.failure.free_bytes, case.slack
    if need is None or slack is None or not slack:
        return None
    room = None if free is None else free
    limit = case.failure.limit_bytes
    if limit is not None and limit < 2**57 and case.held is not None:
        room = min(room if room is not None else 2**63, max(0, limit - case.held))
    total = case.failure.total_bytes
    if room is None or room >= need or room + slack < need:
        return None
    if case.others is not None and case.others >= max(2 * slack, 0.1 * (total or 0)):
        return None
    worth = slack >= 0.05 * total if total else slack >= 4 * need
    return _cause(
        "fragmentation",
        f"{said(need)} were asked for while PyTorch held {said(slack)} it did not use and {said(room)} more could be had: enough, but cut "
        "into pieces between tensors that are still alive, none of them long enough.",
        certain=worth,
        decide=f"the {said(slack)} in pieces are all that mending this gives; if the steps after this one need more, it is true need",
    )


def bfc_fragmentation(case: Case) -> Cause | None:
    """TensorFlow's and JAX's allocator: unused memory in the pool, but no chunk that is long enough."""
    need, limit, used = case.need, case.failure.limit_bytes, case.failure.allocated_bytes
    largest = case.extra("largest_free_bytes")
    if case.failure.framework not in {"tensorflow", "jax"} or need is None or limit is None or used is None:
        return None
    if limit - used < need:
        return None
    return _cause(
        "fragmentation",
        f"{said(need)} were asked for while {said(limit - used)} of the pool's {said(limit)} were not in use"
        + ("" if largest is None or largest >= need else f", the largest free piece being {said(largest)}")
        + ": enough, but cut into pieces.",
        certain=largest is not None and largest < need,
        decide="the lines 'Bin' and 'Chunk' of the allocator's dump: the largest free chunk against the request",
    )


def fraction(case: Case) -> Cause | None:
    """A cap that the program set itself."""
    limit, need, free = case.failure.limit_bytes, case.need, case.failure.free_bytes
    if limit is None or limit >= 2**57 or not case.on_torch_gpu or case.format == "xpu-block":
        return None
    if need is None or case.held is None or case.held + need <= limit:
        return None
    also = "" if free is None or free < need else f", though {said(free)} of the card were free"
    return _cause(
        "memory fraction",
        f"PyTorch was allowed {said(limit)} of the card and held {said(case.held)}; {said(need)} more would pass that limit{also}. "
        "The limit is `set_per_process_memory_fraction`, not the card.",
        certain=free is None or free >= need,
    )


def watermark(case: Case) -> Cause | None:
    """Apple's unified memory under PyTorch's watermark."""
    limit, held = case.failure.limit_bytes, case.failure.allocated_bytes
    if case.failure.device != "mps" or limit is None or held is None:
        return None
    other = case.extra("other_allocations_bytes") or 0
    if other > held:
        return _cause(
            "other allocations",
            f"Of the {said(limit)} allowed, {said(other)} are held outside PyTorch (Metal, other libraries) and {said(held)} by it.",
        )
    return _cause("true need", f"PyTorch holds {said(held)} of the {said(limit)} that its watermark allows on this Mac.")


def other_process(case: Case) -> Cause | None:
    """The card is full of somebody else."""
    others, gap = case.others, case.gap
    if others is None or gap is None or not gap:
        return None
    if case.strangers and others >= gap:
        names = ", ".join(f"pid {pid} {said(size)}" for pid, size in case.strangers[:3])
        mine = case.mine or 0
        return _cause(
            "other process",
            f"Other processes hold {said(others)} of the card ({names}); this one holds {said(mine)}. {said(gap)} were missing: "
            "without them it would have fitted.",
            certain=others >= mine or others - gap >= 2**30,
            decide=_NVIDIA_SMI,
        )
    if others >= gap and case.mine is not None and others > 0.1 * (case.failure.total_bytes or 0):
        return _cause(
            "other process",
            f"{said(others)} of the card are held by nobody this message names: this process holds {said(case.mine)} of "
            f"{said(case.failure.total_bytes)} and {said(case.failure.free_bytes)} were free. Another process, another user or "
            "the desktop has the rest.",
            certain=case.extra("process_in_use_bytes") is not None and others > 0.25 * (case.failure.total_bytes or 0),
            decide=_NVIDIA_SMI,
        )
    return None


def graph_pools(case: Case) -> Cause | None:
    """CUDA graphs keep what they captured."""
    private, gap = case.extra("private_pool_bytes"), case.gap
    if private is None or gap is None or private < max(gap, 0.1 * (case.failure.allocated_bytes or 0)):
        return None
    return _cause(
        "CUDA graph pools",
        f"{said(private)} sit in the private pools of CUDA graphs, which no other allocation may use and which stay until the graphs "
        f"are destroyed; {said(gap)} were missing.",
        certain=private >= 0.25 * (case.failure.allocated_bytes or 1),
        decide="run once without CUDA graphs (`mode='default'`, `--enforce-eager`): does it fit?",
    )


def refused_though_free(case: Case) -> Cause | None:
    """More was free than was asked for."""
    need, free = case.need, case.failure.free_bytes
    if need is None or free is None or free < need or case.failure.framework == "vllm" or case.on_host:
        return None
    if case.format == "snapshot":
        return _cause(
            "memory fraction",
            f"{said(need)} were refused while the driver still had {said(free)}: PyTorch did not ask it, because "
            f"`set_per_process_memory_fraction` allows little more than the {said(case.held)} it held.",
            certain=False,
            decide="the exception's text: it then says how much was 'allowed'",
        )
    return _cause(
        "refused though free",
        f"{said(need)} were refused while {said(free)} were free when the message was made. Something freed memory in between (another "
        "process, a worker that died), or the driver could not map it (a limit on host memory or address space, WSL2, MIG).",
        certain=False,
        decide="run again while watching `nvidia-smi -l 1`; check `ulimit -v` and the container's memory limit",
    )


def tpu(case: Case) -> Cause | None:
    """XLA's own sum of a program."""
    used, limit = case.extra("used_bytes") or case.extra("total_usage_bytes"), case.failure.limit_bytes
    if case.failure.framework != "jax" or used is None or limit is None:
        return None
    return _cause("true need", f"The compiled program needs {said(used)} of {said(limit)}: {said(used - limit)} too much, before a step has run.")


def kv_cache(case: Case) -> Cause | None:
    """vLLM's cache for one request, or its share of the card."""
    need, free = case.need, case.failure.free_bytes
    if case.failure.framework != "vllm":
        return None
    if case.format == "vllm-startup" and need is not None and free is not None:
        held = (case.failure.total_bytes or 0) - free
        return _cause(
            "other process",
            f"vLLM wants {said(need)} of the card at start and {said(free)} are free: {said(held)} are already held by something else.",
            certain=False, decide=_NVIDIA_SMI,
        )  # fmt: skip
    if need is not None and free is not None:
        return _cause("true need", f"One request of the longest length needs a KV cache of {said(need)}; after the weights {said(free)} are left.")
    return _cause("true need", "The weights and the profiled activations leave no room for the KV cache.", certain=False,
                  decide="the lines of vLLM's start: weights, peak activation, memory left for the KV cache")  # fmt: skip


def prealloc(case: Case) -> Cause | None:
    """TensorFlow takes the card at start; the driver says no."""
    if case.failure.framework != "tensorflow" or case.format not in {"driver", "driver-plain", "context"}:
        return None
    size = f" ({said(case.need)})" if case.need else ""
    return _cause(
        "preallocation",
        f"TensorFlow takes nearly the whole card when it starts{size} and the driver refused: another process, often another "
        "TensorFlow or a notebook kernel, already holds part of it. It then tries smaller pieces, so this alone may end nothing.",
        certain=False, decide=_NVIDIA_SMI,
    )  # fmt: skip


def shared_memory(case: Case) -> Cause | None:
    """`/dev/shm` is full."""
    if not (case.failure.extra.get("shared_memory") or case.failure.extra.get("signal") == "Bus error"):
        return None
    shm = case.reading.shm if case.reading else None
    now = f" It has {said(shm.total)} here, {said(shm.available)} of it free now." if shm else ""
    return _cause(
        "shared memory",
        "/dev/shm is full: DataLoader workers hand their batches over through it, and a page that cannot be had there is a bus error, "
        f"not an exception. Containers get 64 MiB unless told otherwise.{now}",
        certain=case.failure.framework == "pytorch",
        decide="`df -h /dev/shm` while it runs",
    )


def container_kill(case: Case) -> Cause | None:
    """Killed by a limit: cgroup, pod, job, worker."""
    failure = case.failure
    limited = {"kubernetes", "slurm", "pbs", "lsf", "dask", "spark"}
    if failure.framework in limited or failure.extra.get("scope") == "cgroup":
        cap = "" if failure.limit_bytes is None else f" of {said(failure.limit_bytes)}"
        used = case.extra("anon_rss_bytes")
        who = "The process" if failure.process is None else f"{failure.process} (pid {failure.pid})"
        held = "" if used is None else f" when it held {said(used)}"
        return _cause(
            "limit",
            f"{who} was killed by the memory limit{cap} of its {_LIMITERS.get(failure.framework, 'container or control group')}{held}; "
            "the machine itself may have had memory left.",
        )
    return None


_LIMITERS = {"kubernetes": "pod (resources.limits.memory)", "slurm": "Slurm job (--mem)", "pbs": "PBS job", "lsf": "LSF job",
             "dask": "Dask worker (memory_limit)", "spark": "YARN container (executor memory + overhead)"}  # fmt: skip


def machine_kill(case: Case) -> Cause | None:
    """The kernel's last resort, or a daemon before it."""
    failure = case.failure
    if failure.framework == "systemd":
        return _cause("machine out of memory", "systemd-oomd killed a whole unit because its processes stalled for memory "
                      f"({failure.extra.get('pressure_pct', '-')} % of the time): RAM was full, swap was churning.")  # fmt: skip
    if failure.framework == "ray":
        used, total = case.extra("node_used_bytes"), failure.total_bytes
        return _cause("machine out of memory", f"The node used {said(used)} of {said(total)} and Ray killed a worker before the kernel would: "
                      "the tasks running side by side need more than the node has.")  # fmt: skip
    if failure.framework == "linux" and failure.extra.get("scope") == "machine":
        held = case.extra("anon_rss_bytes")
        invoker = failure.extra.get("invoker")
        victim = "" if invoker in (None, failure.process) else f" {invoker} asked for memory and got none; the victim is the largest, not necessarily the one at fault."
        return _cause("machine out of memory", f"RAM and swap of the whole machine were full and the kernel killed {failure.process or 'a process'}"
                      + (f", which held {said(held)}." if held is not None else ".") + victim)  # fmt: skip
    return None


def signal(case: Case) -> Cause | None:
    """SIGKILL without a word."""
    if case.failure.extra.get("signal") != "Killed":
        return None
    return _cause(
        "killed",
        "The process was ended by SIGKILL without a word. The kernel does that when RAM or a container's limit is full; so does "
        "anyone with `kill -9`, a scheduler or a time limit.",
        certain=False, decide=_DMESG,
    )  # fmt: skip


def rlimit(case: Case) -> Cause | None:
    """A limit of this machine, seen from inside."""
    limit = case.biting
    if not case.on_host or limit is None:
        return None
    name = "address space" if limit.name.startswith("ulimit") else "limit"
    return _cause(
        name,
        f"{limit.name} allows {said(limit.bytes)} and {said(limit.used)} of it are taken: {said(case.need)} more do not go, "
        f"though the machine has {said(case.reading.host.total if case.reading else None)}.",
    )


def heap(case: Case) -> Cause | None:
    """Runtimes with their own heap."""
    if case.failure.framework not in {"java", "node"}:
        return None
    return _cause("limit", "The runtime's own heap is full; it is capped at start (-Xmx, --max-old-space-size), whatever the machine has.")


def small_request(case: Case) -> Cause | None:
    """A request too small to be the reason."""
    need = case.need
    if need is None or need >= SMALL or not (case.on_host or case.failure.framework in {"tensorflow", "jax"}):
        return None
    if case.failure.free_bytes is not None:
        return None
    what = f"The tensor {case.spec} is" if case.spec is not None else "The request was"
    where = "RAM (or the limit on it)" if case.on_host else "the device"
    return _cause(
        "memory already full",
        f"{what} {need:,} bytes ({said(need)}) and cannot by itself exhaust anything: {where} was already full of what the "
        "program, or others, hold. This was only the request that came last.",
        certain=True,
    )


def true_need(case: Case) -> Cause | None:
    """The program holds what it asked for."""
    need, free, held = case.need, case.failure.free_bytes, case.held
    if need is not None and free is not None and held is not None:
        small = f" The {said(need)} asked for last are only the straw." if need < 0.05 * held else ""
        return _cause(
            "true need",
            f"PyTorch's live tensors take {said(case.failure.allocated_bytes)} of {said(case.failure.total_bytes)} and {said(need)} more do not fit: "
            f"{said(max(0, need - free - (case.slack or 0)))} are missing even if all its unused cache counted.{small}"
            if case.on_torch_gpu
            else f"{said(held)} are in use, {said(free)} free, and {said(need)} were asked for: {said(max(0, need - free))} are missing.",
        )
    if need is not None and free is not None:
        return _cause("true need", f"{said(need)} were asked for and {said(free)} could be had: {said(max(0, need - free))} are missing.",
                      certain=False, decide="how much the process itself holds: `outsize run` or `outsize.guard()` says")  # fmt: skip
    return None


def unsaid(case: Case) -> Cause | None:
    """The message does not decide."""
    need = f"{said(case.need)} could not be had" if case.need is not None else "Memory could not be had"
    where = "RAM" if case.on_host else _place(case)
    if case.failure.framework == "jax" or case.failure.framework == "tensorflow":
        hint = "the program's own buffers against the allocator's limit: the BFC dump or `memory_analysis()`"
    elif case.on_host:
        hint = "`outsize memory` on that machine: RAM available, container limit, `ulimit -v`; or run it under `outsize run`"
    else:
        hint = "the rest of the message, `nvidia-smi`, or `outsize.guard()` around the line"
    return _cause("true need", f"{need} from {where}; the message does not say what held the rest.", certain=False, decide=hint)


RULES: tuple[Rule, ...] = (
    impossible, warning_only, shared_memory, container_kill, machine_kill, kv_cache, tpu, watermark, prealloc, heap, broadcast,
    larger_than_device, fragmentation, fraction, bfc_fragmentation, refused_though_free, other_process, graph_pools, rlimit,
    small_request, signal, true_need, unsaid,
)  # fmt: skip
"""Asked in this order; the first that answers is the cause."""


def find_causes(case: Case) -> tuple[Cause, ...]:
    """The cause, then the candidates that it leaves open."""
    found: list[Cause] = []
    for rule in RULES:
        cause = rule(case)
        if cause is None or any(cause.name == other.name for other in found):
            continue
        if rule is unsaid and found:
            continue
        found.append(cause)
        if cause.certain:
            break
    first, *rest = found
    if first.name == "memory already full" or not first.certain and first.name != "broadcast explosion":
        rest += [other for other in _usual_suspects(case) if other.name not in {cause.name for cause in found}]
    return (first, *rest)


def _usual_suspects(case: Case) -> list[Cause]:
    """What else it is, as a rule, where the numbers leave it open."""
    suspects = []
    if case.failure.framework in {"tensorflow", "jax"} and (case.failure.device or "").startswith("cuda"):
        suspects.append(_cause("other process", "Another process holds part of the card.", False, _NVIDIA_SMI))
    if case.on_host or case.failure.extra.get("signal") == "Killed":
        suspects.append(_cause("limit", "A container, a job or `ulimit` allows less than the machine has.", False,
                               "`outsize memory` inside that container or job"))  # fmt: skip
    if case.need is None or case.need < SMALL or case.growth:
        grown = f" It grew by {said(case.growth)} in its last minute." if case.growth else ""
        suspects.append(_cause("leak", f"Something keeps what it should let go, step after step.{grown}", False,
                               "memory after each step: flat is need, rising is a leak (`outsize run`, `outsize watch`)"))  # fmt: skip
    return suspects


def _place(case: Case) -> str:
    device = case.failure.device
    return "the device" if device is None else "RAM" if device == "cpu" else device
