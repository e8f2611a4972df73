"""NumPy's own functions, called as NumPy's users call them: by place, by old names, with options that only say how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp

A = np.random.default_rng(0).normal(size=(6, 8))
B = np.random.default_rng(1).integers(-99, 99, (6, 8)).astype("i1")
S = np.random.default_rng(2).normal(size=(3, 4, 5))

SAME: dict[str, Callable[..., Any]] = {
    "sort by place": lambda a, i, s: np.sort(a, 0),
    "sort of a kind": lambda a, i, s: np.sort(a, kind="stable"),
    "argsort by place": lambda a, i, s: np.argsort(a, 0, "stable"),
    "flip by place": lambda a, i, s: np.flip(a, 0),
    "roll by place": lambda a, i, s: np.roll(a, (1, 2), (0, 1)),
    "repeat by place": lambda a, i, s: np.repeat(a, 2, 0),
    "tril by place": lambda a, i, s: np.tril(a, 1),
    "diff by place": lambda a, i, s: np.diff(a, 1, 0),
    "tensordot by place": lambda a, i, s: np.tensordot(a, a, 2),
    "sum by place": lambda a, i, s: np.sum(a, 0, np.float64),
    "mean with nothing": lambda a, i, s: np.mean(a, 0, None, None, True),
    "var by place": lambda a, i, s: np.var(a, 0, None, None, 1),
    "clip by old names": lambda a, i, s: np.clip(a, a_min=-1, a_max=1),
    "join of all": lambda a, i, s: np.concatenate((a, a), axis=None),
    "einsum in a manner": lambda a, i, s: np.einsum("ij,kj->ik", a, a, optimize=True),
    "column norms' largest": lambda a, i, s: np.linalg.norm(a, 1),
    "spectral norm": lambda a, i, s: np.linalg.norm(a, ord=2),
    "norm of rows": lambda a, i, s: np.linalg.norm(a, 3, 1),
    "norms in two axes": lambda a, i, s: np.linalg.norm(s, axis=(2, 0), ord=np.inf, keepdims=True),
    "nuclear norm": lambda a, i, s: np.linalg.norm(a, "nuc"),
    "norm of bytes": lambda a, i, s: np.linalg.norm(i),
    "tens of whole numbers": lambda a, i, s: np.round(i, -1),
    "bounds of another kind": lambda a, i, s: np.clip(i, -1.5, 2.5),
    "a bound beyond the dtype": lambda a, i, s: np.clip(i, -3, 300),
    "close to infinity": lambda a, i, s: np.isclose(a, a / 0.0),
    "close bytes": lambda a, i, s: np.isclose(i, i + 1, atol=3),
    "one length of NumPy's": lambda a, i, s: np.reshape(a, np.int64(48)),
    "so many axes of NumPy's": lambda a, i, s: np.tensordot(a, a.T, np.int64(1)),
    "indices of any shape": lambda a, i, s: np.take(a, [[1, 2], [0, 3]], 1),
    "one index": lambda a, i, s: np.take(a, 3, 1),
    "a margin of four values": lambda a, i, s: np.pad(a, ((1, 2), (0, 3)), constant_values=((1, 2), (3, 4))),
    "a list apart from a number": lambda a, i, s: s[1, :, [0, 1]],
    "a list after dots": lambda a, i, s: s[:, 0, ..., [1, 2]],
    "a list after a new axis": lambda a, i, s: s[:, 0, None, [1, 2]],
    "a list beside a number": lambda a, i, s: s[:, 0, [1, 2]],
    "a mask apart from a number": lambda a, i, s: s[0, :, np.array([True, False, True, False, True])],
}


@pytest.mark.parametrize("name", SAME)
def test_a_call_means_what_it_means_to_numpy(name: str) -> None:
    with np.errstate(all="ignore"):
        want = np.asarray(SAME[name](A, B, S))
        got = SAME[name](*map(outsize.open, (A, B, S))).compute()
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: np.sum(x, where=A > 0),
        lambda x: np.reshape(x, 48, order="F"),
        lambda x: np.concatenate((x, x), dtype="f4"),
        lambda x: np.where(x > 0),
        lambda x: np.sort(x, axis=None),
        lambda x: xp.tensordot(x, x, axes=([0], [0, 1])),
        lambda x: xp.tensordot(x, x, axes=5),
        lambda x: xp.einsum("ij->ik", x),
        lambda x: xp.tile(x, -1),
        lambda x: xp.pad(x, -1),
        lambda x: xp.pad(x, ((1, 2, 3),)),
        lambda x: xp.diff(x, n=-1),
        lambda x: xp.expand_dims(x, axis=(0, 0)),
        lambda x: xp.swapaxes(x, 0, 5),
        lambda x: xp.arange(0, 10, 0),
        lambda x: xp.linspace(0, 1, -1),
        lambda x: np.linalg.norm(outsize.open(S), 1),
    ],
)
def test_what_has_no_rule_is_one_sentence_and_nothing_else(call: Callable[..., Any]) -> None:
    with pytest.raises(outsize.InputError, match=r"^[^\n]{20,}$"):
        call(outsize.open(A))


def test_long_ranges_have_every_whole_number() -> None:
    assert xp.arange(2**60, 2**60 + 10, 3).compute().tolist() == list(range(2**60, 2**60 + 10, 3))
    assert xp.arange(10, -(2**62), -(2**61)).shape == (3,)


def test_what_is_repeated_may_be_empty() -> None:
    assert xp.tile(outsize.open(np.zeros((0, 3))), (4, 2)).sum().compute() == 0
