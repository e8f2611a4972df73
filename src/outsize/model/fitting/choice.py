"""What a plan has decided: where things live, and how the step runs.

In: nothing. Out: `Choice`, the one value that the search looks for, the runner obeys and the dry run traces: all three read
the same fields, so what is projected is what runs. Its first half is a `Placement`. A model that lives in host memory and
visits a card is a placement like any other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Noun):
    """Where weights, gradients, optimizer state and activations live, and when they visit the device.

    "Elsewhere" is the next place down: host memory for a card, a file for a CPU. A model whose weights live on the host is
    called hosted; it has `unit_bytes`.
    """

    unit_bytes: int = 0
    """Weights: 0 where they live on the device. Otherwise they live on the host, and visit in units of at most so many bytes."""
    ring: int = 0
    """Weights: bytes of device memory through which units pass."""
    held: tuple[str, ...] = ()
    """Weights: modules and parameters of a hosted model that stay on the device."""
    stream: tuple[str, ...] = ()
    """Weights: modules whose weights live elsewhere and visit when the module runs."""
    in_backward: bool = False
    """Gradients: used and freed in the backward pass, as soon as those of a few parameters are complete."""
    gradients_away: bool = False
    """Gradients: live elsewhere until the update."""
    on_host: bool = False
    """State: never leaves the host, and the update of a hosted model runs there."""
    state_away: float = 0.0
    """State: the part of it, that of the largest parameters, that lives elsewhere and visits a few parameters at a time."""
    state_bits: int = 0
    """State: between updates it is kept in so many bits a number; 0: as it is."""
    frozen_bits: int = 0
    """Weights: those that are not trained are kept in so many bits a number; 0: as they are."""
    state_ring: int = 0
    """State: bytes through which the state of a hosted model, or a gradient on its way to the host, passes."""
    small_bytes: int = 0
    """State: parameters of a hosted model below so many bytes are updated several at a time, which saves calls."""
    offload: tuple[str, ...] = ()
    """Activations: modules whose activations wait elsewhere for the backward pass."""
    tensors_away: tuple[str, ...] = ()
    """Activations: calls of operators whose results wait elsewhere once autograd saves them; `*`: all that it saves."""
    inputs_away: bool = False
    """Activations: those of a hosted model, which are the inputs of its units, wait on the host."""
    disk: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """`state`, `weights`, `gradients` -> parameters of which they are in the scratch file and not on the host."""
    transfer_bytes: int = 0
    """Bytes of one transfer to or from the scratch file; 0: there is none."""

    @property
    def hosted(self) -> bool:
        """The weights live on the host."""
        return self.unit_bytes > 0

    @property
    def update(self) -> Literal["card", "host", "kept", "none"]:
        """Where a hosted step updates parameters; `kept`: after the backward pass, `none`: it does not (an inference)."""
        if self.gradients_away:
            return "kept"
        if not self.in_backward:
            return "none"
        return "host" if self.on_host else "card"

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Which of weights, gradients and state are elsewhere or gone early."""
        return tuple(
            name
            for name in ("in_backward", "state_away", "state_bits", "gradients_away", "stream")
            if getattr(self, name)
        )

    @property
    def places(self) -> tuple[tuple[str, ...], float]:
        """What is elsewhere, and how much of the state."""
        return self.elsewhere, self.state_away + self.state_bits

    @property
    def state_moved(self) -> float:
        """The part of the state that visits a few parameters at a time: what is elsewhere, and what is in fewer bits."""
        return 1.0 if self.state_bits else self.state_away


UPDATES: dict[str, dict[str, Any]] = {
    "card": {"in_backward": True, "state_away": 1.0},
    "host": {"in_backward": True, "state_away": 1.0, "on_host": True},
    "kept": {"gradients_away": True, "state_away": 1.0},
    "none": {},
}
"""`update` of a hosted step -> the fields that say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Placement):
    """A placement, and how the step is computed."""

    said_twice: ClassVar[tuple[str, ...]] = ("passes", "cut", "treatment", "unpacked")

    slices: int = 1
    """Into how many slices the batch is cut."""
    first: int = 0
    """Samples of the first slice, where it is larger than the others; 0: all are alike."""
    pieces: int = 1
    """Pieces in which the rows of each unit of a hosted model run."""
    more_pieces: bool = False
    """A batch that is larger than the planned one may run in more pieces."""
    checkpoint: tuple[str, ...] = ()
    """Modules whose activations are computed again in the backward pass."""
    recipes: tuple[str, ...] = ()
    """Calls of operators (module:operator:number) that run again in the backward pass, in the place of saved results."""
    again: float = 0.0
    """Of a compiled model: the part of what its graphs would save that is computed again in the backward pass."""
    chunks: int = 0
    """Pieces in which the output head and its cross entropy run; 0: whole."""
    kept_bits: int = 0
    """What forward passes keep for the backward pass is kept in so many bits a number; 0: as it is."""
    autocast: bool = False
    """Run in bfloat16 autocast."""
    expandable: bool = False
    """The card's allocator has segments that grow."""

    @property
    def plain(self) -> bool:
        """The step runs as it would without us, whatever the allocator does."""
        return self in (PLAIN, _PLAIN_EXPANDABLE)

    @property
    def passes(self) -> Choice:
        """What it does to forward and backward pass, wherever weights, gradients and state are."""
        return _passes(self)

    @property
    def runs(self) -> int:
        """How often the passes run in a step: once a slice. The search, which knows no remedy by its name, asks for it."""
        return self.slices

    @property
    def cut(self) -> Choice:
        """The batch is cut alike, and nothing else is done."""
        return Choice(slices=self.slices, first=self.first)

    @property
    def treatment(self) -> Choice:
        """What it does inside the passes of a slice."""
        return _cut_into(_passes(self), 1)

    def cut_into(self, runs: int) -> Choice:
        return _cut_into(self, runs)

    def changed(self, level: dict[str, Any]) -> Choice:
        """With these values of fields: `dataclasses.replace` in half its time, for a search that makes thousands."""
        return Choice(**(dict(zip(_FIELDS, _values_of(self), strict=True)) | level))

    @property
    def unpacked(self) -> Choice:
        """The same with everything in its own number of bits."""
        return replace(self, kept_bits=0, frozen_bits=0, state_bits=0)


_FIELDS = tuple(field.name for field in fields(Choice))
_values_of = attrgetter(*_FIELDS)
PLAIN = Choice()
"""The step as it is."""
_PLAIN_EXPANDABLE = Choice(expandable=True)
REMEMBERED = 2**13
"""Choices of which is remembered what follows from them: a search asks again and again, of each of hundreds of candidates."""


@functools.lru_cache(REMEMBERED)
def _passes(choice: Choice) -> Choice:
    return replace(
        choice, in_backward=False, state_away=0.0, state_bits=0, gradients_away=False, stream=(), expandable=False
    )


@functools.lru_cache(REMEMBERED)
def _cut_into(choice: Choice, runs: int) -> Choice:
    return replace(choice, slices=runs, first=0)
