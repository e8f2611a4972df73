"""Counts the steps of a script's own loop, says in which phase it is, and when it has been followed far enough.

In: calls of modules, backward passes, optimizer steps and batches of DataLoaders. Out: marks in the ledger (which phase begins at
which event) and a call of `stop`. A step ends with `optimizer.step()`; of several optimizers the one that stepped most often
counts. A script without an optimizer changes its weights by hand: there a step ends before the next forward pass with gradients.
After the last step the script may go on to its evaluation: its loader ends, and the next forward pass with gradients is the end.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module
from torch.optim import optimizer as optimizers

from outsize.core.units import format_bytes
from outsize.model.torch_port.objects import hooked
from outsize.model.torch_port.one_process import batches_in_process
from outsize.model.torch_port.patches import wrapping_backward
from outsize.model.tracing.tracer import Tracer

PHASES = ("build", "first step", "steady step", "evaluation")
"""In the order in which they are shown."""

WAITING = 10
"""How many times as many steps are followed for an optimizer that steps more rarely than the others."""


class Follower:
    """What has happened in the script so far."""

    def __init__(self, tracer: Tracer, wanted: int, stop: Callable[..., None]) -> None:
        self.tracer, self.wanted, self.stop = tracer, wanted, stop
        self.marks: list[tuple[int, str]] = [(0, PHASES[0])]
        """(number of the ledger's event, the phase that begins there)."""
        self.steps = 0
        """Steps that have ended."""
        self.ends: list[int] = []
        """Number of the ledger's event at the end of each step."""
        self.finished = False
        """All steps that were asked for have ended."""
        self.loader: Any = None
        """The first DataLoader with workers."""
        self._counts: Counter[int] = Counter()
        self._optimizers: list[Any] = []
        self._forwards = self._backwards = 0
        self._by_hand: bool | None = None
        """True where no optimizer is there; None until that is known."""
        self._passed = 0
        """Backward passes before this step."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the block's modules, optimizers and backward passes."""
        hooks = hooked(
            module.register_module_forward_pre_hook(self._forward),
            optimizers.register_optimizer_step_post_hook(self._step),
        )
        with hooks, wrapping_backward(self._backward):
            yield

    def batches(self, loader: Any) -> Iterator[Any]:
        """Stands for `DataLoader.__iter__`: the batches are made in this process, and no more than are needed."""
        if loader.num_workers and self.loader is None:
            self.loader = loader
        return self._give(loader, batches_in_process(loader), self._backwards, self._forwards)

    def _give(self, loader: Any, batches: Iterator[Any], backwards: int, forwards: int) -> Iterator[Any]:
        given = 0
        held: list[int] = []
        while True:
            held.append(self._held())
            trains = self._backwards > backwards
            enough = self.finished if trains else given >= self.wanted and self._forwards > forwards
            batch = None if enough else next(batches, self)
            if batch is self or enough:
                break
            yield batch
            given += 1
        if enough and not trains and len(held) > 2 and held[-1] > held[-2] > held[-3]:
            each = held[-1] - held[-2]
            left = max(0, len(loader) - given) if hasattr(loader, "__len__") else 0
            self.tracer.guess(
                f"evaluation keeps {format_bytes(each)} more with each batch: {format_bytes(each * left)} more than was "
                f"followed for all {given + left} batches"
            )

    def _held(self) -> int:
        """Bytes alive on the device."""
        return sum(held.bytes for held in self.tracer.ledger.live.values() if held.label == self.tracer.device)

    def _begin(self) -> None:
        if self.tracer.ledger.step < 0:
            self.tracer.ledger.step = 0

    def _mark(self, name: str) -> None:
        if self.marks[-1][1] != name:
            self.marks.append((len(self.tracer.ledger.events), name))

    @property
    def _stage(self) -> str:
        return PHASES[1] if self.steps == 0 else PHASES[2]

    def _forward(self, module: Any, args: Any) -> None:
        if self.tracer.owners.depth != 1:
            return
        trains = torch.is_grad_enabled() and module.training
        if trains and self._backwards > self._passed and self._is_by_hand():
            self._end_step()
        if trains and self.finished:
            self.stop()
        self._begin()
        self._forwards += 1
        self.tracer.owners.evaluating = not trains
        self._mark(self._stage if trains else PHASES[3])

    def _backward(self) -> contextlib.AbstractContextManager[None]:
        self._begin()
        self._backwards += 1
        if self.tracer.owners.evaluating:  # the model trains in its evaluation mode
            self.tracer.owners.evaluating = False
            if self.marks[-1][1] == PHASES[3]:
                self.marks[-1] = (self.marks[-1][0], self._stage)
        self._mark(self._stage)
        return contextlib.nullcontext()

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._begin()
        if id(optimizer) not in self._counts:
            self._optimizers.append(optimizer)
        self._counts[id(optimizer)] += 1
        if max(self._counts.values()) == self.steps:
            return
        self._end_step()

    def close(self) -> None:
        """The script has ended: a step by hand ends with it."""
        if self._backwards > self._passed and not self.finished and self._is_by_hand():
            self._end_step()

    @property
    def only_uses(self) -> bool:
        """True for a script that called its model and neither trained it nor has what would train it."""
        return self._forwards > 0 and self._backwards == 0 and not _all_optimizers()

    def _is_by_hand(self) -> bool:
        if self._by_hand is None:
            self._by_hand = not _all_optimizers()
        return self._by_hand

    def _end_step(self) -> None:
        if self.finished:
            self.stop()
        self.steps += 1
        self._passed = self._backwards
        self.ends.append(len(self.tracer.ledger.events))
        self.tracer.ledger.step = self.steps
        self.tracer.owners.evaluating = False
        self._mark(PHASES[2])
        if self.steps >= self.wanted:
            self.finished = self.steps >= WAITING * self.wanted or not self._waits()

    def histories(self) -> Iterator[str]:
        """What the directions of L-BFGS take when all are kept: how many are, its comparisons decide."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                group = optimizer.param_groups[0]
                pairs = group["history_size"]
                most = 2 * pairs * sum(p.numel() * p.element_size() for p in group["params"])
                yield f"L-BFGS keeps up to {pairs} pairs of directions, {format_bytes(most)}: how many, its comparisons decide"

    def _waits(self) -> bool:
        """True while an optimizer with weights of its own has not stepped yet."""
        stepped = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        return any(
            id(p) not in stepped and p.requires_grad
            for optimizer in _all_optimizers()
            for group in getattr(optimizer, "param_groups", ())
            for p in group["params"]
        )


def _all_optimizers() -> list[Any]:
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
