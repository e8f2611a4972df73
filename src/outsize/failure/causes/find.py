"""Why it ran out: rules over a `Case`, asked in the order of `RULES`.

In: a `Case`. Out: the causes that the numbers allow, likeliest first; the first is *the* cause, certain only where the
numbers decide. PyTorch releases every unsplit cached block before it raises, so what it still holds unused is stuck in
split segments: that is what makes `free + unused >= request` mean fragmentation and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outsize.core.failure import Cause, CauseName
from outsize.core.units import format_bytes as said
from outsize.failure import signs
from outsize.failure.case import SMALL, Case, make_cause
from outsize.failure.causes import device, host
from outsize.failure.work import Work

Rule = Callable[[Case], Cause | None]
LARGEST_CARD = 270 * 2**30
"""Bytes that no single device of today has."""
MOST_RAM = 2**43
"""Bytes that nearly no machine has."""


def impossible(case: Case) -> Cause | None:
    """More bytes than any address space: a length that overflowed or was read from garbage."""
    asked = case.failure.requested_bytes
    if asked is None or asked <= 2**57:
        return None
    return make_cause(
        CauseName.IMPOSSIBLE,
        f"{asked:,} bytes were asked for, more than any machine can address: a length wrapped below zero, "
        "overflowed, or was read from corrupt or misaligned data. More memory will not help.",
    )


def wrapped_length(case: Case) -> Cause | None:
    """An axis as long as a whole number of 32 bits that went below zero, or as its largest."""
    for axis in case.failure.shape or ():
        below = 2**32 - axis
        if 0 < below <= 2**22 or abs(2**31 - axis) <= 1:
            number = f"{-below:,} in 32 bits without a sign" if axis > 2**31 + 1 else "the largest number of 32 bits"
            return make_cause(
                CauseName.IMPOSSIBLE,
                f"The axis {axis:,} is {number}: a length went below zero, overflowed, or was read from a header that holds "
                "no length. More memory will not help.",
                decide="print the length just before the call, and where it is read from",
            )
    return None


def warning_only(case: Case) -> Cause | None:
    """An allocator's remark that ends nothing."""
    if not case.failure.extra.get("not_a_failure"):
        return None
    return make_cause(
        CauseName.WARNING,
        f"This is a remark of the allocator about a request of {said(case.need)}, not a failure: the program goes on. "
        "If it died later, the message that counts comes after this one.",
    )


def hardly_meant(case: Case) -> Cause | None:
    """More than nearly every machine has, in one piece whose shape nobody named."""
    if case.failure.framework == "jax":  # its sizes stand in the program and are read from no data
        return None
    if case.need is None or case.need < MOST_RAM or case.failure.shape is not None:
        return None
    return make_cause(
        CauseName.IMPOSSIBLE,
        f"One request of {said(case.need)} is more than nearly any machine has: a length was probably read from corrupt "
        "or misaligned data, or overflowed. More memory will not help.",
        decide="print the length, or the size of the picture or file, just before the call",
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
            "frees memory can help, the tensor itself has to become smaller or be worked on in pieces.",
        )
    if total is None and case.on_device and need > LARGEST_CARD:
        return make_cause(
            CauseName.LARGER_THAN_DEVICE,
            f"One request of {said(need)} is larger than any card: nothing that frees memory can help, the array itself has to "
            "become smaller or be worked on in pieces.",
        )
    here = None if case.reading is None else (case.reading.host.total or 2**63) + case.reading.swap_total
    if case.on_host and here is not None and need > here:
        return make_cause(
            CauseName.LARGER_THAN_MACHINE,
            f"One request of {said(need)} is larger than all the RAM and swap here ({said(here)}): it has to become "
            "smaller or be worked on in pieces.",
        )
    if case.on_host and here is None and case.told_ram is not None and need > case.told_ram:
        return make_cause(
            CauseName.LARGER_THAN_MACHINE,
            f"One request of {said(need)} is larger than all the RAM that the machine is said to have ({said(case.told_ram)}): "
            "it has to become smaller or be worked on in pieces.",
        )
    if limit is not None and need > limit and case.format not in {"tpu-hbm"} and limit < 2**57:
        return make_cause(
            CauseName.LARGER_THAN_LIMIT,
            f"One request of {said(need)} is larger than the whole limit of {said(limit)}.",
        )
    return None


