"""Why we believe it: what the message says, what the machine says now, what follows; kept apart by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outsize.core.failure import Evidence
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
    dead = case.format == "dead child"
    texts = {
        "message": [] if dead else list(_messages(case)),
        "machine": [*([_ending(case)] if dead else []), *_machine(case)],
        "inferred": list(_inferred(case)),
    }
    return tuple(Evidence(kind=kind, text=text) for kind, rows in texts.items() for text in rows)  # type: ignore[arg-type]


def add_readings(evidence: tuple[Evidence, ...], texts: Iterable[str]) -> tuple[Evidence, ...]:
    """The evidence with more that the machine says, before what is inferred."""
    at = next((place for place, item in enumerate(evidence) if item.kind == "inferred"), len(evidence))
    return (*evidence[:at], *(Evidence(kind="machine", text=text) for text in texts), *evidence[at:])


def _ending(case: Case) -> str:
    failure = case.failure
    ended = "SIGBUS" if failure.extra.get("signal") == "Bus error" else "SIGKILL"
    held, asked = case.extra("anon_rss_bytes"), case.extra("asked_bytes")
    return (
        f"{failure.process or 'the program'} (pid {failure.pid}) was ended by {ended} without a word"
        + (f"; it held {said(held)} then" if held else "")
        + (f" and had asked for {said(asked)}" if asked else "")
        + (f"; its limit was {said(failure.limit_bytes)}" if failure.limit_bytes else "")
    )


def _messages(case: Case) -> Iterator[str]:
    failure = case.failure
    numbers = {name: getattr(failure, name) for name, _ in _SAID} | dict(failure.extra)
    wrapped = {*failure.extra.get("wrapped", ()), *failure.extra.get("impossible", ())}
    parts = [
        f"{word} {said(numbers[name])}"
        for name, word in (*_SAID, *_SAID_EXTRA)
        if isinstance(numbers.get(name), int) and name not in wrapped
    ]
    who = failure.framework + (f" on {failure.device}" if failure.device else "")
    if failure.shape is not None:
        parts.insert(0, f"shape {list(failure.shape)}" + (f" of {failure.dtype}" if failure.dtype else ""))
    if failure.pid is not None:
        parts.append(f"pid {failure.pid}" + (f" ({failure.process})" if failure.process else ""))
    what = "could not write its program as one message" if case.format == "graph-message" else "ran out of memory"
    yield f"{who}: {', '.join(parts)}" if parts else f"{who} {what}; no numbers are given"
    for name in sorted(wrapped):
        below = "a counter that went below zero and wrapped at 2^64, not a reading"
        why = below if numbers[name] >= 2**63 else "more than any machine can address"
        yield f"{name.removesuffix('_bytes').replace('_', ' ')} is printed as {numbers[name]:,} bytes: {why}"


def _machine(case: Case) -> Iterator[str]:
    reading, place = case.reading, case.failure.device
    if reading is None:
        return
    host = reading.host
    if case.on_host or place is None:
        biting = f"; {host.biting.name} caps it at {said(host.biting.bytes)}" if host.biting else ""
        holds = "" if case.format == "dead child" else f", this process holds {said(reading.rss)}"
        yield f"now: {said(host.available)} of {said(host.total)} RAM available{holds}{biting}"
    if place is not None and place.startswith(("cuda", "hip")):
        for device in reading.devices:
            if device.pool.index == int(place.partition(":")[2] or 0):
                holders = [f"pid {one.pid} {one.name or '-'} {said(one.bytes)}" for one in device.holders[:4]]
                held = f"; {', '.join(holders)}" if holders else ""
                yield f"now: {device.name}, {said(device.available)} of {said(device.total)} available{held}"
    yield from _arenas(case)
    if reading.overcommit == "never":
        yield "overcommit is off: a request fails when promises pass the commit limit, touched or not"


def _arenas(case: Case) -> Iterator[str]:
    """What frameworks in this process have taken of the place that ran out."""
    assert case.reading is not None
    for arena in case.reading.frameworks:
        host = arena.pool.kind == "host"
        if host != (case.on_host or case.failure.device is None) or case.format == "dead child":
            continue
        counts = (("at most", arena.peak), ("taken", arena.reserved), ("allowed", arena.limit))
        more = "".join(f", {word} {said(size)}" for word, size in counts if size is not None)
        place = "" if host else f" of GPU {arena.pool.index}"
        yield f"now: arrays of {arena.framework} hold {said(arena.in_use)}{place}{more} ({arena.source})"
        yield from arena.notes


def _inferred(case: Case) -> Iterator[str]:
    failure, spec = case.failure, case.spec
    if spec is not None:
        yield f"{spec} is exactly {spec.bytes:,} bytes ({said(spec.bytes)})"
    if case.on_torch_gpu and failure.requested_bytes in (2 * 2**20, 20 * 2**20):
        tensor = "up to 1 MiB" if failure.requested_bytes == 2 * 2**20 else "1 to 10 MiB"
        yield (
            f"{said(failure.requested_bytes)} is the segment PyTorch asks the driver for, whenever a tensor of {tensor} "
            "finds no room: the tensor is smaller"
        )
    if case.on_torch_gpu and case.slack is not None and case.gap:
        yield from _inferred_from_slack(case, case.slack, case.gap)
    if case.strangers:
        names = ", ".join(f"pid {pid} {said(size)}" for pid, size in case.strangers)
        yield f"other processes hold part of the device: {names}"
    elif case.others:
        yield f"{said(case.others)} of {said(failure.total_bytes)} are neither free nor this process's"
    if case.outside:
        yield f"this process holds {said(case.outside)} outside PyTorch's allocator: the CUDA context and libraries"
    if case.growth:
        yield f"the process grew by {said(case.growth)} in its last minute"


def _inferred_from_slack(case: Case, slack: int, gap: int) -> Iterator[str]:
    total = case.failure.total_bytes
    if slack < gap:
        yield (
            f"not fragmentation: the {said(slack)} reserved but unused are less than the {said(gap)} that were missing, "
            "so expandable_segments cannot help"
        )
    elif case.expandable:
        yield "expandable_segments is already on, so it is not offered again"
    else:
        share = "" if not total else f" ({slack / total:.1%} of the device)"
        yield f"PyTorch held {said(slack)} in pieces without using them{share}: that is all expandable_segments can give"
    yield f"{case.torch_module}.empty_cache() would give nothing: PyTorch had released every whole cached block before it raised"
