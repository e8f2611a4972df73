"""Convolutions as a Tucker product, computed in factored form: a 1x1 convolution to fewer channels, the kernel between fewer
channels, and a 1x1 convolution back.

The factors come from the factor room. The result is a plain `torch.nn.Sequential` of plain convolutions. At full rank it is equal
to the layer up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.weights import get, put

SHARES = (0.75, 0.5, 0.25)
"""Levels: bytes of the factors as a share of the layer's."""
LEAST = 8
"""Channels that a layer must have at least on either side."""


class TuckerConvolution(Method):
    """Tucker factors of convolutions."""

    name = "tucker"
    stage = Stage.FACTORS
    needs = f"convolutions without groups, of at least {LEAST} channels on either side"

    def candidates(self, subject: Subject) -> list[Candidate]:
        found = []
        for name, layer in subject.model.named_modules():
            if not name or not can_factor(layer) or min(layer.weight.shape[:2]) < LEAST:
                continue
            for share in SHARES:
                ranks = ranks_for(tuple(layer.weight.shape), share)
                if min(ranks) >= 1:
                    level = f"ranks {ranks[0]} x {ranks[1]}"
                    found.append(self.candidate(name, level, [name], replace_convolution, name=name, share=share))
        return found


def can_factor(layer: Any) -> bool:
    """True of plain convolutions without groups."""
    import torch

    return type(layer) in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d) and layer.groups == 1


def ranks_for(shape: tuple[int, ...], share: float) -> tuple[int, int]:
    """Ranks of outputs and inputs, in the same proportion to both, whose factors take this share of a kernel."""
    outputs, inputs, window = shape[0], shape[1], math.prod(shape[2:])
    if window == 1:  # one product is enough: the middle one is the identity
        rank = int(share * outputs * inputs / (outputs + inputs))
        return rank, rank
    square, linear = window * outputs * inputs, outputs**2 + inputs**2
    part = (math.sqrt(linear**2 + 4 * square * share * square) - linear) / (2 * square)
    return int(part * outputs), int(part * inputs)


def replace_convolution(model: Any, name: str, share: float) -> Any:
    """The layer as three (as two, where its kernel is 1)."""
    layer = get(model, name)
    if layer is None or not can_factor(layer):
        return model
    ranks = ranks_for(tuple(layer.weight.shape), share)
    return model if min(ranks) < 1 else put(model, layer, factor_convolution(layer, *ranks))


def factor_convolution(layer: Any, outputs: int, inputs: int) -> Any:
    """inputs -> fewer -> fewer -> outputs"""
    import torch

    from outsize.factor.decompose import decompose

    weight = layer.weight.detach()
    window = tuple(weight.shape[2:])
    form = decompose(weight.float().cpu().numpy(), "tucker", rank=(outputs, inputs, *window)).form
    core, (left, right, *rest) = form.core, form.factors
    for axis, turn in enumerate(rest, start=2):
        core = (core.swapaxes(axis, -1) @ turn.T).swapaxes(axis, -1)
    tensors = [torch.from_numpy(array).to(weight) for array in (right.T.copy(), core.copy(), left.copy())]
    inner, outer = [tensor.reshape(*tensor.shape, *[1] * len(window)) for tensor in (tensors[0], tensors[2])]
    middle = tensors[1]
    if math.prod(window) == 1 and _is_plain(layer):
        outer = (tensors[2] @ middle.flatten(1)).reshape(outer.shape[0], inner.shape[0], *window)
        return torch.nn.Sequential(_convolution(layer, inner), _convolution(layer, outer, layer.bias)).eval()
    return torch.nn.Sequential(
        _convolution(layer, inner),
        _convolution(
            layer, middle, stride=layer.stride, padding=layer.padding, dilation=layer.dilation, padding_mode=layer.padding_mode
        ),
        _convolution(layer, outer, layer.bias),
    ).eval()  # fmt: skip


def _is_plain(layer: Any) -> bool:
    """True where the window neither moves in larger steps nor pads."""
    return all(step == 1 for step in layer.stride) and layer.padding != "same" and not any(layer.padding)


def _convolution(layer: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
    import torch

    made = type(layer)(
        weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=bias is not None, device="meta", **options
    )
    made.weight = torch.nn.Parameter(weight.contiguous())
    if bias is not None:
        made.bias = bias
    return made
