"""What a second run of a module has to find as the first one did.

In: the buffers that its forward pass writes, the random generators it may draw from. Out: a context for the second run. It
draws the numbers of the first again, and afterwards everything is as it was before; buffers (BatchNorm's statistics)
are written once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from outsize.model.torch_port.objects import batch_norm, buffer_table

Written = list[tuple[Any, tuple[str, ...]]]
"""Modules with the names of the buffers that they write."""


def written_in(module: Any, written: dict[Any, tuple[str, ...]]) -> Written:
    """Those of a module and what is inside it."""
    return [(child, names) for child in module.modules() if (names := written.get(child))]


def generators_of(device: Any) -> list[Any]:
    """Torch's generators that a model on a device draws from."""
    import torch

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
