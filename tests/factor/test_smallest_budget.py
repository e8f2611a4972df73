"""The smallest budget that is named: the same whatever was asked, working when it is given back, clear in what it supposes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from test_decompose import low_rank, true_error

import outsize
from outsize.array.tuning import Tuning, use
from outsize.core.units import format_bytes, parse_bytes
from outsize.factor.algorithms.smallest import round_budget

STREAMED = replace(Tuning(), small=0)


def climb(x: np.ndarray, method: str, budget: int, **wish: Any) -> tuple[Any, list[tuple[int, bool]]]:
    """(what was made, or None where the data are refused; each smallest budget that was named, and whether it supposes)."""
    named: list[tuple[int, bool]] = []
    while True:
        try:
            return outsize.decompose(x, method, budget=budget, **wish), named
        except outsize.BudgetError as refused:
            assert refused.smallest is not None and refused.smallest > budget, "it never gets smaller"
            assert format_bytes(refused.smallest) in str(refused)
            named.append((refused.smallest, "supposes" in str(refused)))
            assert len(named) <= 8
            budget = refused.smallest
        except outsize.InputError:
            return None, named


@examples(40, derandomize=True)
@given(
    shape=st.lists(st.integers(4, 40), min_size=2, max_size=4).map(tuple), rank=st.integers(1, 8),
    noise=st.sampled_from([0.0, 1e-4, 1e-2]), dtype=st.sampled_from(["f4", "f8", "i2", "c8"]),
    method=st.sampled_from(["tucker", "tt", "svd", "auto"]), asked=st.sampled_from([0.3, 0.01, 1e-4, 3, 9]),
    seed=st.integers(0, 99), budget=st.sampled_from([1000, 100_000, 300_000]),
)  # fmt: skip
def test_given_back_it_works_or_leads_to_one_that_does(
    shape: Any, rank: int, noise: float, dtype: str, method: str, asked: float, seed: int, budget: int
) -> None:
    shape = shape if np.prod(shape) <= 100_000 else shape[:3]
    x = low_rank(shape[:2] if method == "svd" else shape, rank, noise, dtype, seed)
    given_ranks = isinstance(asked, int) and method != "auto"
    wish = {"rank": asked} if given_ranks else {"error": min(asked, 0.3)}
    with use(STREAMED):
        made, named = climb(x, method, budget, **wish)
    assert len(named) <= (1 if given_ranks else 3), "ranks that are given leave nothing to suppose; else two more steps"
    assert all(supposes for _, supposes in named[:-1]), "what supposes nothing works"
    if made is not None:
        assert true_error(made, x) <= made.error
        assert not named or made.facts.plan.peak() <= named[-1][0]


@pytest.mark.parametrize("method", ["tucker", "tt", "auto", "cp", "svd", "zfp", "float16"])
@pytest.mark.parametrize("rank", [None, 5])
def test_plans_and_errors_name_the_same_whatever_budget_was_asked(method: str, rank: int | None) -> None:
    pytest.importorskip({"cp": "tensorly", "zfp": "zfpy"}.get(method, "numpy"))
    if rank is not None and method in ("auto", "zfp", "float16"):
        pytest.skip("has no ranks")
    x = low_rank((200, 90) if method == "svd" else (60, 50, 40), 4, 1e-3, "f4")
    wish: dict[str, Any] = {"rank": rank} if rank else {"error": 0.05}
    plans = [
        outsize.decompose(x, method, budget=size, dry_run=True, **wish) for size in ("64KiB", "1MiB", "32MiB", "4GiB")
    ]
    (smallest,) = {plan.smallest for plan in plans}
    assert all(
        plan.fits == (size >= plan.smallest)
        for plan, size in zip(plans, (1 << 16, 1 << 20, 1 << 25, 1 << 32), strict=True)
    )
    if smallest > 64 << 10:
        with pytest.raises(outsize.BudgetError) as refused:
            outsize.decompose(x, method, budget=20_000, **wish)
        assert refused.value.smallest == smallest
    if rank is not None:
        assert outsize.decompose(x, method, budget=smallest, **wish).facts.plan.peak() <= smallest
        if smallest > 64 << 10:
            with pytest.raises(outsize.BudgetError):
                outsize.decompose(x, method, budget=int(smallest / 1.5), **wish)


def test_what_is_supposed_and_what_is_enough_for_any_ranks_are_told_apart() -> None:
    noise = np.random.default_rng(0).standard_normal((60, 50, 40)).astype("f4")
    with use(STREAMED), pytest.raises(outsize.BudgetError) as refused:
        outsize.decompose(noise, "tucker", 0.01, budget="64KiB")
    told = str(refused.value)
    assert "supposes ranks of an eighth of each length" in told
    enough = parse_bytes(told.partition("of each length; ")[2].partition(" is enough whatever")[0])
    with use(STREAMED):
        for x in (noise, low_rank((60, 50, 40), 30, 0.01, "f4")):
            for error in (0.5, 0.3, 0.1, 0.01):
                made = outsize.decompose(x, "tucker", error, budget=enough)
                assert true_error(made, x) <= made.error <= error and made.facts.plan.peak() <= enough


@pytest.mark.parametrize("size", [1, 1000, 1025, 999 * 1024 + 1, 1 << 20, 12_345_678, 10**9 + 7, 3 * 10**12 + 1])
def test_a_budget_reads_the_same_when_it_is_printed(size: int) -> None:
    rounded = round_budget(size)
    assert size <= rounded <= max(1024, 1.03 * size) and parse_bytes(format_bytes(rounded)) == rounded
