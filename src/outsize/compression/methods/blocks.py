"""Whole blocks left out: a block that adds to its input (a residual block) can be skipped, and some add little.

Blocks are members of a `ModuleList` or `Sequential` of one class. A skipped block hands on its first input. When the set is
chosen, `close_gaps` takes skipped blocks out of their lists where the model still runs and gives the same loss.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from outsize.compression.evaluation import evaluate_hooked
from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.skipped import make_skipped
from outsize.compression.weights import get, own_parameters, put


class DropBlocks(Method):
    """Blocks left out by their measured contribution."""

    name = "drop blocks"
    stage = Stage.BLOCKS
    needs = "two blocks or more of one class in a ModuleList or Sequential, whose output has the shape of their input"

    def candidates(self, subject: Subject) -> list[Candidate]:
        outputs = _outputs(subject)
        return [
            self.candidate(name, "left out", _inside(name, block), leave_out, name=name, gives_tuple=outputs[name])
            for name, block in find_blocks(subject.model)
            if name in outputs
        ]


def find_blocks(model: Any) -> Iterator[tuple[str, Any]]:
    """Members of lists that have parameters and a class that stands there twice at least."""
    import torch

    for name, holder in model.named_modules():
        if not isinstance(holder, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        classes = Counter(type(child) for child in holder if child is not None)
        for number, child in holder.named_children():
            if classes[type(child)] > 1 and child._modules and next(child.parameters(), None) is not None:
                yield (f"{name}.{number}" if name else number), child


def _inside(name: str, block: Any) -> frozenset[str]:
    return frozenset(
        f"{name}.{inner}" if inner else name for inner, module in block.named_modules() if own_parameters(module)
    )


def _outputs(subject: Subject) -> dict[str, bool]:
    """Block -> whether it gives a tuple, of the blocks that give what they take: a first tensor of the same shape and dtype."""
    found: dict[str, bool] = {}
    unfit: set[str] = set()

    def look(module: Any, inputs: Any, output: Any, name: str) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        taken = inputs[0] if inputs else None
        if _kind(taken) is not None and _kind(taken) == _kind(first):
            found[name] = isinstance(output, tuple)
        else:
            unfit.add(name)

    hooks = [
        block.register_forward_hook(functools.partial(look, name=name)) for name, block in find_blocks(subject.model)
    ]
    evaluate_hooked(subject, hooks)
    return {name: gives for name, gives in found.items() if name not in unfit}


def _kind(value: Any) -> Any:
    """Shape and dtype of a tensor, None of anything else."""
    return (value.shape, value.dtype) if hasattr(value, "shape") and hasattr(value, "dtype") else None


def leave_out(model: Any, name: str, gives_tuple: bool) -> Any:
    """The model without what this block does; its place stays, so that the names of the other blocks stay."""
    block = get(model, name)
    return model if block is None else put(model, block, make_skipped(gives_tuple))
