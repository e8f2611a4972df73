"""How much each index matters: what the loss would change without it, or how large its weights are.

In: a model, its trace, batches and a loss. Out: for each dim a value per index. With a loss it is Taylor's first term, |sum of
weight x gradient| over all weights of an index, added up over batches: how much the loss changes, to first order, when they
become zero. Without a loss it is the norm of these weights, as a part of the mean norm in its dim, since layers have scales of
their own, for each of them, since a head has more weights than a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from outsize.compression.pruning.axes import Dim, dims_of, spread
from outsize.compression.pruning.call import Axes

Scores = dict[Dim, Any]


def by_magnitude(model: Any, tensors: Mapping[str, Axes]) -> Scores:
    """Norms of weights, as parts of their mean."""
    weights = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
    norms = {dim: np.sqrt(found) for dim, found in _spread_all({k: w**2 for k, w in weights.items()}, tensors).items()}
    numbers = _spread_all({name: weight.new_ones(weight.shape) for name, weight in weights.items()}, tensors)
    return {dim: numbers[dim] * values / max(1e-30, float(values.mean())) for dim, values in norms.items()}


def by_loss(model: Any, tensors: Mapping[str, Axes], batches: Iterable[Any], loss: Callable[[Any, Any], Any]) -> Scores:
    """First-order changes of the loss. Gradients that the model holds stay as they are."""
    import torch

    parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    total: Scores = {}
    wanted = [(p, p.requires_grad) for p in parameters.values()]
    for parameter, _ in wanted:
        parameter.requires_grad_(True)
    try:
        for batch in batches:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                value = loss(model, batch)
                value = value[0] / value[1] if isinstance(value, tuple) else value
                gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            products = {
                name: parameter.detach() * gradient
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
                if gradient is not None
            }
            for dim, values in _spread_all(products, tensors).items():
                total[dim] = total.get(dim, 0.0) + np.abs(values)
    finally:
        for parameter, before in wanted:
            parameter.requires_grad_(before)
    return total


def _spread_all(values: Mapping[str, Any], tensors: Mapping[str, Axes]) -> Scores:
    """Values of all weights, added up for each index of each dim."""
    found: Scores = {}
    for name, tensor in values.items():
        for place, axis in enumerate(tensors[name]):
            if any(not dim.why for dim in dims_of(axis)):
                others = tuple(other for other in range(tensor.ndim) if other != place)
                line = tensor.double().sum(others) if others else tensor.double()
                spread(axis, line.cpu().numpy(), found)
    return found
