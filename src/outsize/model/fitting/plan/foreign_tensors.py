"""What a card holds beside a step: tensors of the same process that are not the step's, such as averaged weights, another
model, samples that wait. They are there at every moment of it, inside the same budget.

In: the tensors that the step has at its beginning. Out: `Beside`, bytes; what a trace finds out to be the step's after all (a
teacher that its loss calls) is taken off.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outsize.core.units import format_bytes
from outsize.model.fitting.move.out_of_memory import clear_up
from outsize.model.torch_port.dispatch import parts_of
from outsize.model.torch_port.objects import clear_workspaces

LITTLE = 1 << 20
"""Less than this is no tensor of anybody: seeds, scales, rounding."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What the process holds on a card beside the tensors that were named."""

    blocks: Mapping[int, int] = field(default_factory=dict)
    """Where other tensors begin -> their bytes."""
    gaps: int = 0
    """Bytes around them that the allocator cannot give back; the step may use them, or find them too short."""

    def without(self, met: Container[int]) -> int:
        """Bytes that stay beside a step whose trace met the tensors that begin there."""
        others = sum(size for address, size in self.blocks.items() if address not in met)
        return others + self.gaps if others >= LITTLE else 0


NOTHING = Beside()


def look_beside(device: Any, mine: Iterable[Any]) -> Beside:
    """What else is on a card now; nothing elsewhere, and where another allocator than torch's own keeps the account."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        return NOTHING
    clear_workspaces()  # a step counts them as its own
    clear_up()
    index = torch.cuda.current_device() if device.index is None else device.index
    named, gaps = _named(mine), 0
    blocks: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        found = dict(_others(segment, named)) if segment["device"] == index else {}
        blocks |= found
        gaps += segment["total_size"] - segment["allocated_size"] if found and not _private(segment) else 0
    return Beside(blocks, gaps)


def _others(segment: dict[str, Any], named: dict[int, int]) -> Iterator[tuple[int, int]]:
    """(where it begins, bytes) of what nobody has named in a segment."""
    address = segment["address"]
    for block in segment["blocks"]:
        size = named.get(address, block["size"])
        if size and (block["state"] == "active_allocated" or _private(segment)):
            yield address, size
        address += block["size"]


def _private(segment: dict[str, Any]) -> bool:
    """True in a pool of its own, as of a CUDA graph: what is free in it is nobody else's."""
    return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)


def _named(mine: Iterable[Any]) -> dict[int, int]:
    """Where tensors' storages begin -> bytes of them that none of the tensors covers: a batch may be a few rows of all samples,
    and only those are counted as the step's."""
    left: dict[int, int] = {}
    for tensor in {id(tensor): tensor for whole in mine for tensor in parts_of(whole)}.values():
        storage = tensor.untyped_storage()
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        before = left.setdefault(storage.data_ptr(), storage.nbytes())
        left[storage.data_ptr()] = max(0, before - span * tensor.element_size())
    return left


def held_on(device: Any) -> int:
    """Bytes that this process's allocator holds on a card, the step's and others': what is available there leaves them out, and a
    plan counts them."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" and torch.cuda.is_available() else 0


def say_beside(size: int) -> str:
    """For an error, after what a step holds."""
    return f", {format_bytes(size)} of it in other tensors of this process" if size else ""


def note_beside(size: int) -> list[str]:
    """For a plan."""
    if not size:
        return []
    return [f"{format_bytes(size)} are held by tensors of this process that are not the step's, and counted with it"]
