"""A forward pass that forgets what it saves and runs again when the backward pass asks for it.

In: a module's forward function, and how its arguments wait for the second run: saved as autograd saves tensors, or brought by
whoever keeps them. Out: another with the same result and gradient. At the first tensor that is asked for the module runs again,
and stops as soon as all is there. It finds random numbers, buffers and autocast as the first run did, and afterwards everything
is as it was before; buffers (BatchNorm's statistics) are written once. Torch's own checkpoint takes twice the processor's time
for the same (1 ms a module on the machine of an H200, where launches bind small steps), and holds on to inputs that should wait
elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from outsize.core.errors import InputError
from outsize.model.fitting.batch import transform
from outsize.model.fitting.move.stores import without_gaps
from outsize.model.torch_port.dispatch import flatten_value, leave_uncompiled, map_leaves, nest_value
from outsize.model.torch_port.objects import batch_norm, buffer_table, version_of

Forward = Callable[..., Any]


def recomputed(
    module: Any, first: Forward, second: Forward, keep: KeepInputs, written: dict[Any, tuple[str, ...]], device: str,
    generators: list[Any], once: str = "",
) -> Forward:  # fmt: skip
    """`first` now, `second` when the backward pass needs what it saved.

    `keep` says how inputs wait, `written` which buffers forward passes write, by module, `generators` where random numbers come
    from, `once` what to say where the backward pass comes a second time; empty: it may.
    """
    mine = written_in(module, written)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return first(*args, **kwargs)
        args, kwargs, inputs = keep(args, kwargs)
        runs, settings = TwoRuns(mine, generators), Settings(device)

        def again() -> None:
            args, kwargs = inputs.bring()
            with settings.restored(), runs.second():
                second(*args, **kwargs)

        call = Call(again, once)
        with torch.autograd.graph.saved_tensors_hooks(call.forget, call.recall):
            out = first(*args, **kwargs)
        inputs.check(module)
        return out

    return run


def checkpointed(
    module: Any, forward: Forward, written: dict[Any, tuple[str, ...]], device: str, generators: list[Any]
) -> Forward:
    """`forward` that keeps its inputs only, saved as autograd saves tensors."""

    def uncached(*args: Any, **kwargs: Any) -> Any:
        """Autocast keeps lower copies of weights until it ends; here each is used once, so they may go at once."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(before)

    return recomputed(module, uncached, uncached, save_inputs, written, device, generators)


class _Enough(Exception):
    """All that is needed has been computed again."""


class Call:
    """One call of a module: what it saved, forgotten and found again."""

    def __init__(self, again: Callable[[], Any], once: str = "") -> None:
        self._again = again
        self._once = once
        """What to say where a tensor is asked for twice; empty: it is made once more."""
        self._count = 0
        self._found: dict[int, Any] | None = None
        _leave_as_it_is(Call.forget.__code__)

    def forget(self, tensor: Any) -> int:
        """Only the number of the saved tensor stays."""
        self._count += 1
        return self._count - 1

    def recall(self, number: int) -> Any:
        """The tensor of this number; the first to be asked for makes all of them."""
        if self._found is None or (number not in self._found and not self._once):
            self._run()
        assert self._found is not None
        if number not in self._found:
            raise InputError(self._once)
        return self._found.pop(number)

    def _run(self) -> None:
        found: dict[int, Any] = {}

        def keep(tensor: Any) -> Any:
            if len(found) < self._count:  # else a module has caught what said that it is enough
                found[len(found)] = tensor.detach()
            if len(found) == self._count:
                raise _Enough
            return tensor.detach()

        _leave_as_it_is(keep.__code__)
        with (
            contextlib.suppress(_Enough),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            self._again()
        if len(found) != self._count:
            raise RuntimeError(
                f"a second forward pass saved {len(found)} tensors and the first {self._count}: the module does not do the "
                "same twice"
            )
        self._found = found


@functools.cache
def _leave_as_it_is(code: Any) -> None:
    """What is compiled inside a module calls the hooks: the compiler would compile those too, once for every number."""

    leave_uncompiled(code)


class Settings:
    """Autocast at the moment of a call."""

    __slots__ = ("_autocast", "_cached")

    def __init__(self, device: str) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device, "cpu"))
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Autocast as it was in the first run."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cached))
            yield


Keep = Callable[[Any], Callable[[], Any]]
"""Takes a tensor, gives a function that brings it back."""


class Inputs(Protocol):
    """Arguments of a first run that wait for the second."""

    def check(self, module: Any) -> None:
        """An `InputError` where the first run has changed what it was given: it could not run a second time."""

    def bring(self) -> tuple[Any, Any]:
        """(args, kwargs) for the second run."""


KeepInputs = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any, Inputs]]
"""(args, kwargs) -> those of the first run, and those that wait."""


def save_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Inputs]:
    """Arguments wait among what autograd saves."""
    return args, kwargs, SavedInputs(args, kwargs)


def keep_inputs(keep: Keep | None) -> KeepInputs:
    """They wait where `keep` puts them, or on the device."""

    def wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Inputs]:
        if keep is not None:
            args, kwargs = _packed((args, kwargs))
        return args, kwargs, WaitingInputs(args, kwargs, keep)

    return wait


class _Place(NamedTuple):
    """Where a tensor was among arguments."""

    number: int


