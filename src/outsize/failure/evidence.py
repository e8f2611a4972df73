"""Why we believe it: what the message says, what the machine says now, what follows; kept apart by kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outsize.core.failure import Evidence, Failure
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case

_SAID = (
    ("requested_bytes", "asked for"),
    ("total_bytes", "the device has"),
    ("free_bytes", "free"),
    ("allocated_bytes", "held by the framework's allocator"),
    ("reserved_bytes", "reserved by it in all"),
    ("limit_bytes", "allowed"),
)
_SAID_EXTRA = (
    ("reserved_unallocated_bytes", "reserved but not in use"),
    ("cached_bytes", "cached, not in use"),
    ("private_pool_bytes", "in private pools of CUDA graphs"),
    ("process_in_use_bytes", "this process, outside PyTorch included"),
    ("other_allocations_bytes", "other allocations"),
    ("anon_rss_bytes", "RAM of the killed process"),
    ("node_used_bytes", "used on the node"),
    ("used_bytes", "used"),
    ("temp_bytes", "temporaries of the program"),
    ("parameter_bytes", "arguments of the program"),
    ("usage_bytes", "used when it was killed"),
)


def find_evidence(case: Case) -> tuple[Evidence, ...]:
    """Said, then read, then inferred."""
    return (*_messages(case), *_machine(case), *_inferred(case))


def _messages(case: Case) -> Iterator[Evidence]:
    failure = case.failure
    if case.format == "dead child":
        ended = "SIGBUS" if failure.extra.get("signal") == "Bus error" else "SIGKILL"
        held, asked = case.extra("anon_rss_bytes"), case.extra("asked_bytes")
        yield Evidence(
            kind="machine",
            text=f"{failure.process or 'the program'} (pid {failure.pid}) was ended by "
            f"{ended} without a word"
            + (f"; it held {said(held)} then" if held else "")
            + (f" and had asked for {said(asked)}" if asked else "")
            + (f"; its limit was {said(failure.limit_bytes)}" if failure.limit_bytes else ""),
        )
        return
    wrapped = {*failure.extra.get("wrapped", ()), *failure.extra.get("impossible", ())}
    parts = [
        f"{word} {said(getattr(failure, name))}"
        for name, word in _SAID
        if getattr(failure, name) is not None and name not in wrapped
    ]
    parts += [
        f"{word} {said(failure.extra[name])}"
        for name, word in _SAID_EXTRA
        if isinstance(failure.extra.get(name), int) and name not in wrapped
    ]
    who = failure.framework + (f" on {failure.device}" if failure.device else "")
    if failure.shape is not None:
        parts.insert(0, f"shape {list(failure.shape)}" + (f" of {failure.dtype}" if failure.dtype else ""))
    if failure.pid is not None:
        parts.append(f"pid {failure.pid}" + (f" ({failure.process})" if failure.process else ""))
    yield Evidence(
        kind="message", text=f"{who}: {', '.join(parts)}" if parts else f"{who} ran out of memory; no numbers are given"
    )
    for name in sorted(wrapped):
        value = _field(failure, name)
        yield Evidence(
            kind="message",
            text=f"{name.removesuffix('_bytes').replace('_', ' ')} is printed as {value:,} bytes: "
            + (
                "a counter that went below zero and wrapped at 2^64, not a reading"
                if value >= 2**63
                else "more than any machine can address"
            ),
        )


def _field(failure: Failure, name: str) -> Any:
    return getattr(failure, name) if name in failure.__dataclass_fields__ else failure.extra[name]


def _machine(case: Case) -> Iterator[Evidence]:
    reading = case.reading
    if reading is None:
        return
    host = reading.host
    if case.on_host or case.failure.device is None:
        biting = f"; {host.biting.name} caps it at {said(host.biting.bytes)}" if host.biting else ""
        holds = "" if case.format == "dead child" else f", this process holds {said(reading.rss)}"
        yield Evidence(
            kind="machine",
            text=f"now: {said(host.available)} of {said(host.total)} RAM available{holds}{biting}",
        )
    if case.failure.device is not None and case.failure.device.startswith(("cuda", "hip")):
        index = int(case.failure.device.partition(":")[2] or 0)
        for device in reading.devices:
            if device.pool.index == index:
                holders = ", ".join(
                    f"pid {holder.pid} {holder.name or '-'} {said(holder.bytes)}" for holder in device.holders[:4]
                )
                yield Evidence(
                    kind="machine",
                    text=f"now: {device.name}, {said(device.available)} of {said(device.total)} available"
                    + (f"; {holders}" if holders else ""),
                )
    if reading.overcommit == "never":
        yield Evidence(
            kind="machine",
            text="overcommit is off: a request fails when promises pass the commit limit, touched or not",
        )


def _inferred(case: Case) -> Iterator[Evidence]:
    failure, spec = case.failure, case.spec
    if spec is not None:
        yield Evidence(kind="inferred", text=f"{spec} is exactly {spec.bytes:,} bytes ({said(spec.bytes)})")
    if case.on_torch_gpu and failure.requested_bytes in (2 * 2**20, 20 * 2**20):
        small = failure.requested_bytes == 2 * 2**20
        yield Evidence(
            kind="inferred",
            text=f"{said(failure.requested_bytes)} is the segment PyTorch asks the "
            f"driver for, whenever a tensor of "
            f"{'up to 1 MiB' if small else '1 to 10 MiB'} finds no room: the tensor is smaller",
        )
    if case.on_torch_gpu and case.slack is not None and case.gap:
        share = "" if not failure.total_bytes else f" ({case.slack / failure.total_bytes:.1%} of the device)"
        if case.slack >= case.gap and not case.expandable:
            yield Evidence(
                kind="inferred",
                text=f"PyTorch held {said(case.slack)} in pieces without using them{share}: that is all expandable_segments "
                "can give",
            )
        if case.slack < case.gap:
            yield Evidence(
                kind="inferred",
                text=f"not fragmentation: the {said(case.slack)} reserved but unused "
                f"are less than the {said(case.gap)} that were "
                "missing, so expandable_segments cannot help",
            )
        elif case.expandable:
            yield Evidence(kind="inferred", text="expandable_segments is already on, so it is not offered again")
        yield Evidence(
            kind="inferred",
            text="torch.cuda.empty_cache() would give nothing: PyTorch had released every whole cached block "
            "before it raised",
        )
    if case.strangers:
        names = ", ".join(f"pid {pid} {said(size)}" for pid, size in case.strangers)
        yield Evidence(kind="inferred", text=f"other processes hold part of the device: {names}")
    elif case.others:
        yield Evidence(
            kind="inferred",
            text=f"{said(case.others)} of {said(failure.total_bytes)} are neither free nor this process's",
        )
    if case.outside:
        yield Evidence(
            kind="inferred",
            text=f"this process holds {said(case.outside)} outside PyTorch's allocator: the CUDA context and libraries",
        )
    if case.growth:
        yield Evidence(kind="inferred", text=f"the process grew by {said(case.growth)} in its last minute")
