"""What cuDNN takes inside a convolution.

In: the shapes, strides, groups, dtype and memory format of a convolution. Out: bytes of its workspaces, as a likely value and as a
bound. Read off 2,592 recorded convolutions on an H200 (cuDNN 9.19): a kernel that wants another layout copies input, output and
weights into it; 1x1 kernels and depthwise ones mostly read what is there; a weight gradient keeps partial sums in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MiB = 2**20

SPLIT = {4: 5 * MiB, 2: 2 * MiB}
"""Partial sums of a weight gradient beside the copies, by element size: the median of those recorded."""

SPLIT_BOUND = 17 * MiB
"""Above 97 % of the recorded partial sums; the rest had inputs of a few MiB."""


class Layer(NamedTuple):
    """One convolution, whatever its direction."""

    batch: int
    channels: int
    kernel: int
    """Elements of one filter plane."""
    stride: int
    groups: int
    element: int
    input: int
    """Bytes."""
    output: int
    weight: int
    last: bool
    """Channels last in memory."""

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels

    @property
    def copies(self) -> int:
        """Input, output and weights in another layout."""
        return self.input + self.output + self.weight


def layer_of(x: Any, weight: Any, output: Any, stride: Any, groups: int) -> Layer:
    """A layer from its tensors."""
    size = x.element_size()
    strides = x.stride()
    last = x.dim() > 3 and strides[1] == 1 and x.shape[1] > 1 and not x.is_contiguous()
    return Layer(
        x.shape[0], x.shape[1], math.prod(weight.shape[2:]), max(stride), groups, size, x.numel() * size,
        math.prod(output) * size, weight.numel() * size, last,
    )  # fmt: skip


def forward(layer: Layer, bound: bool) -> int:
    """Workspace of the forward convolution."""
    if layer.depthwise:
        return 0
    if bound:
        return 0 if layer.last and layer.kernel > 1 else layer.copies
    if layer.last or layer.channels <= 4:
        return 0
    if layer.kernel == 1:
        return layer.input + layer.output if layer.stride > 1 else 0
    return layer.copies


def input_gradient(layer: Layer, bound: bool) -> int:
    """Workspace of the gradient with respect to the input."""
    return forward(layer, bound)


def weight_gradient(layer: Layer, bound: bool) -> int:
    """Workspace of the gradient with respect to the weights."""
    if layer.depthwise:
        return 0
    sums = layer.batch * layer.weight * 4 // layer.element
    if layer.kernel == 1 and layer.stride == 1:
        return max(sums, layer.copies) if bound and sums < 2 * layer.copies else min(sums, layer.input + layer.output)
    if bound:
        return layer.copies + SPLIT_BOUND
    if layer.last:
        return min(sums, SPLIT[2])
    if layer.channels <= 4 and layer.element == 4:
        return 0
    if layer.kernel == 1:
        return layer.input + layer.output
    return layer.copies + min(SPLIT.get(layer.element, 0), 64 * layer.weight)
