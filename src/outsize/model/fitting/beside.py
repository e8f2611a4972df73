"""What a card holds beside a step: tensors of the same process that are not the step's, such as averaged weights, another
model, samples that wait. They are there at every moment of it, inside the same budget.

In: the tensors that the step has at its beginning. Out: `Beside`, bytes; what a trace finds out to be the step's after all (a
teacher that its loss calls) is taken off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outsize.core.units import format_bytes
from outsize.model.fitting.exhaustion import clear_up

LITTLE = 1 << 20
"""Less than this is no tensor of anybody: seeds, scales, rounding."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What the process holds on a card beside the tensors that were named."""

    others: int = 0
    """Bytes of other tensors."""
    gaps: int = 0
    """Bytes around them that the allocator cannot give back; the step may use them, or find them too short."""

    def without(self, met: int) -> int:
        """Bytes that stay beside a step whose trace met so many of them."""
        others = self.others - met
        return others + self.gaps if others >= LITTLE else 0


NOTHING = Beside()


def look_beside(device: Any, mine: Iterable[Any]) -> Beside:
    """What else is on a card now; nothing elsewhere."""
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return NOTHING
    clear_up()
    torch._C._cuda_clearCublasWorkspaces()  # a step counts them as its own
    torch.cuda.empty_cache()
    index = torch.cuda.current_device() if device.index is None else device.index
    own = {tensor.untyped_storage().data_ptr() for tensor in mine if tensor.device.type == "cuda"}
    others = gaps = 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == index:
            taken = _taken(segment, own)
            others += taken
            gaps += segment["total_size"] - segment["allocated_size"] if taken else 0
    return Beside(others, gaps)


def _taken(segment: dict[str, Any], own: set[int]) -> int:
    """Bytes of a segment's blocks that nobody has named; a block is told by where it begins."""
    address, taken = segment["address"], 0
    for block in segment["blocks"]:
        if block["state"] == "active_allocated" and address not in own:
            taken += block["size"]
        address += block["size"]
    return taken


def say_beside(size: int) -> str:
    """For an error, after what a step holds."""
    return f", {format_bytes(size)} of it in other tensors of this process" if size else ""


def note_beside(size: int) -> list[str]:
    """For a plan."""
    if not size:
        return []
    return [f"{format_bytes(size)} are held by tensors of this process that are not the step's, and counted with it"]
