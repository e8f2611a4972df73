"""Cuts a model into units: modules whose weights visit the device together.

In: a model and the most bytes that a unit may have. Out: units, none inside another, and the parameters outside all of
them, which stay on the device for a whole step. A unit is as large a module as allowed: large copies run at the rate of
the link, and what lies between units keeps its activations, so large units keep few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from outsize.model.fitting.move.ring import aligned
from outsize.model.torch_port.objects import sizeof

LISTS = ("Sequential", "ModuleList", "ModuleDict")
"""Containers that are always looked into: their forward pass, if there is one, is that of their children."""


@dataclass(slots=True, eq=False)
class Place:
    """A parameter inside the memory of a unit."""

    name: str
    """As the model names it."""
    parameter: Any
    """The user's own object."""
    offset: int
    """Where it begins in the memory of its unit."""
    size: int
    """Bytes of its elements."""


@dataclass(slots=True, eq=False)
class Unit:
    """Weights that come and go together."""

    name: str
    """Name of the module; empty for what stays."""
    module: Any
    places: list[Place] = field(default_factory=list)
    """Parameters that are at home here, laid out one after the other."""
    guests: list[Place] = field(default_factory=list)
    """Parameters that another unit is home to (tied weights), after the others."""
    size: int = 0
    """Bytes of its memory on the device, guests included."""

    @property
    def own(self) -> int:
        """Bytes of what is at home here."""
        return self.guests[0].offset if self.guests else self.size


@dataclass(slots=True, eq=False)
class Cut:
    units: dict[str, Unit]
    """By name of their module, in the order of the model."""
    held: Unit
    """Parameters that are on the device for the whole of a step."""

    @property
    def weights(self) -> int:
        return sum(unit.own for unit in (*self.units.values(), self.held))

    @property
    def largest(self) -> int:
        return max((unit.size for unit in self.units.values()), default=0)

    def lies_like(self, other: Cut) -> bool:
        """True where every parameter has the same place in the same unit."""
        mine, theirs = (
            {id(p.parameter): (u.name, p.offset) for u in (*cut.units.values(), cut.held) for p in u.places}
            for cut in (self, other)
        )
        return mine == theirs

    def places(self) -> list[Place]:
        return [place for unit in (*self.units.values(), self.held) for place in unit.places]


def cut_model(model: Any, limit: int, held: Collection[str] = (), order: Iterable[str] = ()) -> Cut:
    """Units of at most `limit` bytes where modules are that small; `held` names modules and parameters that stay.

    `order` is the order in which modules run: a tied parameter is at home in the one that runs first, since its
    gradient is complete when that one's backward pass is.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    stay: list[Any] = []
    seen: set[int] = set()

    def visit(name: str, module: Any) -> None:
        parameters = list(module.parameters())
        if not parameters or id(module) in seen:  # a module that has several names is one unit
            return
        seen.add(id(module))
        if name in held:
            stay.extend(parameters)
            return
        children = list(module.named_children())
        small = sum(sizeof(p) for p in parameters) <= limit and type(module).__name__ not in LISTS
        if name and (small or not children):
            found[name] = module
            return
        stay.extend(module.parameters(recurse=False))
        for child, part in children:
            visit(f"{name}.{child}" if name else child, part)

    visit("", model)
    stay += [p for module in found.values() for p in module.parameters() if names[id(p)] in held]
    homes: set[int] = set()
    resident = _lay(Unit("", model), stay, names, homes)
    ranks = {name: rank for rank, name in enumerate(order)}
    units = {
        name: _lay(Unit(name, found[name]), list(found[name].parameters()), names, homes, {id(p) for p in stay})
        for name in sorted(found, key=lambda name: ranks.get(name, len(ranks)))
    }
    return Cut({name: unit for name, unit in units.items() if unit.size}, resident)


def _lay(unit: Unit, parameters: list[Any], names: dict[int, str], homes: set[int], but: Collection[int] = ()) -> Unit:
    seen: set[int] = set()
    mine: list[Any] = []
    others: list[Any] = []
    for parameter in parameters:
        key = id(parameter)
        if key in seen or key in but:
            continue
        seen.add(key)
        (others if key in homes else mine).append(parameter)
        homes.add(key)
    for row, places in ((mine, unit.places), (others, unit.guests)):
        for parameter in row:
            size = sizeof(parameter)
            places.append(Place(names[id(parameter)], parameter, unit.size, size))
            unit.size += aligned(size)
    return unit
