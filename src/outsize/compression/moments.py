"""What goes into a layer: second moments of its inputs on the user's data, by which a factored layer keeps what the data use.

A low-rank layer that is nearest to the weights wastes rank on directions in which no input lies. With the moments
`m = mean(x^T x)` of the inputs x, the nearest to the outputs is the cut of `W m^(1/2)`. Moments take inputs^2 numbers a layer;
where all of them together would take more than the model, only their diagonals are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from outsize.compression.evaluation import evaluate_hooked
from outsize.compression.method import Subject
from outsize.compression.weights import count_bytes


def input_moments(subject: Subject, layers: Mapping[str, int]) -> dict[str, Any]:
    """Layer -> its second moments (a matrix, or the diagonal of one), for the layers (name -> inputs) that the loss reaches."""
    whole = sum(length**2 * 4 for length in layers.values()) <= count_bytes(subject.model)
    found: dict[str, Any] = {}
    hooks = [
        subject.model.get_submodule(name).register_forward_pre_hook(
            functools.partial(_add, found=found, name=name, whole=whole)
        )
        for name in layers
    ]
    evaluate_hooked(subject, hooks)
    return found


def _add(module: Any, inputs: tuple[Any, ...], found: dict[str, Any], name: str, whole: bool) -> None:
    if not inputs or not hasattr(inputs[0], "flatten"):
        return
    rows = inputs[0].detach().flatten(0, -2).float()
    part = rows.T @ rows if whole else rows.square().sum(0)
    found[name] = part if name not in found else found[name] + part


def roots_of(moments: Any) -> tuple[Any, Any]:
    """A square root of the moments and its inverse. Directions without inputs get a little, so that there is an inverse."""
    import torch

    if moments.dim() == 1:
        root = (moments + 1e-6 * moments.mean() + 1e-20).double().sqrt()
        return root.diag(), (1 / root).diag()
    values, vectors = torch.linalg.eigh(moments.double())
    values = (values.clamp_min(0) + 1e-6 * values.clamp_min(0).mean() + 1e-20).sqrt()
    return vectors * values @ vectors.T, vectors / values @ vectors.T
