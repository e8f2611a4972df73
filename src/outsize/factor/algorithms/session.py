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

from outsize.array.api.lazy import Array
from outsize.array.device.base import DeviceBudget
from outsize.array.passes.base import Sized
from outsize.array.plan.schedule import device_peaks
from outsize.array.run.distribute import is_reachable
from outsize.array.run.execute import clean_scratch
from outsize.array.run.results import plan_compute
from outsize.array.store.base import Block
from outsize.array.tuning import current
from outsize.core.errors import BudgetError
from outsize.core.events import Listener
from outsize.core.memory import DISK, HOST, Allowance, Budget, Part
from outsize.core.noun import Known
from outsize.core.plan import Peak, Plan, Step
from outsize.core.units import format_bytes
from outsize.engine.cluster import Cluster, use_cluster
from outsize.factor.algorithms.checkpoint import Checkpoint
from outsize.factor.algorithms.projection import BasisTooSmall, Projections
from outsize.factor.algorithms.ranks import Key, Ranks, Survey
from outsize.factor.algorithms.shared import cut, is_shared, run_shared
from outsize.factor.algorithms.stream import Kernel, StreamPass, run_stream, size_stream
from outsize.factor.algorithms.tensor import Target, Tensor

IN_MEMORY = 4
"""What a projection leaves stays in memory where it takes at most one part in so many of the room."""