def long_axis(case: Case) -> Cause | None:
    """One axis longer than nearly every machine can hold, of a length that nobody writes, where the machine is not known."""
    shape = case.failure.shape or ()
    if len(shape) != 1 or (case.need or 0) < MOST_RAM or shape[0] % 10**6 == 0 or shape[0] % 2**20 == 0:
        return None
    return make_cause(
        CauseName.IMPOSSIBLE,
        f"One axis of {shape[0]:,} elements, {said(case.need)}, is more than nearly any machine has: rows were multiplied (a "
        "join or an index whose keys repeat), or the length overflowed. More memory will not help.",
        decide="print the lengths before the call, and whether the index repeats: df.index.is_unique",
    )


def true_need(case: Case) -> Cause | None:
    """The program holds what it asked for."""
    need, free, held = case.need, case.failure.free_bytes, case.held
    if case.gap == 0:
        return None
    if need is not None and free is not None and held is not None:
        small = f" The {said(need)} asked for last only tipped it over." if need < 0.05 * held else ""
        missing = max(0, (case.gap or 0) - (case.slack or 0))
        counted = (
            f"{said(missing)} are missing even if all its unused cache counted"
            if missing
            else f"only {said(case.slack)} of its cache were unused, and in pieces"
        )
        beside = (
            f" {said(case.beside)} of the card are neither free nor PyTorch's: other processes, the desktop, contexts."
            if case.beside
            else ""
        )
        return make_cause(
            CauseName.TRUE_NEED,
            f"PyTorch's live tensors take {said(case.failure.allocated_bytes)} of "
            f"{said(case.failure.total_bytes)} and {said(need)} more do not fit: {counted}.{small}{beside}"
            if case.on_torch_gpu and case.failure.allocated_bytes is not None
            else f"{said(held)} are in use, {said(free)} free, and {said(need)} were asked for: "
            f"{said(case.gap)} are missing.",
            decide=case.who_holds if case.beside else "",
        )
    total = case.failure.total_bytes
    if need is not None and free is None and held is not None and total is not None and held + need > total:
        return make_cause(
            CauseName.TRUE_NEED,
            f"{said(held)} of {said(total)} are held by the framework's allocator, and {said(need)} more do not fit.",
        )
    limit, used = case.failure.limit_bytes, case.failure.allocated_bytes
    if need is None and limit is not None and used is not None and limit >= used > 0.98 * limit:
        return make_cause(
            CauseName.TRUE_NEED,
            f"{said(used)} of the {said(limit)} that the allocator may have were in use: it was full.",
        )
    if need is not None and limit is not None and used is not None and limit >= used > limit - need:
        return make_cause(
            CauseName.TRUE_NEED,
            f"{said(used)} of the {said(limit)} that the allocator may have were in use, and {said(need)} more do not fit.",
        )
    if need is not None and free is not None:
        return make_cause(
            CauseName.TRUE_NEED,
            f"{said(need)} were asked for and {said(free)} could be had: {said(case.gap)} are missing.",
            decide="how much the process itself holds: `outsize.guard()` says",
        )
    return None


def unsaid(case: Case) -> Cause | None:
    """The message does not decide."""
    need = f"{said(case.need)} could not be had" if case.need is not None else "Memory could not be had"
    program = case.extra("total_program_bytes")
    whole = (
        "" if program is None else f" The compiled program takes {said(program)} in all, arguments and results counted."
    )
    somewhere = case.failure.device is None and not case.on_host and not case.on_device and case.place == "cpu"
    somewhere = somewhere and signs.RAM.search(case.text) is None and signs.NO_CARD.search(case.text) is None
    places = {way.place for program in case.programs for way in program.advice}
    somewhere = somewhere and places != {"cpu"}  # a program that uses no card
    in_ram = case.on_host or (not somewhere and not case.on_device and case.place == "cpu")
    where = "RAM" if in_ram else "a place that the message does not name" if somewhere else place_of(case)
    if case.failure.framework == "jax" or case.failure.framework == "tensorflow":
        hint = "the program's own buffers against the allocator's limit: the BFC dump or `memory_analysis()`"
    elif in_ram or somewhere:
        hint = "`outsize memory` on that machine: RAM available, container limit, `ulimit -v`"
        hint += "" if case.watched else "; or `outsize run`"
    else:
        hint = f"the rest of the message, `{case.tool}`, or `outsize.guard()` around the line"
    return make_cause(
        CauseName.TRUE_NEED,
        f"{need} from {where}{_when(case)}. {_either(case, in_ram, somewhere)} The message does not say which.{whole}",
        decide=hint,
    )


