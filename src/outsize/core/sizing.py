"""What a set of tensors takes, and where it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.core.allocation import Take
from outsize.core.memory import Part
from outsize.core.noun import Known, Noun
from outsize.core.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Noun):
    """Whether it fits in one place."""

    name: str
    """`RAM here`, `GPU 0 NVIDIA H200`, `RTX 4090`."""
    where: Literal["asked", "here", "card"]
    """What the user asked about, this machine, or a card one could have."""
    capacity: int | None
    """Bytes that can be had there, None if unknown."""
    needed: int
    """Bytes it would take there, the allocator's rounding included."""
    known: Known
    """How `capacity` is known: exact for this machine now, estimate for a card."""
    reason: str = ""

    @property
    def fits(self) -> bool | None:
        """True, False, or None where the capacity is unknown."""
        return None if self.capacity is None else self.needed <= self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative(Noun):
    """The same tensor in another dtype or with one axis halved."""

    name: str
    """The dtype, or `axis 1: 256 -> 128`."""
    bytes: int
    saves: int
    """Bytes less than now (negative where it is more)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sizing(Noun):
    """Exact bytes of tensors and what follows from them."""

    specs: tuple[Spec, ...]
    count: int
    """How many copies of the whole set."""
    parts: tuple[Part, ...]
    """What adds up to `bytes`: the data, gradients, optimizer state."""
    takes: tuple[Take, ...]
    places: tuple[Place, ...]
    dtypes: tuple[Alternative, ...]
    """The same shapes in other dtypes."""
    halved: tuple[Alternative, ...]
    """Each axis halved, for a single tensor."""
    advice: tuple[str, ...]
    """What to do next, a sentence each."""

    @property
    def bytes(self) -> int:
        """Exact bytes of everything asked for."""
        return sum(part.bytes for part in self.parts)

    @property
    def elements(self) -> int:
        """Number of elements of the data alone."""
        return self.count * sum(spec.elements for spec in self.specs)

    @property
    def fits(self) -> bool | None:
        """Whether it fits in the budget or on the card that the user named, else in this machine's RAM or on one of
        its GPUs; None if unknown."""
        asked = [place.fits for place in self.places if place.where == "asked"]
        if asked:
            return all(asked)
        here = [place.fits for place in self.places if place.where == "here" and place.name != "disk here"]
        return True if any(here) else (None if all(fit is None for fit in here) else False)
