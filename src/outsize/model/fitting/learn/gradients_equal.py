"""Proves that the fitted step is the plain one.

In: a work, a choice, a few samples. Out: the largest difference of a gradient, and whose it is. Both passes run for real;
the plain gradients wait elsewhere, and the fitted ones are taken from them as they come. Model, optimizer, gradients and random
state are left as they were.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import calm, preserved
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory, where_room
from outsize.model.fitting.move.stores import Store
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.resident_update import Update
from outsize.model.torch_port.compiler import uncompiled


class Collect(Update):
    """Keeps gradients instead of using them, or takes them from those of another pass."""

    other: Collect | None = None
    """The other pass, whose gradients become the differences: so those of both need not wait at once."""
    sizes: dict[Any, tuple[Any, Any]]
    """Then: parameter -> norm of the difference, norm of the other's gradient."""

    def accumulated(self, parameter: Any, holder: Any) -> None:
        left = None if self.other is None else self.other.take(parameter)
        if left is None:
            self._keep(parameter)
            return
        assert self.other is not None
        gradient, parameter.grad = parameter.grad, None
        size = self.sizes[parameter][1] if parameter in self.sizes else left.norm()  # a second part of it comes
        self.sizes[parameter] = left.sub_(gradient).norm(), size
        self.other._send(parameter, left)

    def take(self, parameter: Any) -> Any:
        """The gradient, or None where there was none."""
        return self._bring(parameter) if parameter in self._away else None


PLAIN = Choice(gradients_away=True)
"""The plain step, but for where its gradients go."""

EQUAL = {False: 1e-4, True: 5e-2}
"""Largest relative difference of a gradient that counts as equal: by the same kernels, or by others (autocast, a card beside a
CPU)."""

FAR_BELOW = 1e-4
"""A gradient below this part of the largest is measured against that: it may be the rounding of larger numbers that cancel, and
the plain step's own differs as much."""

ALIKE = 10.0
"""A difference up to so many times the plain step's own rounding is rounding too."""

TINY = 1e-5
"""But only up to this part of the largest gradient: what is more is no rounding."""


def compare(
    work: Work, choice: Choice, batch: Any, store: Store, rounding: dict[str, float] | None = None,
    most: float | None = None,
) -> tuple[float, str]:  # fmt: skip
    """Largest relative difference between a gradient of the plain step and of the fitted one, and whose it is.

    `rounding`: what the plain step's own gradients are off by, where that is known: so much is no difference, up to `most` of
    the gradient itself or, left out, a tiny part of the largest.
    """
    rows = work.axes.count(batch)
    base = replace(choice, in_backward=False, state_away=0.0, state_bits=0, gradients_away=True)
    fitted = replace(base, slices=min(choice.slices, rows), first=0)
    if fitted.slices > 1:
        with _calm(work) if work.replay is None else contextlib.nullcontext():
            cut = worst_of(_differences(work, replace(fitted, again=0.0), batch, store, at_once=False), rounding, most)
        if not fitted.again:
            return cut
        return max(cut, compare(work, replace(choice, slices=1), batch, store, rounding, most))  # as its graphs run
    worst = where_room(lambda: worst_of(_differences(work, fitted, batch, store, at_once=True), rounding, most))
    if worst is not None:
        return worst
    apart = _differences(work, fitted, batch, store, at_once=False)  # one gradient of a parameter at a time
    return worst_of(apart, rounding, most)


@contextlib.contextmanager
def _calm(work: Work) -> Iterator[None]:
    """Constants for random numbers. Dynamo would skip what runs under a mode for operators, and remember that: so it is off."""
    with uncompiled() if work.compiled else contextlib.nullcontext(), calm():
        yield


def find_rounding(work: Work, batch: Any, store: Store) -> dict[str, float]:
    """Name of a parameter -> norm of what the rounding of a plain backward pass does to its gradient.

    The gradients of three times the loss are three times the gradients, in other bits at every operator: what a third of them
    is off by is rounding. So a gradient that is nothing else is told from a wrong one, such as that of a bias before a norm,
    whose large terms cancel.
    """

    def tripled(model: Any, part: Any) -> Any:
        value = work.loss(model, part)
        return (3 * value[0], value[1]) if isinstance(value, tuple) else 3 * value

    with _calm(work):
        plain, other = (_run_alone(one, PLAIN, batch, store) for one in (work, replace(work, loss=tripled)))
    return _apart(work, plain, other, 3)