class SavedInputs:
    """Positional arguments, saved as autograd saves tensors: whoever keeps those elsewhere keeps these too."""

    __slots__ = ("_kwargs", "_saver", "_values")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors: dict[int, Any] = {}
        places: dict[int, _Place] = {}

        def note(_: str, tensor: Any) -> _Place:
            tensors[id(tensor)] = tensor
            return places.setdefault(id(tensor), _Place(len(places)))

        self._values = transform(args, note)
        """Places of tensors in copies of the lists and dicts that hold them: the caller may go on filling its own."""
        self._saver = _Saver.apply(torch.empty(0, requires_grad=True), *tensors.values())
        """Its node alone would not keep what it saves."""
        self._kwargs = transform(kwargs, lambda _, tensor: tensor)

    def check(self, module: Any) -> None:
        """Autograd finds what was changed."""

    def bring(self) -> tuple[Any, Any]:
        """What was given twice is one object again: attention looks whether keys are queries."""
        tensors = self._saver.grad_fn.saved_tensors
        args = transform(self._values, lambda _, place: tensors[place.number], leaf=_Place)
        return args, transform(self._kwargs, lambda _, tensor: tensor)


class _Saver(torch.autograd.Function):  # type: ignore[misc]
    """A node that saves what it is given and is part of no graph."""

    @staticmethod
    def forward(ctx: Any, nothing: Any, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nobody goes back through it")


class WaitingInputs:
    """All arguments; `keep(tensor)` gives a function that brings it back, None: they stay where they are."""

    def __init__(self, args: Any, kwargs: Any, keep: Keep | None) -> None:
        leaves, self._spec = flatten_value((args, kwargs))
        self._given = [(leaf, version_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves: list[Any] = []
        """Numbers of tensors, values in a tuple for the rest."""
        self._tensors: list[tuple[Callable[[], Any], bool]] = []
        """(function that gives a tensor, does it need a gradient), each once: modules ask whether two inputs are the same."""
        numbers: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._leaves.append((leaf,))
                continue
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(self._tensors)
                away = keep is not None and leaf.requires_grad and not leaf.is_leaf
                give = keep(leaf.detach()) if away and keep is not None else _same(leaf.detach())
                self._tensors.append((give, leaf.requires_grad))
            self._leaves.append(numbers[id(leaf)])

    def check(self, module: Any) -> None:
        """An `InputError` where the call has changed what it was given: it could not run a second time."""
        given, self._given = self._given, []
        if any(version_of(leaf) != version for leaf, version in given):
            raise InputError(
                f"{type(module).__name__} changes its input in place, so it cannot run twice: let it work on a copy"
            )

    def bring(self) -> Any:
        """(args, kwargs) with tensors that are the beginning of a new graph."""

        tensors = [give().detach().requires_grad_(needs) for give, needs in self._tensors]
        values = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self._leaves]
        return nest_value(values, self._spec)


def _same(tensor: Any) -> Callable[[], Any]:
    return lambda: tensor


def _packed(value: Any) -> Any:
    """Tensors without gaps: both runs have to see the same strides, and what waits elsewhere has no gaps."""
    made: dict[int, Any] = {}

    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        return made.setdefault(id(leaf), without_gaps(leaf))

    return map_leaves(pack, value)


Written = list[tuple[Any, tuple[str, ...]]]
"""Modules with the names of the buffers that they write."""


def written_in(module: Any, written: dict[Any, tuple[str, ...]]) -> Written:
    """Those of a module and what is inside it."""
    return [(child, names) for child in module.modules() if (names := written.get(child))]


def generators_of(device: Any) -> list[Any]:
    """Torch's generators that a model on a device draws from."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class _Now(threading.local):
    """What this thread does: a card's backward pass has one of its own."""

    runs = 0
    """Second runs, inside each other."""


_now = _Now()


def is_second_run() -> bool:
    """True inside a second run: what comes for it is wanted by the backward pass that follows."""
    return _now.runs > 0


class TwoRuns:
    """One call that runs twice: made before the first run, then `with call.second():`, as often as its graph is gone through,
    which may be before the first run has ended."""

    __slots__ = ("_copies", "_states", "_statistics")

    def __init__(self, written: Written, generators: list[Any]) -> None:
        self._statistics = [child for child, names in written if _only_averages(child, names)]
        others = [(child, names) for child, names in written if not _only_averages(child, names)]
        self._copies = [(child, name, buffer_table(child)[name].clone()) for child, names in others for name in names]
        self._states = [(generator, generator.get_state()) for generator in generators]
        """Kept whether or not the first run moves them: numbers can be drawn and the state put back."""

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        """The run that only finds again what the first one had."""
        states = [(generator, generator.get_state()) for generator, _ in self._states]
        buffers = [(child, name, buffer_table(child)[name]) for child, name, _ in self._copies]
        statistics = [(child, child.momentum, buffer_table(child)["num_batches_tracked"]) for child in self._statistics]
        _now.runs += 1
        try:
            for generator, state in self._states:
                generator.set_state(state)
            for child, name, copy in self._copies:
                buffer_table(child)[name] = copy.clone()  # the run writes into it, and may not be the last
            for child, _, _ in statistics:
                child.momentum, buffer_table(child)["num_batches_tracked"] = 0.0, None
            yield
        finally:
            _now.runs -= 1
            for child, momentum, count in statistics:
                child.momentum, buffer_table(child)["num_batches_tracked"] = momentum, count
            for child, name, buffer in buffers:
                buffer_table(child)[name] = buffer
            for generator, state in states:
                generator.set_state(state)


def _only_averages(module: Any, names: tuple[str, ...]) -> bool:
    """True for torch's own BatchNorm in training: with a momentum of zero it leaves its averages as they are.

    Where it has not counted, another module writes its averages, with a momentum of its own.
    """
    own = isinstance(module, batch_norm()) and type(module).forward is batch_norm().forward
    return own and module.training and set(names) == {"running_mean", "running_var", "num_batches_tracked"}