class Session:
    """What exists while a decomposition runs."""

    def __init__(
        self, budget: Budget, checkpoint: Checkpoint, listener: Listener | None, name: str, device: DeviceBudget | None = None, *,
        dry: bool = False, strict: bool = True, ranks: Ranks | None = None, at_once: bool = False, cluster: Cluster | None = None,
    ) -> None:  # fmt: skip
        """A dry session has no data and takes the ranks from `ranks`. A strict one ends with a `BudgetError` at the first
        step that does not fit."""
        self.budget, self.checkpoint, self.listener, self.name, self.dry = budget, checkpoint, listener, name, dry
        self.strict = strict
        self.device = device
        """Where projections and Gram matrices of the data are made, None on the processor."""
        self.at_once = at_once
        """True where the data are cut in memory at once, without a pass that makes them smaller: that asks nothing of their
        ranks."""
        self.cluster = cluster
        """Whose workers share passes over much data, None where all is done here."""
        self.useful = 1
        """Workers beyond which one more is given nothing to do in any pass so far."""
        self.ranks = ranks or Ranks()
        """What is known of ranks."""
        self.surveyed: set[Key] = set()
        """Modes of which a survey said what they need."""
        self.host = self.asked = checkpoint.budget
        self.held: dict[str, int] = {}
        """What stays in memory between passes, in bytes."""
        self.scratch: dict[str, int] = {}
        """What lies in scratch files."""
        self.steps: list[Step] = []
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
        work, sized, fallen = self._size(tensor, axis, make(), sample)
        step, shared = sized.step(self._resident()), is_shared(self.cluster, tensor, sample)
        step = replace(step, peaks=(*step.peaks, *device_peaks(sized, self.device)))
        if shared:
            parts = len(cut(work, sized, self._spread))
            self.useful = max(self.useful, parts)
            step = replace(step, notes=(f"{parts} tasks for workers", *step.notes))
        self.add(self._on_disk(step, *filter(None, (note, fallen))))
        self.packed = max(self.packed, sized.packed)  # a pass that does not fit has taken nothing
        if self.dry:
            return work.kernel, work.share(sized)
        stage = self.checkpoint.next()
        self._take_up(work, stage)
        place = (len(self.steps) - 1, max(self.expected, len(self.steps)))
        if work.start >= 0 and shared and self.cluster is not None:
            self.checkpoint.begin()
            folder = os.path.join(self.scratch_folder(), "parts")
            run_shared(work, sized, self.cluster, folder, self.room, self.listener, place)
        elif work.start >= 0:
            work.saved = lambda done: self._save(stage, done, work.kernel)
            run_stream(work, sized, self.room, self.listener, place)
        return work.kernel, work.share(sized)

    def _size(self, tensor: Tensor, axis: int, kernel: Kernel, sample: int | None) -> tuple[StreamPass, Sized, str]:
        """The pass and its sizes: by the device where it can do it, for the user's data and for what is left where that is worth
        the link. A word where a device is too small."""
        tuning, device, fallen = current(), self.device, ""
        if device is not None and sample is None and not (tensor.left and tensor.node.nbytes <= tuning.device_least):
            from outsize.factor.algorithms.device_stream import DeviceStreamPass, can_stream

            if can_stream(kernel, tensor.node, device):
                there = DeviceStreamPass(tensor.node, axis, kernel, tuning, device)
                sized = size_stream(there, self.room, self.packed)
                if sized.device_bytes <= device.room:
                    return there, sized, ""
                needed, may = (format_bytes(n + device.device.outside) for n in (sized.device_bytes, device.room))
                if isinstance(kernel, Projections):
                    raise BasisTooSmall
                fallen = f"on the processor: a chunk takes {needed} of {device.device.name}, of which {may} may be held"
        work = StreamPass(tensor.node, axis, kernel, tuning, sample)
        return work, size_stream(work, self.room, self.packed), fallen

    def _take_up(self, work: StreamPass, stage: int) -> None:
        found = self.checkpoint.load(stage)
        if found is not None:
            work.kernel.restore(found[0])
            work.start = found[1]

    def _save(self, stage: int, done: int, kernel: Kernel) -> None:
        if self.checkpoint.due():
            kernel.flush()
            self.checkpoint.save(stage, done, kernel.state())

    def note_survey(self, found: Survey, allowed: float, *, hopeless: bool) -> None:
        """A mode was looked at; `hopeless` where a wider mixture would not say more."""
        if hopeless or found.told(allowed) is not None:
            self.surveyed.add(found.key)
        if not self.dry:
            self.ranks.note(found, allowed, hopeless=hopeless)

    def note_finished(self, kernel: Kernel) -> None:
        """The pass that ran last is done, and what it read may go."""
        if not self.dry:
            kernel.flush()
            self.checkpoint.finish(self.checkpoint.stage, kernel.state())

    def compute(self, array: Array, what: str) -> Block:
        """Make an array by the array room's passes, inside the room; they go into the plan."""
        with use_cluster(self.cluster if is_reachable(array.node) else None):
            for step in plan_compute(array.node, max(self.room, 0)).steps:
                self.add(self._beside(step, what))
            if self.dry:
                return np.zeros(array.shape, array.dtype) if array.size < 1 << 22 else np.zeros(0)
            return np.asarray(array.compute(budget=self.room, progress=self.listener))

    def _beside(self, step: Step, what: str) -> Step:
        """A step of the array room with what this session holds."""
        held = sum(self.held.values())
        peaks = tuple(replace(peak, bytes=peak.bytes + held) if peak.pool == HOST else peak for peak in step.peaks)
        return replace(step, name=f"{what}: {step.name}", peaks=peaks, parts=(*step.parts, *self._resident()))

    @contextlib.contextmanager
    def work_in_memory(self, what: str, size: int) -> Iterator[None]:
        """Count work between passes as a step; a `BudgetError` where it does not fit."""
        held = size + self.packed + sum(self.held.values())
        blas = Part(name="buffers of BLAS", bytes=self.packed, known=Known.BOUND)
        parts = (Part(name=what, bytes=size, known=Known.BOUND), blas, *self._resident())
        self.add(Step(name=what, peaks=(Peak(pool=HOST, bytes=held, known=Known.BOUND),), parts=parts))
        yield

    def has_room(self, size: int) -> bool:
        """True where work in memory that takes so much fits now."""
        return size + self.packed + sum(self.held.values()) <= self.host

    def target(self, shape: tuple[int, ...], dtype: np.dtype[Any], of: Tensor) -> Target:
        """Where a projection goes: memory, where it is a quarter of the room at most, else a scratch file; a file always where
        workers write it."""
        small = Target(shape, dtype, None)
        if small.nbytes <= self.room // IN_MEMORY and not is_shared(self.cluster, of, None):
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

    @property
    def _spread(self) -> int:
        return self.cluster.spread if self.cluster is not None else 1

    def start_again(self, host: int, *, at_once: bool) -> None:
        """In another way, or as if in a smaller budget: what was begun did not fit, but this does."""
        self.held.clear()
        self.scratch.clear()
        self.host, self.at_once = host, at_once

    def close(self) -> None:
        """Remove scratch files."""
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, step: Step) -> None:
        """One more step of the plan; a `BudgetError` where it does not fit."""
        self.steps.append(step)
        needed = step.peak(HOST)
        if self.strict and needed > self.host:
            refused = self.plan()
            self.steps.pop()
            raise BudgetError(
                f"{self.name}: step '{step.name}' holds {format_bytes(needed)} of host, the budget is {format_bytes(self.host)}",
                needed=needed, budget=self.host, culprit=step.name, plan=refused,
            )  # fmt: skip

    def _resident(self) -> tuple[Part, ...]:
        return tuple(Part(name=name, bytes=size, known=Known.EXACT) for name, size in self.held.items() if size)

    def _on_disk(self, step: Step, *notes: str) -> Step:
        size = sum(self.scratch.values())
        peaks = (*step.peaks, Peak(pool=DISK, bytes=size, known=Known.EXACT)) if size else step.peaks
        return replace(step, peaks=peaks, notes=(*notes, *step.notes))

    def plan(self, smallest: int | None = None, notes: tuple[str, ...] = ()) -> Plan:
        """The steps so far."""
        reason = next((a.reason for a in self.budget.allowances if a.pool == HOST), "")
        budgets, device = [Allowance(pool=HOST, bytes=self.asked, reason=reason)], self.device
        if device is not None and any(step.peak(device.device.pool) for step in self.steps):
            budgets.append(Allowance(pool=device.device.pool, bytes=device.budget, reason=device.reason))
        return Plan(
            name=self.name, steps=tuple(self.steps), budgets=tuple(budgets),
            smallest=smallest, notes=notes, workers=self._spread if self.cluster else None,
            useful_workers=self.useful if self.cluster else None,
        )  # fmt: skip