def _when(case: Case) -> str:
    """The moment, where the text shows it."""
    return {
        Work.LOADS: " while weights were brought there",
        Work.SAVES: " while a checkpoint was gathered",
        Work.EVALUATES: " while a model was evaluated",
        Work.TRAINS: " while a model was trained",
        Work.INFERS: " while a model was used",
    }.get(case.work, "")


def _either(case: Case, in_ram: bool, somewhere: bool) -> str:
    """What it can be, as a rule, where no number decides."""
    if in_ram:
        limit = "a limit (container, job, `ulimit -v`)"
        return f"Either the program holds too much, or {limit} leaves it less than the machine has."
    if somewhere:
        return "Either the program needs more than there is, or others hold part of it."
    if case.work is Work.LOADS:
        return "Either the model is larger than the card, or something else holds part of it."
    return "Either the program needs more than the card has, or something else holds part of it."


RULES: tuple[Rule, ...] = (
    impossible, wrapped_length, warning_only, host.graph_message, host.shared_memory, host.pinned, host.mapping,
    host.address_space_check, host.fork, host.narrow_program, host.commit_limit, host.container_kill, host.job_kill,
    host.machine_kill, device.kv_cache, device.small_program, device.tpu, device.gives_nothing, device.watermark,
    device.prealloc, host.heap, device.library_room, host.free_though, host.multiplied, host.all_pairs, host.broadcast,
    hardly_meant, larger_than_device, long_axis, device.fragmentation, device.tpu_pieces, device.fraction, device.own_share,
    device.bfc_fragmentation,
    device.refused_though_free, device.free_though, device.refused_block, device.driver_refused, device.weights_refused,
    device.left_over, device.kept, device.other_process, device.graph_pools, host.rlimit, host.small_request, host.grown,
    host.told_full, host.signal, true_need, unsaid,
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
    first = found[0]
    more = [host.outer_product(case), device.others_too(case)]
    settled = first.certain or first.name in (CauseName.BROADCAST, CauseName.REFUSED, CauseName.IMPOSSIBLE)
    if first.name == CauseName.ALREADY_FULL or not settled:
        more += _usual_suspects(case)
    for cause in more:
        if cause is not None and all(cause.name != other.name for other in found):
            found.append(cause)
    return tuple(found)


def _usual_suspects(case: Case) -> Iterator[Cause]:
    """What else it is, as a rule, where the numbers leave it open."""
    if case.failure.framework in {"tensorflow", "jax"} and (case.failure.device or "cuda").startswith("cuda"):
        yield make_cause(CauseName.OTHER_PROCESS, "Another process holds part of the card.", decide=case.who_holds)
    if case.format in ("cuda-bare", "runtime-2"):
        yield make_cause(CauseName.OTHER_PROCESS, "Another process holds part of the card.", decide=case.who_holds)
    if (case.on_host or case.failure.extra.get("signal") == "Killed") and not case.spared_by_limit:
        text = "A container, a job or `ulimit` allows less than the machine has."
        yield make_cause(CauseName.LIMIT, text, decide="`outsize memory` inside that container or job")
    starts = case.failure.framework == "vllm"  # it takes its share of the card when it starts, once
    if not starts and (case.need is None or case.need < SMALL or case.growth):
        grown = f" It grew by {said(case.growth)} in its last minute." if case.growth else ""
        watch = "" if case.watched else " (`outsize run`)"
        text = f"Something keeps what it should let go, step after step.{grown}"
        yield make_cause(CauseName.LEAK, text, decide=f"memory after each step: flat is need, rising is a leak{watch}")


def place_of(case: Case) -> str:
    device = case.failure.device
    return "the device" if device is None else "RAM" if device == "cpu" else device
