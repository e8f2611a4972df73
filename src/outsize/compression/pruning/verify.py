"""Tries a removal: the smaller model must compute what the whole one does with zeros in place of what left.

In: a model, its trace, which indices stay. Out: nothing where every module of the smaller model gives the same as the whole model
with zeros; else the module at which it first differs (`Deviation`). Numbers that modules keep (`num_heads`) are found by trying
(`find_fixes`); where none helps, the sizes are in the module's code, and what it has to do with stays whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.compression.hooks import following
from outsize.compression.pruning.axes import Axis, Dim, Kept, Product, Sum, dims_of, freeze, left_of, look, size_of
from outsize.compression.pruning.removal import Fix, masked, remove, replace, select
from outsize.compression.pruning.trace import Trace
from outsize.compression.weights import get, share
from outsize.model.torch_port.dispatch import tensors_in
from outsize.model.torch_port.objects import parameter_table

MOST_TRIALS = 40
"""Sets of numbers that are tried for one module."""
TOLERANCE = {"torch.float64": 1e-6, "torch.float32": 1e-3, "torch.bfloat16": 0.1, "torch.float16": 0.02}

Run = Callable[[Any], Any]
"""Runs a model."""


class Deviation(Exception):
    """The smaller model differs from this module on, or fails in it."""

    def __init__(self, module: str, at: int) -> None:
        super().__init__(module)
        self.module = module
        self.at = at
        """How many modules were right before."""


@dataclass(frozen=True, slots=True)
class Print:
    """A few numbers by which equal tensors are known."""

    shape: tuple[int, ...]
    norm: float
    sum: float
    """Of the elements, each with a weight of its own."""
    tolerance: float
    """How far the two may differ, as a part of the norm."""


def fingerprint(tensor: Any) -> Print:
    """Taken in double precision, without what is not finite."""
    import torch

    values = torch.nan_to_num(tensor.detach().double().flatten(), 0.0, 0.0, 0.0)
    waves = torch.sin(torch.arange(values.numel(), dtype=torch.float64, device=values.device))
    tolerance = TOLERANCE.get(str(tensor.dtype), 0.0)
    return Print(tuple(tensor.shape), float(values.norm()), float(values @ waves), tolerance)


def alike(one: Print, other: Print, values: bool) -> bool:
    """True where the tensors are equal up to rounding, or only in shape where values do not count."""
    room = one.tolerance * (1e-6 + max(one.norm, other.norm))
    equal = abs(one.norm - other.norm) <= room and abs(one.sum - other.sum) <= room
    return one.shape == other.shape and (equal or not values)


def expected(model: Any, trace: Trace, kept: Kept, run: Run) -> list[tuple[str, list[Print]]]:
    """What each module gives with zeros in place of what leaves, without that."""
    whole = share(model)
    done: dict[int, Any] = {}
    for name, axes in trace.tensors.items():
        if any(dim in kept for axis in axes for dim in dims_of(axis)):
            replace(whole, name, lambda old, axes=axes: masked(old, axes, kept), done)  # type: ignore[misc]
    found: list[tuple[str, list[Print]]] = []

    def note(name: str, result: Any) -> None:
        axes = trace.outputs[len(found)][1]
        parts = [select(tensor, some, kept) for tensor, some in zip(tensors_in(result), axes, strict=True)]
        found.append((name, [fingerprint(part) for part in parts]))

    _watched(whole, run, note, [])
    return found


def compare(model: Any, wanted: list[tuple[str, list[Print]]], run: Run, values: bool) -> None:
    """Raises `Deviation` where the model gives something else."""
    count = 0
    stack: list[str] = []

    def note(name: str, result: Any) -> None:
        nonlocal count
        prints = [fingerprint(tensor) for tensor in tensors_in(result)]
        same = wanted[count][0] == name and len(prints) == len(wanted[count][1])
        if not same or not all(alike(a, b, values) for a, b in zip(prints, wanted[count][1], strict=True)):
            raise Deviation(name, count)
        count += 1

    try:
        _watched(model, run, note, stack)
    except Deviation:
        raise
    except Exception:
        raise Deviation(stack[-1] if stack else "", count) from None


def _watched(model: Any, run: Run, note: Callable[[str, Any], None], stack: list[str]) -> None:
    """Runs a model in evaluation mode from a fixed random state, and tells what each module gave."""
    import torch

    with following(model, stack, note), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run(model)


def stirred(model: Any) -> Any:
    """A copy with noise on its weights: in a trial, zeros of a fresh or pruned model would hide what they should show."""
    import torch

    source = torch.Generator().manual_seed(0)
    found = share(model)
    done: dict[int, Any] = {}
    for module in found.modules():
        for name, old in parameter_table(module).items():
            if old is not None and old.is_floating_point():
                if id(old) not in done:
                    scale = float(old.detach().float().square().mean().sqrt()) or 0.1
                    noise = torch.randn(old.shape, generator=source).to(old.device, old.dtype)
                    done[id(old)] = torch.nn.Parameter(old.detach() + 0.5 * scale * noise, requires_grad=False)
                parameter_table(module)[name] = done[id(old)]
    return found


def settle(model: Any, trace: Trace, kept: dict[Dim, Any], fixes: list[Fix], run: Run, values: bool) -> None:
    """Tries a removal until it works: adds fixes, and freezes and takes out of `kept` what cannot leave."""
    while kept:
        wanted = expected(model, trace, kept, run)
        try:
            compare(_removed(model, trace, kept, fixes), wanted, run, values)
            return
        except Deviation as found:
            deviation = found
        near = [dim for dim in _dims_inside(trace, deviation.module) if dim in kept]
        for gone in _restored(trace, near or list(kept)):
            fewer = {dim: stays for dim, stays in kept.items() if dim not in gone}
            again = expected(model, trace, fewer, run) if gone else wanted
            new = find_fixes(model, trace, fewer, fixes, again, run, values, deviation)
            if new is not None:
                fixes += new
                break
        kind = type(get(model, deviation.module) if deviation.module else model).__name__
        for dim in gone:
            freeze(dim, f"its size is part of the code of {deviation.module or 'the model'} ({kind})")
            del kept[dim]


def _restored(trace: Trace, dims: list[Dim]) -> Iterator[tuple[Dim, ...]]:
    """Which dims to leave whole: none, each alone, those in few tensors first, and all."""
    uses = {dim: sum(dim in dims_of(axis) for axes in trace.tensors.values() for axis in axes) for dim in dims}
    yield ()
    yield from ((dim,) for dim in sorted(dims, key=lambda one: uses[one])[:MOST_TRIALS])
    yield tuple(dims)


def _dims_inside(trace: Trace, module: str) -> dict[Dim, None]:
    return {dim: None for axis in trace.inside.get(module, {}).values() for dim in dims_of(axis)}


def _removed(model: Any, trace: Trace, kept: Kept, fixes: Sequence[Fix]) -> Any:
    small = share(model)
    remove(small, trace.tensors, kept, fixes)
    return small


def find_fixes(
    model: Any, trace: Trace, kept: Kept, fixes: list[Fix], wanted: Any, run: Run, values: bool, deviation: Deviation
) -> list[Fix] | None:
    """Numbers which, set to the new sizes, bring the run beyond a module: its own, or those of a module around it.

    Empty where none is needed, None where none helps.
    """
    outer = deviation.module.split(".") if deviation.module else []
    names = [".".join(outer[:count]) for count in range(len(outer), -1, -1)]
    sets = [_combinations(list(_options(model, trace, kept, fixes, name))) for name in names]
    for chosen in ((), *itertools.chain.from_iterable(itertools.islice(some, MOST_TRIALS) for some in sets)):
        try:
            compare(_removed(model, trace, kept, [*fixes, *chosen]), wanted, run, values)
            return list(chosen)
        except Deviation as found:
            if found.at > deviation.at:
                return list(chosen)
    return None


def _combinations(options: list[list[Fix]]) -> Iterator[tuple[Fix, ...]]:
    """One number changed, then two, and so on: a number too many may only seem right."""
    for count in range(1, len(options) + 1):
        for some in itertools.combinations(options, count):
            yield from itertools.product(*some)


def _options(model: Any, trace: Trace, kept: Kept, fixes: list[Fix], name: str) -> Iterator[list[Fix]]:
    """For each number of a module the axes that it may be the size of."""
    counts = {dim: int(np.count_nonzero(stays)) for dim, stays in kept.items()}
    sizes: dict[int, dict[int, Axis]] = {}
    for axis in trace.inside.get(name, {}).values():
        for part in _parts(axis):
            if left_of(part, counts) != size_of(part):
                sizes.setdefault(size_of(part), {})[left_of(part, counts)] = part
            elif fixes:  # a number that was set before may be the size of an axis that stays
                sizes.setdefault(size_of(part), {}).setdefault(size_of(part), part)
    module = get(model, name) if name else model
    known = {(fix.attribute, fix.place): left_of(fix.axis, counts) for fix in fixes if fix.module == name}
    for attribute, place, value in _numbers(module):
        other = [axis for left, axis in sizes.get(value, {}).items() if left != known.get((attribute, place), value)]
        if other:
            yield [Fix(name, attribute, place, axis) for axis in other]


def _numbers(module: Any) -> Iterator[tuple[str, int | None, int]]:
    """Whole numbers that a module keeps."""
    for name, value in vars(module).items():
        if type(value) is int and not name.startswith("__"):
            yield name, None, value
        elif isinstance(value, tuple | list) and all(type(one) is int for one in value):
            yield from ((name, place, one) for place, one in enumerate(value))


def _parts(axis: Axis) -> Iterator[Axis]:
    """An axis, what it is made of, and products of neighbouring factors."""
    axis = look(axis)
    yield axis
    if isinstance(axis, Sum):
        for part in axis.parts:
            yield from _parts(part)
    elif isinstance(axis, Product):
        for first, last in itertools.combinations(range(len(axis.factors) + 1), 2):
            if 0 < last - first < len(axis.factors):
                factors = axis.factors[first:last]
                yield from _parts(factors[0]) if len(factors) == 1 else (Product(factors),)
