"""One step on one of many ranks: it happens on all of them or on none.

In: the runner of a plan. Out: the same, which tells its peers after the passes whether they went well, and after the update once
more. A rank on which memory ran out answers what its peers still wait for; then all of them raise, put everything back, and take
the same tighter plan.

The ranks talk at three points of a step: how many slices it has (shards only), how the passes went, how the update went. Each is
reached by every rank whatever happened before, so none waits for one that has given up.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable
from typing import Any

import torch

from outsize.core.errors import InputError, OutsizeError
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.evicted import EvictedStorages
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory
from outsize.model.fitting.move.stores import Store
from outsize.model.fitting.ranks.agreement import Ranks
from outsize.model.fitting.ranks.spread import Shards, Spread
from outsize.model.fitting.run.resident import Resident, open_resident
from outsize.model.fitting.run.runner import Runner, Work
from outsize.model.fitting.update.clip_and_scale import clip_factor
from outsize.model.fitting.update.gradient_sink import InPlace, Sink
from outsize.model.fitting.update.optimizer_subset import drop_gradients, parameters_of, step_whole
from outsize.model.torch_port.sharding import local_part

WELL, SHORT, FAILED = range(3)
"""How a part of a step went on a rank: well, out of memory, any other error."""


class PeerFailed(OutsizeError):
    """Another rank has failed, so this one took no step: its own message says why."""


class PeerOutOfMemory(PeerFailed, MemoryError):
    """Memory ran out on another rank."""


class RankedRunner(Runner[Resident]):
    """A plan bound to a model on one of many ranks."""

    joins_counts = True

    def __init__(
        self, work: Work, choice: Choice, weights: Resident, sink: Sink, own: Sink | None, spread: Spread, ranks: Ranks
    ) -> None:
        super().__init__(work, choice, weights, sink, own)
        self.spread = spread
        self.ranks = ranks
        self._agreed = False
        """The error that is under way was raised on all ranks."""

    def step(self, batch: Any) -> Any:
        loss = None
        failure: BaseException | None = None
        self._agreed = False
        try:
            loss = super().step(batch)
        except BaseException as error:
            if self._agreed:
                raise
            failure = error
        try:
            self._agree(failure)
        except PeerFailed as error:
            self.sink._changed = True  # here the update is done, there it is not
            raise OutsizeError(
                f"{error} in the update, which others have done, so the ranks differ now: load the last saved state"
            ) from error
        return loss

    def passes(self, batch: Any, sink: Sink, updating: Any = None) -> tuple[Any, Any]:
        """Forward and backward of every slice on all ranks; gradients are those of all ranks afterwards."""
        self._agreed = False
        self._settle_slices(batch)
        out: tuple[Any, Any] = (None, None)
        failure: BaseException | None = None
        with self.spread.passing():
            try:
                out = super().passes(batch, sink, updating)
                self.spread.learn()
            except BaseException as error:
                failure = error
        if failure is not None:
            if is_out_of_memory(failure):
                traceback.clear_frames(failure.__traceback__)  # what they hold makes room for the answers
                clear_up()
            self.spread.answer_rest()
        total, scale = out
        count = 0.0 if scale is None or scale == math.inf else 1.0 / float(scale)
        counts = [row[0] for row in self._agree(failure, count)]
        self.spread.reduce()
        if scale is None:
            return total, None
        whole = sum(counts)  # the loss of all ranks is the sum of their totals over the sum of their counts
        return total, self.ranks.count / whole if whole else math.inf

    def _settle_slices(self, batch: Any) -> None:
        """Ranks that talk in a pass run as many slices as the one that needs most."""
        if not isinstance(self.weights, Sharded):
            return
        self.weights.agreed = 0
        rows = self.work.axes.count(batch)
        mine = len(self.weights.cut(rows))
        table = self._agree(None, mine, rows)
        most, least = int(max(row[0] for row in table)), int(min(row[1] for row in table))
        if most > least:
            raise InputError(
                f"a rank has a batch of {least} samples and another one needs {most} slices of its own: give all ranks "
                "batches of the same size"
            )
        self.weights.agreed = most
        self.weights.spread.settle()
        self.weights.spread.use(self.choice.checkpoint)
        self.weights.spread.begin(most)

    def _agree(self, failure: BaseException | None, *numbers: float) -> list[list[float]]:
        """The numbers of all ranks, where all is well with all of them; else an error on all, of the worst kind."""
        width = 2
        rows = self.ranks.tell([_code_of(failure), *numbers, *[0.0] * (width - len(numbers))])
        codes = [int(row[0]) for row in rows]
        worst = max(codes)
        if worst == WELL:
            return [row[1:] for row in rows]
        self._agreed = True
        self.spread.reset()
        if failure is not None and _code_of(failure) == worst:
            raise failure
        who = codes.index(worst)
        if worst == SHORT:
            raise PeerOutOfMemory(f"out of memory on rank {who}")
        raise PeerFailed(f"rank {who} failed with an error of its own")


def _code_of(failure: BaseException | None) -> int:
    if failure is None:
        return WELL
    return SHORT if is_out_of_memory(failure) else FAILED


class Sharded(Resident):
    """A model of which every rank has a part; slices are told from each other."""

    keeps_pace = True

    def __init__(
        self, work: Work, choice: Choice, store: Store, evicted: EvictedStorages, rows: int, spread: Shards
    ) -> None:
        super().__init__(work, choice, store, evicted, rows)
        self.spread = spread
        self.agreed = 0
        """Slices that all ranks run; 0: not agreed."""

    def cut(self, rows: int) -> list[tuple[int, int]]:
        runs = super().cut(rows)
        if not self.real:  # the first two of them run
            self.spread.begin(min(2, len(runs)))
        return runs if self.agreed in (0, len(runs)) else batches.cut(rows, self.agreed)

    def place(self, batch: Any) -> Any:
        self.spread.begin_slice()
        return batch


class ShardedUpdate(InPlace):
    """Gradients of shards stay where they are, and the user's optimizer takes all of them at once."""

    def __init__(self, work: Work, real: bool) -> None:
        super().__init__(work.model, work.scaler)
        self._optimizer = work.optimizer
        self._clip = work.clip
        self._real = real

    def begin_step(self) -> None:
        drop_gradients(self._optimizer)

    def finish(self, scale: Any) -> None:
        super().finish(scale)
        with_gradients = [p for p in parameters_of(self._optimizer) if p.grad is not None]
        if self._clip is not None and with_gradients:
            self._clip_all(with_gradients, self._clip)
        self._changed = True  # until it is done, nobody knows what it has changed
        step_whole(self._optimizer, self.scaler)
        self._changed, self.done = False, True
        drop_gradients(self._optimizer)

    def _clip_all(self, parameters: Iterable[Any], clip: float) -> None:
        """By the norm of all gradients on all ranks; a trace has those of this one."""
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)
        if self._real:
            torch.nn.utils.clip_grad_norm_(list(parameters), clip)
            return
        gradients = [local_part(p.grad) for p in parameters]
        factor = clip_factor([torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients], clip)
        for gradient in gradients:
            gradient.mul_(factor)

    def roll_back(self) -> None:
        super().roll_back()
        drop_gradients(self._optimizer)


def open_sharded(
    work: Work, choice: Choice, store: Store, spread: Shards, *, real: bool = True, rows: int = 0,
    evicted: EvictedStorages | None = None,
) -> tuple[Sharded, Sink, Sink]:  # fmt: skip
    """Where the weights of a sharded model are, and where its gradients go in a step of ours and in one of the user's."""
    weights = Sharded(work, choice, store, evicted or EvictedStorages(store, real), rows, spread)
    own = InPlace(work.model, work.scaler)
    return weights, ShardedUpdate(work, real) if work.optimizer is not None else own, own


def open_ranked(
    work: Work, choice: Choice, store: Store, spread: Spread, ranks: Ranks, *, rows: int = 0,
    evicted: EvictedStorages | None = None,
) -> RankedRunner:  # fmt: skip
    """A runner on one of many ranks; `evicted`: what is elsewhere already."""
    if isinstance(spread, Shards):
        weights, sink, own = open_sharded(work, choice, store, spread, rows=rows, evicted=evicted)
        return RankedRunner(work, choice, weights, sink, own, spread, ranks)
    plain = open_resident(work, choice, store, rows=rows, evicted=evicted)
    return RankedRunner(work, choice, plain.weights, plain.sink, plain.own, spread, ranks)
