"""Measured workspaces of convolutions, and estimates for layers that were not measured.

In: a layer. Out: bytes inside its forward call, its input's gradient and its weights' gradient. cuDNN picks a kernel
for each shape by heuristics that no short rule reproduces. So the convolutions of common networks were measured on an
H200 (cuDNN 9.19, `benchmarks/record_convolutions.py`) and stored in a file. For a layer that is not in the file the
most similar layer is used: the same buffers (a copy of the input, of the output, partial sums, ...) at the new sizes.
"""

from __future__ import annotations

import functools
import json
import lzma
import math
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, NamedTuple

from outsize.model.kernels.convolution import Layer

SMALL = 64 * 1024
"""Workspaces below this are noise."""

SUMS = 16 * 2**20
"""Partial sums beside the copies are mostly below this."""

FORMS: tuple[tuple[str, Callable[[Layer], int]], ...] = (
    ("nothing", lambda layer: 0),
    ("input, output and weights", lambda layer: layer.copies),
    ("groups filled up", lambda layer: layer.copies if layer.depthwise or layer.groups == 1 else layer.spread),
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
    """Bytes inside the three calls of a convolution; None where a call was not measured, or failed then."""

    forward: int | None
    input_gradient: int | None
    weight_gradient: int | None


Series = dict[int, Inside]
"""Batch -> what was measured, of one shape."""


Sizes = list[list[int | None]]
"""[batch, forward, input's gradient, weights' gradient] of a layer, by batch."""


def pack(found: Sizes) -> Sizes:
    """Each size as what it is more than the one before it, scaled to its batch: short numbers, which take less of a file."""
    return _from_the_last(found, -1)


def unpack(found: Sizes) -> Sizes:
    return _from_the_last(found, 1)


def _from_the_last(found: Sizes, sign: int) -> Sizes:
    rows: Sizes = []
    before: list[int | None] = [1, None, None, None]
    for given in found:
        row = given[:]
        batch, last = given[0] or 1, before[0] or 1
        for place in (1, 2, 3):
            size, earlier = given[place], before[place]
            if size is not None and earlier is not None:
                row[place] = size + sign * (earlier * batch // last)
        rows.append(row)
        before = row if sign > 0 else given
    return rows


class Table:
    """Measured layers, by shape and by kind."""

    def __init__(self, rows: list[list[Any]]) -> None:
        """`rows` are (layer, dtype, channels last, [[batch, forward, input's gradient, weights' gradient], ...])."""
        self._answers: dict[Layer, Inside | None] = {}
        self._shapes: dict[Layer, Series] = {}
        self._kinds: dict[tuple[Any, ...], list[tuple[tuple[float, ...], Layer]]] = {}
        for fields, dtype, last, found in rows:
            shape = read_layer(fields, dtype, bool(last), 1)
            if shape not in self._shapes:
                self._shapes[shape] = {}
                self._kinds.setdefault(kind_of(shape), []).append((place_of(shape), shape))
            self._shapes[shape].update({batch: Inside(*sizes) for batch, *sizes in found})

    def look_up(self, layer: Layer) -> Inside | None:
        """What is inside the three calls: as measured, or as in the most similar layer; None where there is none of its kind."""
        if layer not in self._answers:
            self._answers[layer] = self._find(layer)
        return self._answers[layer]

    def sure(self, layer: Layer) -> tuple[bool, ...]:
        """For each of the three calls, whether it was itself measured."""
        found = (self._shapes.get(layer.of(1)) or {}).get(layer.batch)
        return (False,) * 3 if found is None else tuple(size is not None for size in found)

    def _find(self, layer: Layer) -> Inside | None:
        series = self._series(layer)
        found = self._similar(layer) if series is None else at_batch(series, layer)
        if found is None and layer.dtype == "float16":
            return self._find(layer._replace(dtype="bfloat16"))
        if found is not None and series is None and layer.odd and layer.kernel == 1 and layer.plane > 64:
            # channels that fill no whole vectors are copied with their neighbours
            found = found._replace(weight_gradient=layer.input + layer.output)
        return found

    def _series(self, layer: Layer) -> Series | None:
        """What was measured for a layer's shape. In nine calls of ten float16 takes what bfloat16 takes, so each fills
        the other's gaps."""
        shape = layer.of(1)
        found = self._shapes.get(shape)
        if layer.dtype == "float16":
            other = self._shapes.get(shape._replace(dtype="bfloat16"))
            return found if other is None else {**other, **(found or {})}
        return found

    def _similar(self, layer: Layer) -> Inside | None:
        place = place_of(layer)
        rows: list[tuple[tuple[float, ...], Layer]] = next(
            (self._kinds[kind] for kind in near_kinds(layer) if kind in self._kinds), []
        )
        near = min(rows, key=lambda row: _distance(row[0], place), default=None)
        if near is None:
            return None
        source = near[1].of(layer.batch)
        sizes = at_batch(self._shapes[near[1]], source)
        return Inside(*(None if size is None else transfer(size, source, layer) for size in sizes))


def read_layer(fields: list[Any], dtype: str, last: bool, batch: int) -> Layer:
    """A layer of the file: [channels, axes, filters, kernel, stride, padding, dilation, groups], the middle ones lists."""
    channels, axes, filters, kernel, stride, padding, dilation, groups = fields
    element = 4 if dtype == "float32" else 2
    steps = zip(axes, kernel, stride, padding, dilation, strict=True)
    out = math.prod((a + 2 * p - d * (k - 1) - 1) // s + 1 for a, k, s, p, d in steps)
    plane, size = math.prod(axes), math.prod(kernel)
    return Layer(
        batch, channels, size, max(stride), groups, element, element * batch * channels * plane, element * batch * filters * out,
        element * filters * channels // groups * size, plane, last, dtype, max(dilation), len(axes),
    )  # fmt: skip


def at_batch(series: Series, layer: Layer) -> Inside:
    """What the calls of a layer take, if other batch sizes of its shape were measured."""
    known = sorted(series)
    return Inside(*(_between({n: series[n][call] for n in known}, layer) for call in range(3)))


def _between(sizes: dict[int, int | None], layer: Layer) -> int | None:
    """One call. The workspace of one kernel grows linearly with the batch, but another batch size may use another
    kernel."""
    known, batch = {n: size for n, size in sizes.items() if size is not None}, layer.batch
    if not known or batch in known:
        return known.get(batch)
    below = max((n for n in known if n < batch), default=None)
    above = min((n for n in known if n > batch), default=None)
    if below is None or above is None:
        near = max(known) if above is None else min(known)
        return max(0, _extended(known, near, layer))
    first, last = known[below], known[above]
    if same_kernel(below, first, above, last):
        return first + (last - first) * (batch - below) // (above - below)
    return _extended(known, below if batch * batch < below * above else above, layer)


def same_kernel(n: int, size: int, more: int, larger: int) -> bool:
    """True where two workspaces of one shape look like one kernel's: both the same, or in proportion to the batch."""
    room = max(2**20, max(size, larger) // 50)
    return abs(larger - size) < 2**19 or abs(larger * n - size * more) <= room * more


def _extended(known: dict[int, int], near: int, layer: Layer) -> int:
    """The workspace if the kernel is that of a nearby batch size; interpolated if two sizes of this kernel are
    known."""
    size, batch = known[near], layer.batch
    others = sorted((n for n in known if n != near), key=lambda n: ((n > batch) != (near > batch), abs(n - near)))
    for other in others:
        if size > SMALL and known[other] > SMALL and same_kernel(*sorted_pair(near, size, other, known[other])):
            return size + (known[other] - size) * (batch - near) // (other - near)
    return transfer(size, layer.of(near), layer)


def sorted_pair(n: int, size: int, other: int, beside: int) -> tuple[int, int, int, int]:
    """Two measured points, the smaller batch first."""
    return (n, size, other, beside) if n < other else (other, beside, n, size)


def near_kinds(layer: Layer) -> Iterator[tuple[Any, ...]]:
    """The kind of a layer, then kinds that differ in ever more."""
    axes, *rest, wide, odd = kind_of(layer)
    for other in (axes, *(n for n in (2, 3, 1) if n != axes)):
        for spread in (wide, not wide):
            for uneven in (odd, not odd):
                yield (other, *rest, spread, uneven)


def kind_of(layer: Layer) -> tuple[Any, ...]:
    """Layers are compared within a kind only."""
    groups = "one" if layer.groups == 1 else ("each" if layer.depthwise else "some")
    form = layer.axes, layer.dtype, layer.last, layer.kernel == 1, layer.stride > 1
    return (*form, groups, layer.channels <= 4, layer.dilation > 1, layer.odd)


def place_of(layer: Layer) -> tuple[float, ...]:
    """A layer's position among those of its kind, to find the most similar one."""
    filters = layer.weight * layer.groups // (layer.element * layer.channels * layer.kernel)
    sizes = (layer.channels, filters, layer.plane, layer.kernel, layer.channels // layer.groups)
    return tuple(math.log2(size) for size in sizes)


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum(weight * abs(x - y) for weight, x, y in zip((1.0, 1.0, 1.0, 2.0, 1.0), a, b, strict=True))


def transfer(size: int, source: Layer, target: Layer) -> int:
    """The workspace of `target` if it is made as the one of `source`, which has `size` bytes."""
    for _, form in FORMS:
        base = form(source)
        if 0 <= size - base <= max(SMALL, base // 500):
            return form(target) + (size - base if base else 0)
    above = [form for form in (FORMS[2][1], FORMS[1][1]) if form(source) <= size]
    if above and size - above[0](source) <= SUMS:
        return above[0](target) + size - above[0](source)
    return round(size / source.copies * target.copies)


@functools.cache
def table() -> Table:
    """The measured layers that come with the package."""
    with (
        resources.files("outsize.model.kernels").joinpath("convolutions_h200.json.xz").open("rb") as raw,
        lzma.open(raw, "rt") as file,
    ):
        return Table([[*layer, unpack(found)] for *layer, found in json.load(file)])
