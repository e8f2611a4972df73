"""A convolution as cuDNN sees it, and the most memory it may take during a call.

In: the tensors of a convolution. Out: a `Layer`, and for each of its three calls a bound on the workspace. A kernel that wants
another memory layout copies input, output and weights into it; a weight gradient keeps partial sums in float32, at worst one for
every image. `measured` has what layers really take.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MiB = 2**20

SPLIT = 17 * MiB
"""Partial sums beside the copies: a kernel splits its last tiles over all processors, 128 KiB each."""


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
    plane: int
    """Elements of one input plane."""
    last: bool
    """Channels last in memory."""
    dtype: str
    """`float32`, `bfloat16`, `float16`."""
    dilation: int = 1
    axes: int = 2
    """One for sound, two for pictures, three for volumes."""

    def of(self, batch: int) -> Layer:
        """The same layer with another batch."""
        each = self._replace(batch=batch)
        return each._replace(input=self.input // self.batch * batch, output=self.output // self.batch * batch)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels

    @property
    def copies(self) -> int:
        """Input, output and weights in another layout, the channels filled up to a multiple of 16 bytes."""
        step = 16 // self.element
        full = -(-self.channels // step) * step if self.groups == 1 else self.channels
        return (self.input + self.weight) * full // self.channels + self.output

    @property
    def spread(self) -> int:
        """Copies where every group's channels are filled up to a power of two."""
        filters = self.weight * self.groups // (self.element * self.channels * self.kernel)
        wide, deep = self.channels // self.groups, max(1, filters // self.groups)
        full, filled = 1 << (wide - 1).bit_length(), 1 << (deep - 1).bit_length()
        weights = self.groups * full * filled * self.kernel * self.element
        return self.input * full // wide + self.output * filled // deep + weights

    @property
    def odd(self) -> bool:
        """True if a filter's bytes, over its output channels, are not a multiple of 16: kernels on whole vectors
        cannot be used."""
        return bool(self.weight // (self.channels * self.kernel) % 16 or self.channels * self.element % 16)

    @property
    def sums(self) -> int:
        """The weights' gradient in float32, once for every image."""
        return self.batch * self.weight * 4 // self.element


def layer_of(x: Any, weight: Any, output: Any, stride: Any, dilation: Any, groups: int, last: bool) -> Layer:
    size = x.element_size()
    return Layer(
        x.shape[0], x.shape[1], math.prod(weight.shape[2:]), max(stride), groups, size, x.numel() * size,
        math.prod(output) * size, weight.numel() * size, math.prod(x.shape[2:]),
        last, str(x.dtype).removeprefix("torch."), max(dilation), x.dim() - 2,
    )  # fmt: skip


def _padded(layer: Layer) -> int:
    """Copies, groups filled up where there are several."""
    return layer.copies if layer.groups == 1 else max(layer.copies, layer.spread)


def call_bound(layer: Layer) -> int:
    """Most that the forward call, or the input's gradient, takes: above 99.7 % of those measured."""
    return 0 if layer.depthwise else _padded(layer) + SPLIT


def weight_bound(layer: Layer) -> int:
    """Most that the weights' gradient takes: above 97 % of those measured."""
    if layer.depthwise:
        return layer.copies + SPLIT if layer.last else MiB
    if layer.kernel == 1 and layer.stride == 1:
        both = layer.input + layer.output
        return (max(layer.sums, both) if layer.sums <= 6 * both else 2 * both) + SPLIT
    return _padded(layer) + SPLIT
