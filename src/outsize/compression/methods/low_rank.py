"""`Linear` layers as a product of two thin ones, which compute in factored form: inputs -> rank -> outputs.

The factors are the best for the outputs on the user's data, not for the weights (`moments.py`). The result is a plain
`torch.nn.Sequential` of two `torch.nn.Linear`. At full rank it is equal to the layer up to rounding.
"""

from __future__ import annotations

import functools
from typing import Any

from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.moments import input_moments, roots_of
from outsize.compression.weights import put
from outsize.model.torch_port.objects import parameter_table

SHARES = (0.75, 0.5, 0.25)
"""Levels: bytes of the factors as a share of the layer's."""
LEAST = 16
"""Inputs and outputs that a layer must have at least: below that factors save nothing worth a second layer."""


class LowRank(Method):
    """Low-rank factors of `Linear` layers."""

    name = "low-rank"
    stage = Stage.FACTORS
    fitted = True
    needs = f"Linear layers of at least {LEAST} inputs and outputs whose weights are not shared"

    def candidates(self, subject: Subject) -> list[Candidate]:
        layers = {
            name: layer for name, layer in find_linear(subject.model).items() if min(matrix_of(layer).shape) >= LEAST
        }
        moments = input_moments(subject, {name: matrix_of(layer).shape[1] for name, layer in layers.items()})
        found = []
        for name, layer in layers.items():
            weight = matrix_of(layer)
            cut = Cut(weight, rank_for(weight.shape, SHARES[0]), moments.get(name))
            for rank in dict.fromkeys(rank_for(weight.shape, share) for share in SHARES):
                found.append(
                    self.candidate(name, f"rank {rank}", [name], replace_linear, name=name, rank=rank, cut=cut)
                )
        return found


def rank_for(shape: tuple[int, int], share: float) -> int:
    """The rank whose factors take this share of a matrix."""
    return max(1, int(share * shape[0] * shape[1] / (shape[0] + shape[1])))


class Cut:
    """Factors of one weight, found when they are first needed; those of a lower rank are their first columns."""

    def __init__(self, weight: Any, rank: int, moments: Any) -> None:
        self.weight = weight
        self._make = functools.cache(functools.partial(factor, weight, rank, moments))

    def at(self, rank: int) -> tuple[Any, Any]:
        left, right = self._make()
        return left[:, :rank], right[:rank]


def find_linear(model: Any) -> dict[str, Any]:
    """`Linear` layers whose weights are not shared, and the `Conv1D` of transformers, which is one with its weight turned."""
    import torch

    uses: dict[int, int] = {}
    for module in model.modules():
        for tensor in parameter_table(module).values():
            uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if name and (type(module) is torch.nn.Linear or _is_turned(module)) and uses[id(module.weight)] == 1
    }


def _is_turned(module: Any) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def matrix_of(layer: Any) -> Any:
    """outputs x inputs"""
    return layer.weight.detach().T if _is_turned(layer) else layer.weight.detach()


def factor(weight: Any, rank: int, moments: Any = None) -> tuple[Any, Any]:
    """(outputs x rank, rank x inputs), whose product is nearest to the weight on inputs with these moments."""
    import torch

    matrix = weight.double()
    root, inverse = (None, None) if moments is None else roots_of(moments)
    left, values, right = torch.linalg.svd(matrix if root is None else matrix @ root, full_matrices=False)
    half = values[:rank].sqrt()
    tail = half[:, None] * right[:rank]
    return (left[:, :rank] * half).to(weight.dtype), (tail if inverse is None else tail @ inverse).to(weight.dtype)


def replace_linear(model: Any, name: str, rank: int, cut: Cut) -> Any:
    """The layer as two. One that an earlier stage made smaller is cut by its own weights, to the same share."""
    layer = find_linear(model).get(name)
    if layer is None:
        return model
    weight = matrix_of(layer)
    if weight.shape == cut.weight.shape:
        left, right = cut.at(rank)
    else:
        share = rank * sum(cut.weight.shape) / cut.weight.numel()
        left, right = factor(weight, rank_for(weight.shape, share))
    return put(model, layer, linear_chain(right, left, layer.bias))


def linear_chain(first: Any, second: Any, bias: Any) -> Any:
    """inputs -> rank -> outputs"""
    import torch

    chain = torch.nn.Sequential(
        torch.nn.Linear(first.shape[1], first.shape[0], bias=False, device="meta"),
        torch.nn.Linear(second.shape[1], second.shape[0], bias=bias is not None, device="meta"),
    )
    chain[0].weight = torch.nn.Parameter(first.clone(memory_format=torch.contiguous_format))
    chain[1].weight = torch.nn.Parameter(second.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        chain[1].bias = bias
    return chain.eval()
