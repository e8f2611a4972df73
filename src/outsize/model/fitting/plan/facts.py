"""What is known of a step while a plan for it is looked for.

In: nothing. Out: `Facts` of a training step on the model's device, `InferenceFacts`, and `HostedFacts` of a model that lives on
the host. Remedies and the search read them. Of a training step also `Sizes`: its bytes taken apart. Each remedy gets the sizes
so far and gives others; their `peak` is the arithmetic that ranks choices before any is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.core.memory import Allowance
from outsize.core.noun import Noun
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.pinned_blocks import Layout, state_bytes
from outsize.model.fitting.move.stores import IN_FLIGHT
from outsize.model.fitting.move.units import Cut, cut_model
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.foreign_tensors import Beside
from outsize.model.fitting.plan.projection import RATES, Projection
from outsize.model.fitting.plan.recipe_ladder import Rung
from outsize.model.fitting.plan.speeds import Rates, Timing
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.optimizer_subset import room_of
from outsize.model.torch_port.objects import sizeof

CHUNK = 256 * 2**20
"""Bytes of logits in a chunk of the loss: small beside everything else, large enough to fill a card."""


SEEN = 3e-5
"""Seconds of the processor for an operator of a forward pass that Python sees, with its views and what autograd saves of it."""

Ladder = tuple[tuple[str, ...], ...]
"""Sets of modules to compute again: each frees more bytes and takes more time than the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Noun):
    """A module as something to compute again."""

    name: str
    kept: int
    """Bytes that a run of it keeps for the backward pass, everything inside included."""
    freed: int
    """Bytes that are freed where it keeps its inputs only."""
    seconds: float
    """Time to compute all its runs again."""
    runs: int = 1
    """How often it runs in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Noun):
    """A module that can be treated by itself."""

    name: str
    """Its name in the model."""
    kept: int
    """Bytes of activations that it keeps for the backward pass."""
    weights: int
    """Bytes of its parameters."""
    seconds: float
    """Time of its forward pass."""
    compound: bool
    """It is made of other modules; a single operator keeps only what others need anyway."""
    runs: int = 1
    """How often it runs in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Noun):
    """The plain step, taken apart."""

    device: str
    rows: int
    plain: Projection
    blocks: tuple[Block, ...]
    """In the order of the model."""
    weights: int
    gradients: int
    state: int
    frozen: int
    """Bytes of weights that are not trained and can be packed."""
    largest: int
    """Bytes of the largest parameter."""
    copies: float
    """Bytes of state for each byte of a parameter."""
    parameters: int
    """Number of parameters."""
    shares: tuple[float, ...]
    """Parts of all parameters' bytes, and so of the state, that the largest one has, the two largest, and so on."""
    activations: int
    """Bytes alive between forward and backward pass, beside what is always there."""
    heads: tuple[str, ...]
    """Output heads whose loss can be taken in pieces."""
    logits: int
    """Bytes that such a head and its loss keep."""
    chunked: Projection | None
    """The plain step with its loss in chunks, None where there is no such head."""
    parts: dict[str, Part]
    """Modules that can be computed again, by name."""
    ladders: tuple[Ladder, ...]
    """Sets of them, from the cheapest bytes to the most; in one ladder of any size, in others of small modules only."""
    recipes: tuple[tuple[Rung, ...], ...]
    """Sets of calls of operators to run again, from the cheapest bytes to the most; in each ladder other bytes at once."""
    rungs: dict[tuple[str, ...], Rung]
    """All of them, by their calls."""
    saved: dict[str, int]
    """Bytes that autograd saves of what each call makes, in the order of the calls."""
    timing: Timing
    """How long the plain step takes."""
    redrawn: float
    """Seconds in which a slice draws the random numbers of the whole batch."""
    replays: bool = False
    """Slices are given their part of the numbers that the whole batch draws: Python sees every operator."""
    growable: bool
    """The allocator can be told to let segments grow."""
    writing: frozenset[str]
    """Modules that change what they are given, so that they cannot run twice."""
    forbidden: dict[str, str]
    """Remedy -> why not."""

    @property
    def grows(self) -> bool:
        return self.growable and "expandable" not in self.forbidden

    @property
    def group(self) -> int:
        """Bytes of parameters that are updated at once."""
        return room_of(self.largest, self.gradients)

    @property
    def groups(self) -> int:
        """How many such groups there are, about."""
        return -(-3 * self.gradients // max(1, 2 * self.group))

    def share(self, part: float) -> float:
        """The part of the state that is elsewhere where so much is to be: parameters are not divided."""
        return next((share for share in self.shares if share >= part), 1.0) if part else 0.0

    @property
    def link(self) -> float:
        """Bytes a second to the place next to the device."""
        return self.timing.link

    @property
    def passes(self) -> float:
        """Seconds of forward and backward pass of the whole batch."""
        return self.timing.passes(self.rows)

    def passes_in(self, slices: int, again: float = 0.0, calls: float = 0.0) -> float:
        """Seconds of the passes in slices; `again`: of the forward pass of the whole batch that runs twice, `calls`: of the
        processor for that, a slice.

        A slice takes as long as the card works or as long as the processor needs to launch it, whichever is more.
        """
        rows = -(-self.rows // slices)
        took, least = self.timing.passes(rows), self.timing.least
        share = rows / self.rows
        if self.device != "cuda":
            return slices * (took + again * share + calls)
        works = took if took > 1.1 * least else self.passes * share
        launches = least + self.timing.points[0][1] * again / max(self.timing.forward(self.rows), 1e-12) + calls
        return slices * max(works + again * share, launches)

    @property
    def seconds(self) -> float:
        """Time of the plain step: its passes, and an update that touches weights, gradients and state a few times."""
        touched = 4 * (self.weights + self.gradients + self.state)
        return self.passes + touched / RATES[self.device][1]

    @property
    def seeing(self) -> float:
        """Seconds of the processor for a forward pass in which Python sees every operator."""
        return SEEN * self.plain.operators.get("forward", 0)

    @property
    def streamable(self) -> tuple[str, ...]:
        """Modules whose weights can visit: those that run once."""
        return tuple(block.name for block in self.blocks if block.weights and block.runs == 1)

    @property
    def chunks(self) -> int:
        """How many chunks of the loss keep the logits of one below `CHUNK` bytes."""
        return max(8, -(-self.logits // CHUNK))


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceFacts:
    """What a search for the plan of an inference on the model's device knows."""

    device: str
    rows: int
    streamable: tuple[str, ...]
    """Modules whose weights can visit."""
    forbidden: dict[str, str]
    """Remedy -> why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSide:
    """What is known of the host under a model that visits a device."""

    base: int
    """Bytes that the process holds beside model and optimizer state."""
    before: int
    """Bytes of memory that model and optimizer state take before anything is moved."""
    mover: Mover
    """The way to the device."""
    files: Any
    """Where weights are read from, None where they are in host memory."""
    forced: str
    """Why gradients wait on the host, empty where they need not."""
    later: bool
    """Parameters whose gradients wait can be updated a few at a time all the same."""
    grounded: str
    """Why nothing can be in a scratch file, empty where it can."""
    disk: Allowance | None
    """Room of the scratch folder."""
    beside: Beside
    """What the process holds on the device that is not the step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedFacts:
    """What a search for a hosted plan knows."""

    side: HostSide
    stage: Stage
    work: Work
    """With the buffers that a forward pass writes, its generators and output heads, as far as traces have shown them."""
    budget: int
    """Bytes of the device's budget."""
    host: int
    """Bytes of the host's budget."""
    rates: Rates
    rows: int
    call: Callable[[Any, Any], Any] | None = None
    """How an inference calls the model, None for training."""
    device: str = "cuda"
    layout: Layout = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    """Parameters that have to stay."""
    order: tuple[str, ...] = ()
    """Units as a forward pass meets them."""
    exact: bool = True
    """Random numbers have to be those of the plain step."""
    forbidden: frozenset[str] = frozenset()
    """Remedies that are not used."""
    folder: str = ""
    """The scratch folder."""
    spills: bool = False
    """The host has no room for everything: some is in the scratch file."""
    transfer_bytes: int = 0
    """Bytes of a transfer to the scratch file where there is one already."""

    def cut(self, choice: Choice) -> Cut:
        """The model in the units of a choice."""
        return cut_model(self.work.model, choice.unit_bytes, choice.held, self.order)

    @property
    def weights(self) -> int:
        return sum(sizeof(p) for p in {id(p): p for p in self.work.model.parameters()}.values())

    @property
    def state(self) -> int:
        return sum(state_bytes(shapes) for shapes in self.layout.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a step at the moments that can be its highest."""

    fixed: float
    """Always there: weights, buffers, batch, state."""
    activations: int
    """Of the whole batch, at the end of its forward pass."""
    again: int = 0
    """Activations that are made again, or come back, while the backward pass is at one module."""
    share: float = 1.0
    """Part of the batch in its largest slice."""
    precision: float = 1.0
    """Bytes of activations over those of the plain step's precision."""
    gradients: float
    """At the end of the backward pass, without `visiting`."""
    visits_backward: int = 0
    """How many groups of `visiting` parameters are there in the backward pass."""
    early: float = 0.0
    """There in the whole backward pass beside activations and gradients."""
    accumulated: bool = False
    """The gradients of a slice are added to those of the slices before it."""
    update: float
    """What the update of a group of parameters holds, without `visiting`."""
    visits_update: int
    """How many groups of `visiting` parameters are there in the update."""
    visiting: float = 0.0
    """Bytes that come for each byte of a parameter when it is updated: its state, its weight."""

    def peak(self, facts: Facts) -> int:
        """The highest moment: between the passes, at the first block's backward pass, or in the update."""
        comes = facts.group * self.visiting
        gradients = self.gradients + self.visits_backward * comes
        early = self.early + (gradients if self.accumulated and gradients == facts.gradients else 0)
        activations = (self.activations + self.again) * self.share * self.precision
        # at the first block's backward pass all gradients are there
        last = self.fixed + gradients + self.again * self.share
        update = self.update + self.visits_update * comes
        return int(max(self.fixed + activations + early, last, self.fixed + update))


def plain_sizes(facts: Facts) -> Sizes:
    fixed, activations = passes_of(facts.plain, facts)
    return Sizes(
        fixed=float(fixed), activations=activations, gradients=facts.gradients,
        update=facts.gradients + undo_bytes(facts), visits_update=groups_at_once(facts),
    )  # fmt: skip


def passes_of(plain: Projection, facts: Facts) -> tuple[int, int]:
    """(bytes that are always there, bytes of activations and what kernels take beside them) of a traced step."""
    kept = sum(plain.kept.values())
    extra = max(0, int(reserved_of(plain, facts) * _in_passes(plain)) - plain.fixed - kept)
    return plain.fixed, kept + extra


def reserved_of(plain: Projection, facts: Facts) -> int:
    """What the plain step's allocator takes, in the better of both ways."""
    return min(plain.peak, plain.grown) if facts.grows else plain.peak


def _in_passes(plain: Projection) -> float:
    """Part of the peak that forward and backward pass reach: what the update takes beyond it is no activation."""
    phases = {name: size for name, size in plain.peaks.items() if name != "reserved"}
    return max(phases["forward"], phases["backward"]) / max(1, *phases.values())


def undo_bytes(facts: Facts) -> float:
    """What is kept of a group of parameters, so that its update can be taken back."""
    return facts.group * (2 + facts.copies)


def groups_at_once(facts: Facts) -> int:
    """Groups of parameters that are there at once in the update: on a card the next one comes meanwhile."""
    return 2 if facts.device == "cuda" else 1


def in_flight(size: int, facts: Facts) -> int:
    """Bytes that are on their way out at once, of so many: on a CPU copies end at once."""
    return min(IN_FLIGHT, size) if facts.device == "cuda" else 0


def order_blocks(facts: Facts, compound: bool = True) -> tuple[str, ...]:
    """Blocks worth computing again (or, not only compound ones, worth moving), in the order of the model."""
    least = facts.activations // 200
    worth = [block for block in facts.blocks if block.kept > least and (block.compound or not compound)]
    return tuple(block.name for block in worth)


def moved_bytes(choice: Choice, facts: Facts) -> int:
    """Bytes of activations that wait elsewhere: what offloaded blocks keep and do not compute again."""
    if not choice.offload:
        return 0
    kept = sum(block.kept for block in facts.blocks if block.name in choice.offload)
    inside = tuple(f"{name}." for name in choice.offload)
    moved = {*choice.offload}
    again = [n for n in choice.checkpoint if n.partition(":")[0] in moved or n.startswith(inside)]
    return max(0, kept - sum(facts.parts[name].freed for name in again if name in facts.parts))


def place(facts: Facts | InferenceFacts) -> str:
    """The place where things wait: next to a card the host, next to a CPU its disk."""
    return "host" if facts.device == "cuda" else "disk"
