"""A step that is traced: once or for several sizes.

In: a step, its arguments or what builds them, a card. Out: traces, their replays, and a `Footprint` of each. The step runs on
tensors without contents; what its steps leave, and whether they differ, is noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from outsize.allocator import settings_from_environment
from outsize.core.cards import Card
from outsize.core.errors import InputError, OutsizeError
from outsize.core.footprint import Amount, Footprint, Loading
from outsize.core.memory import HOST, Pool
from outsize.core.noun import Known
from outsize.core.units import format_bytes
from outsize.model.estimation import growth, moments, replayed_steps
from outsize.model.estimation import host_memory as host
from outsize.model.estimation import margins as constants
from outsize.model.estimation import ranks as spread
from outsize.model.estimation.replayed_steps import KINDS, ReplayedSteps
from outsize.model.torch_port.compiler import CompilerFailed
from outsize.model.torch_port.parts import find_ours
from outsize.model.tracing import contentless
from outsize.model.tracing.tracer import DevicesDiffer, Tracer

MORE_STEPS = 3
"""Steps that are followed beyond those asked for, where numbers drawn at random may decide on sizes."""

UNEVEN = 0.01
"""Steps whose requests differ by more than this part of them are not alike."""

KEPT = 2**14
"""Bytes that a step may leave without a word."""

UNMEASURED = 0.02
"""Part of the peak that scratch without a measurement may be before a note says so."""


class Job:
    """A step with all that is needed to trace it, once or for several sizes."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        build: Callable[..., Any] | None,
        label: str,
        card: Card,
        steps: int,
    ) -> None:
        if not callable(step):
            raise InputError(f"the step is a function that runs one training or inference step, not {step!r}")
        if build is not None and args:
            raise InputError("give either build= or the step's arguments, not both")
        self.step, self.args, self.build, self.label, self.card, self.steps = step, args, build, label, card, steps
        self.uncompiled = ""
        """Why compiled functions are traced as they were written, empty where they are compiled."""
        self.traced: Callable[[], None] = lambda: None
        """Called after each traced step."""
        self.spreading: spread.Spreading | None = None
        """Over how many ranks; None: one process."""
        self.shape: tuple[float, int] | None = None
        """Part of the parameters that is in matrices, and number of blocks, of the traced model; None: nobody asks."""

    @property
    def name(self) -> str:
        return getattr(self.step, "__name__", type(self.step).__name__)

    def play(self, *sizes: int, steps: int | None = None) -> ReplayedSteps:
        """The replay of the step at these sizes; fewer steps are traced if that is enough."""
        return self.replay(self.trace(*sizes, steps=steps))

    def trace(self, *sizes: int, steps: int | None = None) -> Tracer:
        """Run the steps under the tracer; the sizes go to the builder."""
        count = self.steps if steps is None else min(steps, self.steps)
        try:
            tracer = self._run(sizes, count, everything=None)
        except CompilerFailed as error:
            self.uncompiled = str(error)
            return self.trace(*sizes, steps=steps)
        except DevicesDiffer:
            if self.build is not None:
                raise
            # what was given went to the card, so the rest does too
            tracer = self._run(sizes, count, everything=self.label)
            tracer.note(f"what the step makes on the host is counted on {self.label}, as if it had been moved")
        if self.label != "cpu" and not any(held.label == self.label for held in tracer.ledger.all):
            tracer = self._run(sizes, count, everything=self.label)
            tracer.note(f"nothing was put on {self.label}: everything is counted there, as if it had been moved")
        return tracer

    def replay(self, tracer: Tracer) -> ReplayedSteps:
        """The replay of a trace through the allocator's model."""
        if self.label == "cpu":
            return replayed_steps.follow(tracer.ledger, "cpu", "exact")
        settings = settings_from_environment(os.environ)
        expandable = getattr(settings, "expandable_segments", False)
        return replayed_steps.follow(tracer.ledger, self.label, "cuda-expandable" if expandable else "cuda", settings)

    def _run(self, sizes: tuple[int, ...], steps: int, everything: str | None) -> Tracer:
        capability = self.card.capability or (9, 0)
        tracer = Tracer(self.label, capability, self.card.usable, everything=everything)
        tracer.strict = everything is None
        tracer.uncompiled = self.uncompiled
        around = contextlib.nullcontext() if self.spreading is None else self.spreading.around(self.label)
        with around, tracer.running():
            step, args = self.step, self.args
            try:
                if self.build is not None:
                    moved = everything is not None
                    step, build = contentless.convert_builder(tracer, self.step, self.build, self.label, moved)
                    made = build(*sizes)
                    args = made if isinstance(made, tuple) else (made,)
                else:
                    step, args = contentless.convert(tracer, self.step, args, self.label)
                self.shape = self.shape and spread.shape_of((step, args))
                held = None if self.spreading is None else self.spreading.apply(tracer, (step, args))
                tracer.owners.inputs(args)
                before, number = _generator_states(), 0
                while number < steps or (
                    number < steps + MORE_STEPS and (tracer.chance or before != _generator_states())
                ):
                    tracer.ledger.step = number
                    step(*args)
                    tracer.owners.mark()
                    self.traced()
                    number += 1
                note_growth(tracer, self.label, number, len(tracer.ledger.events))
                del held
            except OutsizeError:
                raise
            except Exception as error:
                raise _explained(error, self.name) from error
        if not tracer.touched:
            raise InputError(
                f"{self.name}{_place_of(self.step)} used no tensor of PyTorch, so there is nothing to estimate: "
                "a step of NumPy alone is not followed"
            )
        if _uneven(tracer, self.label, number):
            tracer.guess(
                "steps differ in size and draw whole numbers on the host: a later step may take more"
                if tracer.drew
                else "the steps differ in size: a later one may take more"
            )
        return tracer

    def footprint(
        self, tracer: Tracer, replayed: ReplayedSteps, card: Card | None, capacity: int | None, loaded: Loading | None
    ) -> Footprint:
        """All that is known of a trace, in one noun."""
        notes = list(tracer.notes)
        on_host = self.label == "cpu"
        if not on_host and self.card.capability not in (None, (9, 0)):
            notes.append(f"kernel workspaces are those measured on an H200, assumed for the {self.card.name}")
        talk, most = spread.nccl_of(self.spreading) if not on_host else (0, 0)
        if self.spreading is not None:
            notes += spread.notes_of(self.spreading, on_host)
        alive = replayed.alive
        guessed, unmeasured = bool(notes), replayed_steps.unmeasured(alive)
        if unmeasured > UNMEASURED * replayed.likely.peak.requested:
            notes.append(
                f"{format_bytes(unmeasured)} at the peak are scratch of kernels that were not measured in these sizes: the peak "
                "may be that much lower, or as high as the bound"
            )
        known = Known.ESTIMATE if notes or on_host else Known.EXACT
        allocated, reserved, use = (
            host.amounts(tracer, replayed) if on_host else constants.amounts(replayed, self.card, estimate=guessed)
        )
        use = dataclasses.replace(use, bytes=use.bytes + talk, bound=use.bound + most)
        room = capacity if card is None or capacity is None else capacity - most  # a budget is torch's alone
        highest = replayed.samples[replayed.peak].allocated if replayed.samples else 0
        return Footprint(
            name=self.name,
            pool=HOST if on_host else Pool(kind="device", index=int(self.label.partition(":")[2] or 0)),
            steps=self.steps,
            peak_requested=host.requested(replayed)
            if on_host
            else Amount(bytes=replayed.likely.peak.requested, bound=replayed.most.peak.requested, known=known),
            peak_allocated=allocated,
            peak_reserved=reserved,
            device_use=use,
            parts=moments.by_kind(alive, KINDS, highest, replayed_steps.known_of),
            modules=moments.largest(alive, lambda held: held.module, Known.EXACT),
            lines=moments.largest(alive, lambda held: held.line, Known.EXACT),
            kinds=KINDS,
            timeline=moments.timeline(
                replayed.events, replayed.samples, KINDS, replayed_steps.describe, lambda held: held.line or held.module
            ),
            peak_label=replayed_steps.describe(replayed.events[replayed.peak][1]) if replayed.events else "build",
            host=None if on_host else host.side(tracer, loaded),
            loading=loaded,
            card=card,
            capacity=capacity,
            fits=_verdict(replayed, use, room, on_host, sure=not tracer.guesses),
            ranks=1 if self.spreading is None else self.spreading.count,
            sharding="" if self.spreading is None else self.spreading.sharding or "own",
            notes=tuple(notes),
            guesses=tuple(tracer.guesses),
        )


