"""Convolution workspaces that were measured, and what they say about layers that were not.

In: a layer. Out: bytes inside its forward call, its input's gradient and its weights' gradient. cuDNN picks a kernel per shape by
its own heuristics, which no short rule reproduces; so the convolutions of the common networks were measured on an H200 (cuDNN
9.19, `benchmarks/record_convolutions.py`) and are kept in a file. A layer in the file is answered from it; any other one takes
the same buffers (a copy of the input, of the output, partial sums, ...) as the most similar layer in the file.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

from outsize.model.convolution import Layer

SMALL = 64 * 1024
"""Workspaces below this are noise."""

FORMS: tuple[tuple[str, Callable[[Layer], int]], ...] = (
    ("nothing", lambda layer: 0),
    ("input, output and weights", lambda layer: layer.copies),
    ("input and weights", lambda layer: layer.copies - layer.output),
    ("input and output", lambda layer: layer.input + layer.output),
    ("output and weights", lambda layer: layer.output + layer.weight),
    ("a sum for every image", lambda layer: layer.sums),
    ("input", lambda layer: layer.input),
    ("output", lambda layer: layer.output),
    ("weights", lambda layer: layer.weight),
)
"""What a workspace is made of."""


class Inside(NamedTuple):
    """Bytes inside the three calls of a convolution; None where a call failed when measured."""

    forward: int | None
    input_gradient: int | None
    weight_gradient: int | None


class Table:
    """Measured layers, by exact shape and by kind."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self.exact: dict[Layer, Inside] = {}
        self._answers: dict[Layer, Inside | None] = {}
        self._kinds: dict[tuple[Any, ...], list[tuple[tuple[float, ...], Layer, Inside]]] = {}
        for dtype, last, n, c, h, w, k, kh, kw, stride, pad, dilation, groups, *found in rows:
            element = 4 if dtype == "float32" else 2
            pads = (pad, pad) if kh == kw else ((kh - 1) // 2, (kw - 1) // 2)
            ho = (h + 2 * pads[0] - dilation * (kh - 1) - 1) // stride + 1
            wo = (w + 2 * pads[1] - dilation * (kw - 1) - 1) // stride + 1
            layer = Layer(
                n, c, kh * kw, stride, groups, element, element * n * c * h * w, element * n * k * ho * wo,
                element * k * c // groups * kh * kw, h * w, bool(last), dtype,
            )  # fmt: skip
            inside = Inside(*found)
            self.exact[layer] = inside
            self._kinds.setdefault(kind_of(layer), []).append((place_of(layer), layer, inside))

    def look_up(self, layer: Layer) -> Inside | None:
        """What is inside the three calls: as measured, or as in the most similar layer; None where there is none of its kind."""
        if layer not in self._answers:
            self._answers[layer] = self._find(layer)
        return self._answers[layer]

    def _find(self, layer: Layer) -> Inside | None:
        found = self.exact.get(layer) or self._similar(layer)
        if found is None and layer.dtype == "float16":
            return self._find(layer._replace(dtype="bfloat16"))
        if found is not None and layer not in self.exact and layer.odd and layer.kernel == 1 and layer.plane > 64:
            # channels that fill no whole vectors are copied with their neighbours
            found = found._replace(weight_gradient=layer.input + layer.output)
        return found

    def _similar(self, layer: Layer) -> Inside | None:
        place = place_of(layer)
        rows = self._kinds.get(kind_of(layer)) or self._kinds.get((*kind_of(layer)[:-1], not layer.odd), [])
        near = min(rows, key=lambda row: _distance(row[0], place), default=None)
        if near is None:
            return None
        return Inside(*(None if size is None else transfer(size, near[1], layer) for size in near[2]))


def kind_of(layer: Layer) -> tuple[Any, ...]:
    """Layers are compared within a kind only."""
    groups = "one" if layer.groups == 1 else ("each" if layer.depthwise else "some")
    return layer.dtype, layer.last, layer.kernel == 1, layer.stride > 1, groups, layer.channels <= 4, layer.odd


def place_of(layer: Layer) -> tuple[float, ...]:
    """Where a layer lies among those of its kind."""
    filters = layer.weight * layer.groups // (layer.element * layer.channels * layer.kernel)
    sizes = (layer.batch, layer.channels, filters, layer.plane, layer.kernel, layer.channels // layer.groups)
    return tuple(math.log2(size) for size in sizes)


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum(weight * abs(x - y) for weight, x, y in zip((0.5, 1.0, 1.0, 1.0, 2.0, 1.0), a, b, strict=True))


def transfer(size: int, source: Layer, target: Layer) -> int:
    """The workspace of `target` if it is made as the one of `source`, which has `size` bytes."""
    for _, form in FORMS:
        base = form(source)
        if 0 <= size - base <= max(SMALL, base // 500):
            return form(target) + (size - base if base else 0)
    if size > source.copies:
        return target.copies + min(size - source.copies, 16 * 2**20)
    return round(size / source.copies * target.copies)


@functools.cache
def table() -> Table:
    """The measured layers that come with the package."""
    with (
        resources.files("outsize.model").joinpath("convolutions_h200.json.gz").open("rb") as raw,
        gzip.open(raw, "rt") as file,
    ):
        return Table(json.load(file))
