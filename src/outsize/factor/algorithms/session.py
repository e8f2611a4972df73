"""One decomposition while it runs: its budget, what it holds, its passes so far, its place on disk.

Every pass is sized into what the budget leaves beside what is held, described as a step, and then run. What is done in
memory between passes is counted by the same hand (`hold`): measured <= projected <= budget.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.run.execute import clean_scratch
from outsize.array.tuning import current
from outsize.core.errors import BudgetError
from outsize.core.events import Listener
from outsize.core.memory import DISK, HOST, Allowance, Budget, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Plan, Step
from outsize.core.units import format_bytes
from outsize.factor.algorithms.checkpoint import Checkpoint
from outsize.factor.algorithms.stream import Kernel, StreamPass, bare_peak, run_stream, size_stream
from outsize.factor.algorithms.tensor import Target, Tensor

IN_MEMORY = 4
"""What a projection leaves stays in memory where it takes at most one part in so many of the room."""


class Session:
    """What exists while a decomposition runs."""

    def __init__(
        self, budget: Budget, checkpoint: Checkpoint, listener: Listener | None, name: str, device: Any = None, *,
        dry: bool = False,
    ) -> None:  # fmt: skip
        self.budget, self.checkpoint, self.listener, self.name, self.dry = budget, checkpoint, listener, name, dry
        self.device = device
        """Where Gram matrices and projections of the data are made, None on the processor."""
        self.host = checkpoint.budget
        self.held: dict[str, int] = {}
        """What stays in memory between passes, in bytes."""
        self.scratch: dict[str, int] = {}
        """What lies in scratch files."""
        self.steps: list[Step] = []
        self.needs = 0
        """The smallest budget with which everything so far could run."""
        self.expected = 1
        """Passes that there will be, about."""
        self.packed = 0
        """What BLAS has taken for itself so far, and keeps."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def room(self) -> int:
        """Bytes that are left for a pass."""
        return self.host - sum(self.held.values())

    def stream(
        self, tensor: Tensor, axis: int, make: Callable[[], Kernel], *, sample: int | None = None, note: str = ""
    ) -> tuple[Any, float]:
        """Run a kernel over a tensor; the kernel and the share of the chunks that it saw."""
        self.fits_at_all(tensor, axis)
        work = StreamPass(tensor.node, axis, make(), current(), sample)
        smallest = bare_peak(work, self.packed) + sum(self.held.values())
        sized, fits = size_stream(work, self.room, self.packed)
        self.packed = max(self.packed, sized.packed)
        self.needs = max(self.needs, smallest)
        step = sized.step(self._resident())
        self.add(self._on_disk(step, note))
        if self.dry:
            return work.kernel, work.share(sized)
        if not fits:
            self.plan().check()
        stage = self.checkpoint.next()
        self._take_up(work, stage)
        place = (len(self.steps) - 1, max(self.expected, len(self.steps)))
        if work.start >= 0:
            work.saved = lambda done: self._save(stage, done, work.kernel)
            run_stream(work, sized, self.room, self.listener, place)
        return work.kernel, work.share(sized)

    def _take_up(self, work: StreamPass, stage: int) -> None:
        found = self.checkpoint.load(stage)
        if found is not None:
            work.kernel.restore(found[0])
            work.start = found[1]

    def _save(self, stage: int, done: int, kernel: Kernel) -> None:
        if self.checkpoint.due():
            kernel.flush()
            self.checkpoint.save(stage, done, kernel.state())

    def note_finished(self, kernel: Kernel) -> None:
        """The pass that ran last is done, and what it read may go."""
        if not self.dry:
            kernel.flush()
            self.checkpoint.finish(self.checkpoint.stage, kernel.state())

    def fits_at_all(self, tensor: Tensor, axis: int) -> None:
        """A mode so long that a few of its fibres fill the budget cannot have a factor in memory."""
        few = tensor.shape[axis] * 16 * np.dtype(tensor.dtype).itemsize
        if few > max(self.host, 1) * 64:
            raise BudgetError(
                f"axis {axis} has {tensor.shape[axis]} elements: a factor of 16 columns is {format_bytes(few)}, the budget "
                f"{format_bytes(self.host)}", needed=few, budget=self.host, smallest=None, culprit=f"axis {axis}",
            )  # fmt: skip

    @contextlib.contextmanager
    def work_in_memory(self, what: str, size: int) -> Iterator[None]:
        """Count work between passes as a step; a `BudgetError` where it does not fit."""
        held = size + self.packed + sum(self.held.values())
        self.needs = max(self.needs, held)
        blas = Part(name="buffers of BLAS", bytes=self.packed, known=Known.BOUND)
        parts = (Part(name=what, bytes=size, known=Known.BOUND), blas, *self._resident())
        self.add(Step(name=what, peaks=(Peak(pool=HOST, bytes=held, known=Known.BOUND),), parts=parts))
        if not self.dry:
            self.plan().check()
        yield

    def target(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Target:
        """Where a projection goes: memory, where it is a quarter of the room at most, else a scratch file."""
        small = Target(shape, dtype, None)
        if small.nbytes <= self.room // IN_MEMORY:
            return small
        return Target(shape, dtype, os.path.join(self.scratch_folder(), f"left-{len(self.steps)}.raw"))

    def scratch_folder(self) -> str:
        """Where files of this run lie: they go with it, or stay for it to be taken up."""
        if self.dry:
            return "scratch"
        if self.checkpoint.folder is not None:
            return self.checkpoint.folder
        if self._folder is None:
            clean_scratch(self.budget.scratch)
            os.makedirs(self.budget.scratch, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(
                prefix=f"outsize-scratch-{os.getpid()}-", dir=self.budget.scratch, ignore_cleanup_errors=True
            )
        return self._folder.name

    def close(self) -> None:
        """Remove scratch files."""
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, step: Step) -> None:
        """One more step of the plan."""
        self.steps.append(step)

    def _resident(self) -> tuple[Part, ...]:
        return tuple(Part(name=name, bytes=size, known=Known.EXACT) for name, size in self.held.items() if size)

    def _on_disk(self, step: Step, note: str) -> Step:
        size = sum(self.scratch.values())
        peaks = (*step.peaks, Peak(pool=DISK, bytes=size, known=Known.EXACT)) if size else step.peaks
        return replace(step, peaks=peaks, notes=(*((note,) if note else ()), *step.notes))

    def plan(self, notes: tuple[str, ...] = ()) -> Plan:
        """The steps so far."""
        reason = next((a.reason for a in self.budget.allowances if a.pool == HOST), "")
        return Plan(
            name=self.name, steps=tuple(self.steps), budgets=(Allowance(pool=HOST, bytes=self.host, reason=reason),),
            smallest=self.needs, notes=notes,
        )  # fmt: skip
