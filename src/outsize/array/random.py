"""Random numbers that take no memory: `outsize.array.random.default_rng(7).normal(size=(10**6, 10**5))`.

In: a seed, a shape. Out: a lazy array. Every number is a function of the seed, the number of the call and its own place in
the array (Philox, a counter-based generator, in NumPy's implementation), so that tiles, budgets, workers and an
interrupted run that goes on do not change it. Names and bounds are those of NumPy's `Generator`; the numbers are
not, since NumPy's depend on how many were drawn before.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph.build import whole
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.store.base import Block, Region, region_shape
from outsize.array.store.formats.flat import FlatLayout, offsets
from outsize.core.errors import InputError
from outsize.core.spec import parse_shape

_STEP = 1 << 13
"""Numbers made at once: their temporaries stay in the cache."""
_TEMPORARIES = 10 * 8 * _STEP
"""Bytes that making them takes."""
_WORDS = 4
"""Words of one count of the generator."""


class Random(Node):
    """Numbers drawn by their places."""

    key: tuple[int, int]
    """What tells this draw from every other."""
    law: str
    """Name in `LAWS`."""
    bounds: tuple[int, int] = (0, 0)
    """Lowest number and how many there are, of whole numbers."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        frame.reserve(_TEMPORARIES)
        if not frame.dry and block.size:
            for index, start in offsets(FlatLayout(self.shape, np.dtype(np.uint8), 0).runs(region)):
                part: Any = (*index, ...)
                self._fill(block[part], start)
        return block

    def _fill(self, target: Block, start: int) -> None:
        """The numbers from place `start` of the flattened array on, into a block."""
        if target.ndim > 1 and not target.flags.c_contiguous:
            for number, part in enumerate(target):
                self._fill(part, start + number * part.size)
            return
        flat = target.reshape(-1)
        for low in range(0, flat.size, _STEP):
            high = min(flat.size, low + _STEP)
            first = (start + low) // 2 * 2  # laws make pairs
            words = _draw(self.key, first, start + high + (start + high) % 2)
            made = LAWS[self.law](words, self)
            flat[low:high] = made[start + low - first :][: high - low]

    def label(self) -> str:
        return f"random {self.law}"


def _draw(key: tuple[int, int], first: int, last: int) -> Block:
    """Words `first` to `last` of the generator; its first count is 1."""
    before = first % _WORDS
    generator = np.random.Philox(counter=first // _WORDS, key=np.array(key, np.uint64))
    words: Block = generator.random_raw(before + last - first)[before:]
    return words


def _even(words: Block, node: Random) -> Block:
    """Floats in [0, 1), as many bits as the dtype has."""
    bits = np.finfo(node.dtype).nmant + 1
    made: Block = np.multiply(words >> np.uint64(64 - bits), 2.0**-bits, dtype=np.float64).astype(
        node.dtype, copy=False
    )
    return made


def _normal(words: Block, node: Random) -> Block:
    """Box and Muller: a pair of words makes a pair of numbers."""
    halves = (words >> np.uint64(11)).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((halves[0::2] + 1.0) * 2.0**-53))
    angle = halves[1::2] * (2.0**-53 * 2.0 * math.pi)
    made = np.empty(words.size)
    np.multiply(radius, np.cos(angle), out=made[0::2])
    np.multiply(radius, np.sin(angle), out=made[1::2])
    return made.astype(node.dtype, copy=False)


def _whole(words: Block, node: Random) -> Block:
    """The upper half of word x count: every number as often as any other, up to one part in 2**64 / count."""
    low, count = node.bounds
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    upper, lower = np.uint64(count >> 32), np.uint64(count & 0xFFFFFFFF)
    a, b = words >> half, words & mask
    middle = a * lower + (b * lower >> half)
    found = a * upper + (middle >> half) + ((b * upper + (middle & mask)) >> half)
    if count == 1 << 64:
        found = words
    made: Block = (found + np.uint64(low % (1 << 64))).astype(node.dtype)  # modulo 2**64, which a signed dtype undoes
    return made


LAWS: dict[str, Callable[[Block, Random], Block]] = {
    "uniform": _even, "normal": _normal, "integers": _whole,
}  # fmt: skip
"""Name -> words into numbers, one word a number, pairs by pairs."""


class Generator:
    """Draws lazy arrays; each call draws other numbers."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and whole("a seed", seed) < 0:
            raise InputError(f"the seed is {seed}: seeds are whole numbers from 0 on")
        self._seeds = np.random.SeedSequence(seed)
        self._calls = itertools.count()
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"outsize.array.random.default_rng({self._seeds.entropy})"

    def _array(self, law: str, size: Any, dtype: Any, bounds: tuple[int, int] = (0, 0)) -> Array:
        shape = () if size is None else parse_shape(size)
        with self._turn:
            call = next(self._calls)
        own = np.random.SeedSequence(self._seeds.entropy, spawn_key=(call,))
        key = tuple(int(word) for word in own.generate_state(2, np.uint64))
        return Array(Random(shape=shape, dtype=np.dtype(dtype), key=(key[0], key[1]), law=law, bounds=bounds))

    def random(self, size: Any = None, dtype: Any = np.float64) -> Array:
        """Even numbers in [0, 1)."""
        return self._array("uniform", size, _float(dtype))

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Array:
        """Even numbers in [low, high)."""
        drawn: Array = low + (high - low) * self.random(_shape(size, low, high))
        return drawn

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Array:
        """Mean 0, variance 1."""
        return self._array("normal", size, _float(dtype))

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Array:
        """Mean `loc`, standard deviation `scale`."""
        drawn: Array = loc + scale * self.standard_normal(_shape(size, loc, scale))
        return drawn

    def integers(self, low: int, high: int | None = None, size: Any = None, dtype: Any = np.int64) -> Array:
        """Whole numbers from `low` up to, not including, `high`; of one number alone from 0 up to it."""
        first, last = (0, low) if high is None else (low, high)
        element = np.dtype(dtype)
        if element.kind not in "iu":
            raise InputError(f"integers draws whole numbers and {element} is no such dtype: give int64 or another one")
        kept = np.iinfo(element)
        if not kept.min <= first < last <= kept.max + 1:
            raise InputError(
                f"integers from {first} up to {last}: there is none, or {element} does not hold all of them (it holds "
                f"{kept.min} to {kept.max})"
            )
        return self._array("integers", size, element, (int(first), int(last - first)))


def _shape(size: Any, *given: Any) -> Any:
    """The shape to draw: that of the parameters where no size is given; a number for each of their elements."""
    shape = np.broadcast_shapes(*(np.shape(value) if not isinstance(value, Array) else value.shape for value in given))
    if size is None:
        return shape
    wanted = parse_shape(size)
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    if len(shape) > len(wanted) or any(n not in (1, m) for n, m in pairs):
        raise InputError(f"parameters of shape {shape} do not go into numbers of shape {wanted}")
    return wanted


def _float(dtype: Any) -> np.dtype[Any]:
    element: np.dtype[Any] = np.dtype(dtype)
    if element not in (np.float32, np.float64):
        raise InputError(f"random floats are float32 or float64, not {element}: use astype for another dtype")
    return element


def default_rng(seed: int | None = None) -> Generator:
    """A generator; without a seed one that nobody can foresee.

    >>> noise = outsize.array.random.default_rng(7).normal(size=(1000, 1000))
    """
    return Generator(seed)