def _verdict(replayed: ReplayedSteps, use: Amount, capacity: int | None, on_host: bool, sure: bool) -> bool | None:
    """True if even the bound fits and nothing was guessed. False if the likely amount does not fit. None in
    between."""
    if capacity is None:
        return None
    if not on_host:
        found = growth.verdict(replayed, capacity, constants.VERDICT_MARGIN)
    else:
        found = True if use.bound <= capacity else (None if use.bytes <= capacity else False)
    return found if sure else (found and None)


def _uneven(tracer: Tracer, label: str, steps: int) -> bool:
    """True if steps requested different sizes; the first has no state and gradients yet, so it is left out."""
    asked: list[Counter[int]] = [Counter() for _ in range(steps)]
    for alloc, held in tracer.ledger.events:
        if alloc and held.step >= 0 and held.label == label:
            asked[held.step][held.bytes] += 1
    pairs = list(pairwise(asked[1:]))
    if tracer.drew:
        return any(one != other for one, other in pairs)
    sums = [(_total(one), _total(other)) for one, other in pairs]
    return any(abs(one - other) > UNEVEN * max(one, other) for one, other in sums)


def _total(asked: Counter[int]) -> int:
    return sum(size * count for size, count in asked.items())


def _generator_states() -> tuple[Any, ...]:
    """States of the generators of random numbers that are Python's and NumPy's own."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.random.get_state())


def note_growth(tracer: Tracer, label: str, steps: int, end: int) -> None:
    """Steps that keep something each time need more the longer a run goes on; `end`: event at the end of the last."""
    if steps < 3:
        return
    kept = [
        held
        for held in tracer.ledger.all
        if held.step == steps - 2 and held.label == label
        and (held.died is None or held.died > end)
        and held.kind not in ("weights", "gradients", "optimizer state", "workspace")
    ]  # fmt: skip
    total = sum(held.bytes for held in kept)
    if total > KEPT:
        largest = max(kept, key=lambda held: held.bytes)
        tracer.guess(
            f"each step leaves {format_bytes(total)} that the next one does not free ({largest.line or largest.op}): "
            "memory may grow with every step"
        )


def _place_of(step: Any) -> str:
    """Where a function begins, for a message."""
    code = getattr(step, "__code__", None)
    if code is None or code.co_filename.startswith(str(Path(__file__).parents[2])):
        return ""
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _explained(error: Exception, name: str) -> OutsizeError:
    """An error of the user's code with the user's line in front; an error of Outsize without it."""
    ours = find_ours(error)
    if ours is not None:
        return ours
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    text = str(error).splitlines()[0] if str(error) else ""
    return InputError(f"{name} raised {type(error).__name__}{place}: {text}")
