"""Why it ran out: rules over a `Case`, asked in the order of `RULES`.

In: a `Case`. Out: the causes that the numbers allow, likeliest first; the first is *the* cause, certain only where the
numbers decide. PyTorch releases every unsplit cached block before it raises, so what it still holds unused is stuck in
split segments: that is what makes `free + unused >= request` mean fragmentation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from outsize.core.failure import Cause, CauseName
from outsize.core.units import format_bytes as said
from outsize.failure.case import NVIDIA_SMI, SMALL, Case, make_cause
from outsize.failure.cause_device import (
    bfc_fragmentation,
    fraction,
    fragmentation,
    graph_pools,
    kv_cache,
    other_process,
    others_too,
    prealloc,
    refused_though_free,
    tpu,
    watermark,
)
from outsize.failure.cause_host import (
    broadcast,
    container_kill,
    heap,
    machine_kill,
    outer_product,
    rlimit,
    shared_memory,
    signal,
    small_request,
)

Rule = Callable[[Case], Cause | None]


def impossible(case: Case) -> Cause | None:
    """More bytes than any address space: a length that overflowed or was read from garbage."""
    asked = case.failure.requested_bytes
    if asked is None or asked <= 2**57:
        return None
    return make_cause(
        CauseName.IMPOSSIBLE,
        f"{asked:,} bytes were asked for, more than any machine can address: a length wrapped below zero, "
        f"overflowed, or "
        "was read from corrupt or misaligned data. More memory will not help.",
    )


def warning_only(case: Case) -> Cause | None:
    """An allocator's remark that ends nothing."""
    if not case.failure.extra.get("not_a_failure"):
        return None
    return make_cause(
        CauseName.WARNING,
        f"This is a remark of the allocator about a request of {said(case.need)}, not a failure: the program goes on. "
        "If it died later, the message that counts comes after this one.",
    )


def larger_than_device(case: Case) -> Cause | None:
    """The request alone passes the capacity, or the cap."""
    need, total, limit = case.need, case.failure.total_bytes, case.failure.limit_bytes
    if need is None:
        return None
    if total is not None and need > total and case.failure.framework not in {"ray"}:
        return make_cause(
            CauseName.LARGER_THAN_DEVICE,
            f"One request of {said(need)} is larger than all of {place_of(case)} ({said(total)}): nothing that "
            f"frees memory can help, "
            "the tensor itself has to become smaller or be worked on in pieces.",
        )
    if (
        case.on_host
        and case.reading is not None
        and need > (case.reading.host.total or 2**63) + case.reading.swap_total
    ):
        return make_cause(
            CauseName.LARGER_THAN_MACHINE,
            f"One request of {said(need)} is larger than all the RAM and swap here "
            f"({said((case.reading.host.total or 0) + case.reading.swap_total)}): "
            "it has to become smaller or be worked on in pieces.",
        )
    if limit is not None and need > limit and case.format not in {"tpu-hbm"} and limit < 2**57:
        return make_cause(
            CauseName.LARGER_THAN_LIMIT,
            f"One request of {said(need)} is larger than the whole limit of {said(limit)}.",
        )
    return None


def true_need(case: Case) -> Cause | None:
    """The program holds what it asked for."""
    need, free, held = case.need, case.failure.free_bytes, case.held
    if need is not None and free is not None and need <= free:
        return None
    if need is not None and free is not None and held is not None:
        small = f" The {said(need)} asked for last only tipped it over." if need < 0.05 * held else ""
        missing = max(0, need - free - (case.slack or 0))
        counted = (
            f"{said(missing)} are missing even if all its unused cache counted"
            if missing
            else f"only {said(case.slack)} of its cache were unused, and in pieces"
        )
        return make_cause(
            CauseName.TRUE_NEED,
            f"PyTorch's live tensors take {said(case.failure.allocated_bytes)} of "
            f"{said(case.failure.total_bytes)} and {said(need)} more do not fit: {counted}.{small}"
            if case.on_torch_gpu and case.failure.allocated_bytes is not None
            else f"{said(held)} are in use, {said(free)} free, and {said(need)} were asked for: "
            f"{said(max(0, need - free))} are missing.",
        )
    if need is not None and free is not None:
        return make_cause(
            CauseName.TRUE_NEED,
            f"{said(need)} were asked for and {said(free)} could be had: {said(max(0, need - free))} are missing.",
            certain=False,
            decide="how much the process itself holds: `outsize.guard()` says",
        )
    return None


def unsaid(case: Case) -> Cause | None:
    """The message does not decide."""
    need = f"{said(case.need)} could not be had" if case.need is not None else "Memory could not be had"
    where = "RAM" if case.on_host else place_of(case)
    if case.failure.framework == "jax" or case.failure.framework == "tensorflow":
        hint = "the program's own buffers against the allocator's limit: the BFC dump or `memory_analysis()`"
    elif case.on_host:
        hint = "`outsize memory` on that machine: RAM available, container limit, `ulimit -v`"
        hint += "" if case.watched else "; or `outsize run`"
    else:
        hint = "the rest of the message, `nvidia-smi`, or `outsize.guard()` around the line"
    return make_cause(
        CauseName.TRUE_NEED,
        f"{need} from {where}; the message does not say what held the rest.",
        certain=False,
        decide=hint,
    )


RULES: tuple[Rule, ...] = (
    impossible,
    warning_only,
    shared_memory,
    container_kill,
    machine_kill,
    kv_cache,
    tpu,
    watermark,
    prealloc,
    heap,
    broadcast,
    larger_than_device,
    fragmentation,
    fraction,
    bfc_fragmentation,
    refused_though_free,
    other_process,
    graph_pools,
    rlimit,
    small_request,
    signal,
    true_need,
    unsaid,
)
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
    first = found[0]
    more = [outer_product(case), others_too(case)]
    if first.name == CauseName.ALREADY_FULL or (not first.certain and first.name != CauseName.BROADCAST):
        more += _usual_suspects(case)
    for cause in more:
        if cause is not None and all(cause.name != other.name for other in found):
            found.append(cause)
    return tuple(found)


def _usual_suspects(case: Case) -> list[Cause]:
    """What else it is, as a rule, where the numbers leave it open."""
    suspects = []
    if case.failure.framework in {"tensorflow", "jax"} and (case.failure.device or "").startswith("cuda"):
        suspects.append(
            make_cause(CauseName.OTHER_PROCESS, "Another process holds part of the card.", False, NVIDIA_SMI)
        )
    if case.on_host or case.failure.extra.get("signal") == "Killed":
        suspects.append(
            make_cause(
                CauseName.LIMIT,
                "A container, a job or `ulimit` allows less than the machine has.",
                False,
                "`outsize memory` inside that container or job",
            )
        )
    if case.need is None or case.need < SMALL or case.growth:
        grown = f" It grew by {said(case.growth)} in its last minute." if case.growth else ""
        suspects.append(
            make_cause(
                CauseName.LEAK,
                f"Something keeps what it should let go, step after step.{grown}",
                False,
                "memory after each step: flat is need, rising is a leak" + ("" if case.watched else " (`outsize run`)"),
            )
        )
    return suspects


def place_of(case: Case) -> str:
    device = case.failure.device
    return "the device" if device is None else "RAM" if device == "cpu" else device
