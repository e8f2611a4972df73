"""Random factors of every format, and the tensors they stand for, made with nothing but NumPy's einsum."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from outsize.factor.formats import Canonical, Factors, Svd, Train, Tucker

DTYPES = ("float32", "float64", "complex64", "complex128")


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    found = rng.standard_normal(shape)
    return (found + 1j * rng.standard_normal(shape) if dtype.startswith("c") else found).astype(dtype)


def make(method: str, shape: tuple[int, ...], ranks: tuple[int, ...], dtype: str, seed: int = 0) -> Factors:
    """Factors with random elements; `ranks` has as many as modes, of which a format takes what it needs."""
    rng = np.random.default_rng(seed)
    if method == "svd":
        rank = min(ranks[0], *shape[:2])
        u = np.linalg.qr(draw_array(rng, (shape[0], rank), dtype))[0]
        vh = np.linalg.qr(draw_array(rng, (shape[1], rank), dtype))[0].conj().T
        return Svd(
            u.astype(dtype),
            np.sort(rng.random(rank) + 0.1)[::-1].astype(np.empty(0, dtype).real.dtype),
            vh.astype(dtype),
        )
    if method == "cp":
        return Canonical(
            draw_array(rng, ranks[:1], dtype), tuple(draw_array(rng, (length, ranks[0]), dtype) for length in shape)
        )
    if method == "tt":
        ends = [1, *ranks[: len(shape) - 1], 1]
        return Train(tuple(draw_array(rng, (ends[k], length, ends[k + 1]), dtype) for k, length in enumerate(shape)))
    factors = tuple(draw_array(rng, (length, rank), dtype) for length, rank in zip(shape, ranks, strict=True))
    return Tucker(draw_array(rng, ranks, dtype), factors)


def dense(form: Factors) -> Any:
    """The tensor, in double precision."""
    high = np.complex128 if form.dtype.kind == "c" else np.float64
    if isinstance(form, Svd):
        return (form.u.astype(high) * form.s) @ form.vh.astype(high)
    if isinstance(form, Canonical):
        made = form.weights.astype(high)
        for factor in form.factors:
            made = made[..., None, :] * factor.astype(high)
        return made.sum(-1)
    if isinstance(form, Train):
        made = np.ones((1,), high)
        for core in form.cores:
            made = np.tensordot(made, core.astype(high), axes=1)
        return made[..., 0]
    assert isinstance(form, Tucker)
    made = form.core.astype(high)
    for factor in form.factors:
        made = np.tensordot(made, factor.astype(high), axes=(0, 1))
    return made


def close(found: Any, wanted: Any, dtype: Any, scale: float | None = None) -> None:
    """Equal up to rounding in a dtype, relative to the largest element."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    if wanted.size:
        eps = float(np.finfo(dtype).eps)
        most = max(float(np.abs(wanted).max()), 1e-300) if scale is None else scale
        assert np.abs(found - wanted).max() <= 500 * eps * most, (np.abs(found - wanted).max(), most)


@st.composite
def factors(draw: Any, *methods: str) -> Factors:
    """Factors of any format, shape, ranks and dtype."""
    method = draw(st.sampled_from(methods or ("tucker", "tt", "cp", "svd")))
    modes = 2 if method == "svd" else draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=modes, max_size=modes)))
    ranks = tuple(draw(st.lists(st.integers(1, 4), min_size=modes, max_size=modes)))
    return make(method, shape, ranks, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
