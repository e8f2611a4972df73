"""A model, an optimizer and a batch without contents, on which a fitted step runs to show what it would hold.

In: the user's work and a choice. Out: `Projection`: the peak of each phase, what waits elsewhere, what each module
keeps. The user's own module objects run, with fake tensors in the place of their parameters for that time; every
attribute is put back. Values that steer a step are chosen (a comparison is true, a mask selects all), so that the
projection is above what such a step holds.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outsize.core.noun import Noun
from outsize.model.fitting import batch as batches
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.recorder import Recorder
from outsize.model.fitting.runner import Runner, Work
from outsize.model.fitting.stores import NoStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(Noun):
    """What a step would hold."""

    peaks: dict[str, int]
    """Bytes on the device, by phase."""
    away: int
    """Most bytes that wait elsewhere."""
    kept: dict[str, int]
    """Bytes alive at the end of the forward pass, by the module that made them; empty for inference."""
    fixed: int
    """Bytes that are there before the step begins."""
    random: tuple[str, ...]
    """Operators that draw random numbers."""
    calls: dict[str, int]
    """How often each module ran."""
    seconds: dict[tuple[str, str], float]
    """Estimated time by (phase, module)."""
    operators: dict[str, int]
    """Operators by phase."""

    @property
    def peak(self) -> int:
        """The highest moment in bytes."""
        return max(self.peaks.values())


@dataclass(frozen=True, slots=True)
class Twin:
    """Enough of a tensor to make another without contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    grad: bool
    parameter: bool

    @classmethod
    def of(cls, tensor: Any) -> Twin:
        """Its shape, layout and part in autograd."""
        import torch

        dense = tensor.detach()
        return cls(
            tuple(dense.shape), tuple(dense.stride()), dense.dtype, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)
        )  # fmt: skip

    def make(self, device: str) -> Any:
        """The tensor without contents, under the mode that is on."""
        import torch

        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.parameter:
            return torch.nn.Parameter(made, requires_grad=self.grad)
        return made.requires_grad_(self.grad)


class Stage:
    """Projects choices for one model and one batch."""

    def __init__(self, work: Work, batch: Any) -> None:
        self.work = work
        self.batch = batches.transform(batch, lambda _, tensor: Twin.of(tensor))
        """The batch, with twins for tensors."""
        model = work.model
        self._twins = {id(t): (t, Twin.of(t)) for t in (*model.parameters(), *model.buffers())}

    def with_batch(self, batch: Any) -> Stage:
        """The same work with another batch of twins."""
        other = copy.copy(self)
        other.batch = batch
        return other

    def project(self, choice: Choice, *, call: Callable[[Any, Any], Any] | None = None) -> Projection:
        """Run a step (or, with `call`, an inference) without contents."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        state = torch.random.get_rng_state()
        recorder = Recorder(self.work.device)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        store = NoStore()
        with mode, _chosen_values():
            fakes = {key: twin.make(self.work.device) for key, (_, twin) in self._twins.items()}
            batch = batches.transform(self.batch, lambda _, twin: twin.make(self.work.device), leaf=Twin)
            optimizer = None if self.work.optimizer is None or call else self._optimizer(fakes)
            held = [*fakes.values(), *batches.tensors_of(batch).values(), *_state(optimizer)]
            recorder.hold(held)
            fixed = sum(record.bytes for record in recorder.ledger.live.values())
            with self._swapped(fakes) as model, recorder.watching(model):
                work = replace(self.work, optimizer=optimizer, scaler=None)
                runner = Runner(work, choice, store, real=False)
                runner.phase = recorder.phase
                if call is not None:
                    runner.infer(batch, call)
                else:
                    runner.step(batch) if optimizer is not None else runner.backward(batch)
        torch.random.set_rng_state(state)
        return Projection(
            peaks=recorder.peaks(), away=store.peak, kept={} if call else recorder.kept(), fixed=fixed,
            random=tuple(recorder.random), calls=recorder.calls, seconds=recorder.seconds, operators=recorder.operators,
        )  # fmt: skip

    def _optimizer(self, fakes: dict[int, Any]) -> Any:
        """The user's optimizer over fakes, with the state that it has after a first step."""
        import torch

        real = self.work.optimizer
        twin = copy.copy(real)
        twin.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the real one
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        groups = [{**group, "params": [fakes[id(p)] for p in group["params"]]} for group in real.param_groups]
        twin.__dict__["param_groups"] = groups
        twin.__dict__["state"] = defaultdict(dict)
        for group in groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
        twin.step()
        twin.zero_grad(set_to_none=True)
        return twin

    @contextlib.contextmanager
    def _swapped(self, fakes: dict[int, Any]) -> Iterator[Any]:
        """The model with fakes for parameters and buffers; everything as before afterwards."""
        model = self.work.model
        before = [
            (m, dict(m.__dict__), {kind: dict(m.__dict__[kind]) for kind in ("_parameters", "_buffers")})
            for m in model.modules()
        ]
        for module, _, tables in before:
            for kind, table in tables.items():
                for name, tensor in table.items():
                    if tensor is not None:
                        module.__dict__[kind][name] = fakes[id(tensor)]
            flat = module.__dict__.get("_flat_weights")
            if isinstance(flat, list):
                module.__dict__["_flat_weights"] = [fakes.get(id(tensor), tensor) for tensor in flat]
        try:
            yield model
        finally:
            for module, attributes, tables in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                for kind, table in tables.items():
                    module.__dict__[kind].clear()
                    module.__dict__[kind].update(table)


def _state(optimizer: Any) -> list[Any]:
    import torch

    if optimizer is None:
        return []
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def _chosen_values() -> Iterator[None]:
    """Answers for code that looks at contents: true, one, all."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    def item(value: Any) -> Any:
        return bool(1) if value.dtype == torch.bool else (1.0 if value.dtype.is_floating_point else 1)

    def nonzero(value: Any) -> Any:
        return value.new_empty((value.numel(), value.dim()), dtype=torch.int64)

    def select(value: Any, mask: Any) -> Any:
        return value.new_empty(torch.broadcast_shapes(value.shape, mask.shape).numel())

    def index(value: Any, indices: Any) -> Any:
        positions: list[Any] = []
        for one in indices:
            if one is not None and one.dtype in (torch.bool, torch.uint8):
                positions += [one.new_empty(one.numel(), dtype=torch.int64) for _ in range(one.dim())]
            else:
                positions.append(one)
        return aten.index.Tensor(value, positions)

    rules: dict[Any, Callable[..., Any]] = {
        aten._local_scalar_dense.default: item,
        aten.nonzero.default: nonzero,
        aten.masked_select.default: select,
        aten.equal.default: lambda *_: True,
        aten.index.Tensor: index,
    }

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            rule = rules.get(func)
            return rule(*args) if rule is not None else func(*args, **(kwargs or {}))

    with Mode():
        yield


def open_stage(work: Work, batch: Any) -> Stage:
    """The stage for the device of a model."""
    return Stage(work, batch)
