"""What the host holds of a hosted step, and what goes to the scratch file where that is too much.

In: hosted facts, a choice and its projection. Out: bytes of host memory at most, and the choice with state, weights and gradients
in the scratch file, in this order, the largest first, until the rest fits.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from dataclasses import replace
from typing import Any

from outsize.array.store.base import ALIGNMENT, round_up
from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.engine.pool import round_to_pages
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.pinned_blocks import MOVERS, state_bytes
from outsize.model.fitting.move.ring import aligned
from outsize.model.fitting.move.scratch_file import READERS, WRITERS, piece_of
from outsize.model.fitting.move.units import Cut, Place
from outsize.model.fitting.plan.facts import HostedFacts
from outsize.model.fitting.plan.projection import Projection

LIBRARIES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}
"""Host bytes that a device's libraries come to hold once their kernels have run, beyond what the process holds before. One
training on a CPU held 675 MB in most processes and 720 MB in one of nineteen, 7 MB more than with 48 MiB here."""
READAHEAD = 3
"""Units of a file that are in host memory at once: one on its way to the device, the others being read."""
PART = 16
"""The pieces of memory through which a scratch file is read and written are one part in so many of the host's budget."""
SMALL = 1024
"""Parameters below one part in so many of the largest, or below a page, stay in memory: they are many transfers and no room."""
KINDS = ("state", "weights", "gradients")
"""What can be in the scratch file, in the order in which it goes there: state is needed once a step, weights twice."""


def sizes_of(facts: HostedFacts, choice: Choice, kind: str, place: Place) -> int:
    """Bytes of one kind that belong to a parameter."""
    if kind == "state":
        return state_bytes(facts.layout.get(id(place.parameter), []))
    if kind == "gradients":
        return place.size if choice.update == "kept" and place.parameter.requires_grad else 0
    return place.size


def filed_bytes(facts: HostedFacts, choice: Choice) -> dict[str, int]:
    """Bytes in the scratch file, by kind."""
    places = {place.name: place for place in facts.cut(choice).places()}
    return {
        kind: sum(sizes_of(facts, choice, kind, places[name]) for name in choice.disk.get(kind, ())) for kind in KINDS
    }


def host_bytes(facts: HostedFacts, choice: Choice, projection: Projection) -> int:
    """What host memory holds at most, while things move to their places and in a step."""
    cut = facts.cut(choice)
    held = facts.side.base + LIBRARIES[facts.device]
    if facts.side.files is not None:
        return held + READAHEAD * (cut.largest + 2**21) + (projection.peak if facts.device == "cpu" else 0)
    blocks = {kind: sum(_in_blocks(facts, choice, cut, kind)) for kind in KINDS}
    pieces = (READERS + WRITERS) * round_to_pages(choice.transfer_bytes)
    moving = held + sum(sorted(_in_blocks(facts, choice, cut, "weights"), reverse=True)[:MOVERS])
    if choice.transfer_bytes:  # what goes to the file goes first
        moving += max(facts.side.before, blocks["weights"]) + max(_in_blocks(facts, choice, cut, "state")) + pieces
    else:
        moving += blocks["weights"]  # before state is made
    if choice.update != "none":
        held += blocks["state"] + blocks["gradients"]
    if choice.update == "host":
        held += choice.state_ring
    held += blocks["weights"] + pieces + projection.away + (projection.peak if facts.device == "cpu" else 0)
    return max(moving, held)


def _in_blocks(facts: HostedFacts, choice: Choice, cut: Cut, kind: str) -> list[int]:
    """Bytes in memory, a block a unit."""
    filed = set(choice.disk.get(kind, ()))
    sizes = [
        sum(aligned(sizes_of(facts, choice, kind, place)) for place in unit.places if place.name not in filed)
        for unit in (*cut.units.values(), cut.held)
    ]
    return [round_to_pages(size) for size in sizes] if choice.transfer_bytes else sizes


def spill(facts: HostedFacts, choice: Choice, projection: Projection) -> Choice:
    """The choice with that in the scratch file which the host has no room for."""
    if not facts.spills:
        return choice
    room = max(facts.host - facts.side.base - LIBRARIES[facts.device], 0) // PART
    choice = replace(choice, transfer_bytes=facts.transfer_bytes or piece_of(room), disk={})
    places = facts.cut(choice).places()

    def fits(choice: Choice, kind: str, names: list[str], count: int) -> bool:
        return host_bytes(facts, _filed(choice, kind, names[:count]), projection) <= facts.host

    stay = {
        "state": set(),
        "weights": {place.name for place in facts.cut(choice).held.places},
        "gradients": _not_the_optimizers(facts, places),
    }
    for kind in KINDS:
        rows = [(sizes_of(facts, choice, kind, place), place.name) for place in places if place.name not in stay[kind]]
        rows.sort(reverse=True)
        names = [name for size, name in rows if size >= max(ALIGNMENT, rows[0][0] // SMALL)]
        few = bisect.bisect_left(range(len(names)), True, key=functools.partial(fits, choice, kind, names))
        choice = _filed(choice, kind, names[:few])  # the fewest that do
        if few < len(names) or host_bytes(facts, choice, projection) <= facts.host:
            break
    return choice


def _filed(choice: Choice, kind: str, names: list[str]) -> Choice:
    """The choice with these parameters' bytes of one kind in the scratch file."""
    return replace(choice, disk={**choice.disk, kind: tuple(names)}) if names else choice


def _not_the_optimizers(facts: HostedFacts, places: list[Place]) -> set[str]:
    """Parameters whose gradients stay where the user finds them."""
    optimizer: Any = facts.work.optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    mine = {id(parameter) for group in groups for parameter in group["params"]}
    return {place.name for place in places if id(place.parameter) not in mine}


def check_disk(facts: HostedFacts, choice: Choice) -> None:
    """A `BudgetError` where the scratch folder has no room for what is to be there."""
    if not choice.transfer_bytes:
        return
    filed = filed_bytes(facts, choice)
    needed = sum(round_up(size) for size in filed.values())
    disk = facts.side.disk
    room = disk.bytes if disk is not None else 0
    if needed > room:
        parts = " and ".join(f"{format_bytes(size)} of {kind}" for kind, size in filed.items() if size)
        least = facts.host + needed
        raise BudgetError(
            f"host={facts.host} leaves {parts} for the scratch folder {facts.folder}, which has room for "
            f"{format_bytes(room)}{f' ({disk.reason})' if disk else ''}: free some, name another folder with "
            f"outsize.budget(scratch=...), or give host={least}",
            needed=needed, budget=room, smallest=least, culprit="disk",
        )  # fmt: skip


def in_memory(tensors: list[Any]) -> list[Any]:
    """Those that are in memory of this process, and not in a file that is mapped (`torch.load(..., mmap=True)`)."""
    here = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
    ranges = []
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if words[4] != "0" and len(words) > 5:
                ranges.append(tuple(int(end, 16) for end in words[0].split("-")))
    starts = [start for start, _ in ranges]

    def is_mapped(address: int) -> bool:
        at = bisect.bisect_right(starts, address) - 1
        return at >= 0 and address < ranges[at][1]

    return [tensor for tensor in here if not is_mapped(tensor.data_ptr())]