def find_noise(work: Work, batch: Any, store: Store) -> dict[str, float]:
    """Name of a parameter -> norm of what its gradient changes by where every sample comes twice.

    The gradient of a mean is the same, of a sum twice as large; only the kernels have another size. Those of TF32 and of other
    low precisions differ from each other by more than float32 rounds.
    """
    doubled = work.axes.double(batch)
    if doubled is None:
        return {}
    times = 2 if work.normaliser.rule == "sum" else 1
    with _calm(work):
        plain, other = (_run_alone(work, PLAIN, one, store) for one in (batch, doubled))
    return _apart(work, plain, other, times)


def _apart(work: Work, plain: Collect, other: Collect, times: int) -> dict[str, float]:
    """Name of a parameter -> norm of what its gradient differs by from one that should be so many times as large."""
    found = {}
    for label, parameter in work.model.named_parameters():
        expected, got = plain.take(parameter), other.take(parameter)
        if expected is not None and got is not None:
            found[label] = float((expected - got / times).norm())
    return found


Norms = tuple[str, float, float | None]
"""Name of a parameter, norm of the difference between its gradients, norm of the plain one; None: only one of them is there."""


def _differences(work: Work, fitted: Choice, batch: Any, store: Store, at_once: bool) -> Iterator[Norms]:
    """For all parameters with a gradient; `at_once`: taken as the fitted ones come, else after both passes."""
    plain = _run_alone(work, PLAIN, batch, store)
    other = _run_alone(work, fitted, batch, store, plain if at_once else None)
    for label, parameter in work.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if at_once and parameter in other.sizes:
            difference, size = other.sizes[parameter]
            yield label, float(difference), float(size)
            continue
        expected, got = plain.take(parameter), other.take(parameter)
        if expected is not None and got is not None:
            yield label, float((expected - got).norm()), float(expected.norm())
        elif expected is not None or got is not None:
            yield label, float("inf"), None


def _run_alone(work: Work, choice: Choice, batch: Any, store: Store, other: Collect | None = None) -> Collect:
    """A pass that changes nothing: results may depend on random numbers, and on buffers that are written."""
    with preserved(work.model, work.sources):
        torch.manual_seed(0)
        return collect(work, choice, batch, store, other)


def worst_of(
    differences: Iterable[Norms], rounding: dict[str, float] | None = None, most: float | None = None
) -> tuple[float, str]:
    """The largest relative difference, and whose it is; what is below `rounding` is none."""
    norms: list[tuple[str, float, float]] = []
    for label, difference, size in differences:
        if size is None:
            return float("inf"), label
        norms.append((label, difference, size))
    largest = max((size for _, _, size in norms), default=0.0)
    floor = FAR_BELOW * largest
    worst, name = 0.0, ""
    for label, difference, size in norms:
        limit = TINY * largest if most is None else most * size
        if rounding is not None and difference <= min(ALIKE * rounding.get(label, 0.0), limit):
            continue
        relative = difference / max(size, floor, 1e-30)
        if relative > worst or relative != relative:
            worst, name = relative, label
    return worst, name


def collect(work: Work, choice: Choice, part: Any, store: Store, other: Collect | None = None) -> Collect:
    """The gradients of a choice, elsewhere; with those of another pass, their differences in its place."""
    runner = open_resident(replace(work, scaler=None, clip=None), choice, store)
    kept = Collect(work.optimizer, choice, runner.weights.evicted, work.model, runner.weights.streamed)
    kept.other, kept.sizes = other, {}
    try:
        _, scale = runner.passes(part, kept)
    except BaseException as error:
        if is_out_of_memory(error):  # what failed frames hold makes room for the weights
            traceback.clear_frames(error.__traceback__)
            clear_up()
        runner.gather()  # the store is closed after this, whatever has happened
        raise
    runner.gather()
    if scale is not None:
        held = [p for p in work.model.parameters() if p in kept._away]
        kept._each(held, lambda gradient: gradient.mul_(scale))
    return kept
