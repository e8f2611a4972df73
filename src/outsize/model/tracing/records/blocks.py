"""Writes into the ledger what one operator takes: its results, and the blocks that its kernel takes inside.

In: an operator's name, arguments and results, and the device they are on. Out: records in the order in which the device is asked
for them. The rules for cards are in `kernels`; `host_calls` says what happens on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outsize.model.kernels.call_events import CallEvent
from outsize.model.kernels.cuda import CALL_EVENTS, Scratch, Size, blocks_of
from outsize.model.tracing.records.attribution import Owners
from outsize.model.tracing.records.ledger import Held, Ledger

_SPARE = ("aten.convolution.default", "aten.convolution_backward.default")
"""Operators whose workspaces torch can do without if there is no room."""

_ORDER: dict[str, tuple[int, ...]] = {
    "aten.native_dropout.default": (1, 0),
    "aten._scaled_dot_product_cudnn_attention.default": (2, 3, 0, 1),
    "aten._thnn_fused_gru_cell.default": (1, 0),
}
"""Operators that allocate their results in another order than they return them; positions among the tensors."""


class Blocks:
    """The blocks of one trace; what cuBLAS keeps for good is taken once."""

    def __init__(self, ledger: Ledger, owners: Owners, capability: tuple[int, int]) -> None:
        self.ledger, self.owners = ledger, owners
        self.scratch = Scratch(capability)

    def write(self, name: str, args: Any, results: list[Any], label: str) -> None:
        """Results and what the card's kernel takes inside, in the order in which the card is asked for them."""
        if not label.startswith("cuda"):
            self.write_events((), results, label, name)
            return
        if name in CALL_EVENTS:
            self.write_events(CALL_EVENTS[name](self.scratch, args, results), results, label, name)
            return
        thread = "backward" if self.owners.phase() == "backward" else "forward"
        blocks = blocks_of(self.scratch, name, args, results, thread)
        inside = [self._workspace(size, label, name) for size in blocks.before]
        each = iter(blocks.each)
        order = _ORDER.get(name)
        for tensor in results if order is None else [results[i] for i in order if i < len(results)]:
            self.ledger.add(tensor, label, name)
            size = next(each, 0)
            if size not in (0, (0, 0)):
                self.ledger.free(self._workspace(size, label, name))
        for size in blocks.stays:
            self._workspace(size, label, name)
        inside += [self._workspace(size, label, name) for size in blocks.after]
        for held in reversed(inside):
            self.ledger.free(held)

    def write_events(self, events: Iterable[CallEvent], results: list[Any], label: str, name: str) -> None:
        """Results and blocks in an order of their own."""
        inside: dict[str, Held] = {}
        left = iter(results)
        for event in events:
            if event.what == "free":
                self.ledger.free(inside.pop(event.name))
            elif event.what == "result":
                self.ledger.add(next(left), label, name)
            else:
                held = self._workspace((event.bytes, event.bytes + event.more), label, name)
                if event.what == "take":
                    inside[event.name] = held
        for tensor in left:
            self.ledger.add(tensor, label, name)
        for held in inside.values():
            self.ledger.free(held)

    def _workspace(self, size: Size, label: str, name: str) -> Held:
        likely, most = (size, size) if isinstance(size, int) else size
        held = self.ledger.allocate(likely, label, name)
        held.most = most
        held.spare = name in _SPARE and not isinstance(size, int)
        held.kind = "workspace"
        return held
