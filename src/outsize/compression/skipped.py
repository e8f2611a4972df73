"""A block that was left out: it hands on its first input. `close_gaps` takes such blocks out of their lists."""

from __future__ import annotations

import functools
from typing import Any

from outsize.compression.evaluation import evaluate
from outsize.compression.method import Subject
from outsize.compression.weights import share


@functools.cache
def _skipped_class() -> Any:
    import torch

    class Skipped(torch.nn.Module):  # type: ignore[misc]
        """Gives its first input, as the block did."""

        def __init__(self, gives_tuple: bool) -> None:
            super().__init__()
            self.gives_tuple = gives_tuple

        def forward(self, first: Any, *rest: Any, **named: Any) -> Any:
            return (first,) if self.gives_tuple else first

        def __reduce_ex__(self, protocol: Any) -> Any:
            return make_skipped, (self.gives_tuple,), self.__dict__

    return Skipped


def make_skipped(gives_tuple: bool) -> Any:
    """A module that hands on its first input, alone in a tuple where the block gave one."""
    return _skipped_class()(gives_tuple).eval()


def close_gaps(model: Any, subject: Subject) -> Any:
    """The model without the places of skipped blocks, where it then runs and gives the same loss; else as it is."""
    import torch

    kind = _skipped_class()
    if not any(isinstance(module, kind) for module in model.modules()):
        return model
    closed = share(model)
    for module in list(closed.modules()):
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            _close(module, kind)
    try:
        same = evaluate(closed, subject).loss == evaluate(model, subject).loss
    except Exception:  # the model asks for its blocks by number
        same = False
    return closed if same else model


def _close(holder: Any, kind: type) -> None:
    """A list without its skipped blocks; `kept_places` says which it had."""
    kept = [place for place, child in enumerate(holder) if not isinstance(child, kind)]
    if len(kept) < len(holder):
        keep_places(holder, kept)
        for place, old in enumerate(kept):
            for module in holder[place].modules():  # models with caches count their layers: `layer_idx` of transformers
                if getattr(module, "layer_idx", None) == old:
                    module.layer_idx = place


def keep_places(holder: Any, kept: list[int]) -> None:
    """A `ModuleList` or `Sequential` with only these members, counted anew."""
    members = [holder[place] for place in kept]
    holder._modules.clear()
    for place, member in enumerate(members):
        holder._modules[str(place)] = member
    holder.kept_places = kept
