"""What is known of a model that lives on the host, while a plan for it is looked for.

In: nothing. Out: `HostedFacts`: budgets, rates, what the optimizer keeps, and what traces have taught so far. The search replaces
it by another as it learns; the remedies, the host's memory and the description of hosted plans read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.core.memory import Allowance
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.pinned_blocks import Layout, state_bytes
from outsize.model.fitting.move.units import Cut, cut_model, sizeof
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.link_speeds import Rates
from outsize.model.fitting.run.runner import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedFacts:
    """What a search for a hosted plan knows."""

    stage: Stage
    work: Work
    """With the buffers that a forward pass writes, its generators and output heads, as far as traces have shown them."""
    device: int
    """Bytes of the device's budget."""
    host: int
    """Bytes of the host's budget."""
    base: int
    """Bytes that the process holds beside the model and the optimizer's state."""
    rates: Rates
    rows: int
    forced: str
    """Why gradients have to wait on the host, empty where they need not."""
    later: bool = False
    """Parameters whose gradients waited may be updated on the device, a few at a time."""
    streamed: bool = False
    """Weights come from a file: the host holds a few units only."""
    call: Callable[[Any, Any], Any] | None = None
    """How an inference calls the model, None for training."""
    kind: str = "cuda"
    layout: Layout = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    """Parameters that have to stay."""
    order: tuple[str, ...] = ()
    """Units as a forward pass meets them."""
    exact: bool = True
    """Random numbers have to be those of the plain step."""
    forbidden: frozenset[str] = frozenset()
    """Remedies that are not used."""
    before: int = 0
    """Bytes of memory that model and optimizer state take before anything is moved."""
    grounded: str = ""
    """Why nothing can be in the scratch file, empty where it can."""
    disk: Allowance | None = None
    """Room of the scratch folder."""
    folder: str = ""
    """The scratch folder."""
    spills: bool = False
    """The host has no room for everything: some is in the scratch file."""
    piece: int = 0
    """Bytes of a transfer to the scratch file where there is one already."""

    def cut(self, choice: Choice) -> Cut:
        """The model in the units of a choice."""
        return cut_model(self.work.model, choice.unit_bytes, choice.held, self.order)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(sizeof(p) for p in {id(p): p for p in self.work.model.parameters()}.values())

    @property
    def state(self) -> int:
        """Bytes of all optimizer state."""
        return sum(state_bytes(shapes) for shapes in self.layout.values())
