"""What is known of a model that lives on the host, while a plan for it is looked for.

In: nothing. Out: `HostedFacts`: budgets, rates, what the optimizer keeps, and what traces have taught so far. The remedies, the
host's memory, the search and the description of hosted plans read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.core.memory import Allowance
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.pinned_blocks import Layout, state_bytes
from outsize.model.fitting.move.units import Cut, cut_model, sizeof
from outsize.model.fitting.plan.hosted_dry_run import HostedStage
from outsize.model.fitting.plan.link_speeds import Rates
from outsize.model.fitting.plan.projection import Projection


@dataclass(slots=True)
class HostedFacts:
    """What a search for a hosted plan knows; what its traces teach is written into it."""

    stage: HostedStage
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
    outside: dict[str, None] = field(default_factory=dict)
    """Parameters that have to stay."""
    order: list[str] = field(default_factory=list)
    written: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    traced: Callable[[], None] = lambda: None
    """Called after each trace."""
    tried: list[tuple[Choice, Projection]] = field(default_factory=list)
    exact: bool = True
    """Random numbers have to be those of the plain step."""
    forbidden: set[str] = field(default_factory=set)
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
        return cut_model(self.stage.work.model, choice.unit_bytes, choice.held, self.order)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(sizeof(p) for p in {id(p): p for p in self.stage.work.model.parameters()}.values())

    @property
    def state(self) -> int:
        """Bytes of all optimizer state."""
        return sum(state_bytes(shapes) for shapes in self.layout.values())
