"""Graphs of any depth and of any sharing: planned and run at a cost that grows with the graph, inside the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from effort import long

import outsize
import outsize.array as xp
from outsize.array.feed.source import DataSource
from outsize.array.graph.barrier import Settled
from outsize.array.graph.node import walk
from outsize.array.graph.settle import settle

Loop = Callable[[Any, int], Any]
X = np.random.default_rng(5).random((60, 50))


def chain(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = v * 0.5 + X
    return v


def squares(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = v * 0.5 + v * v * 0.1
    return v


def doubles(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = v + v
    return v


def stencil(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = (np.roll(v, 1, axis=0) + np.roll(v, -1, axis=0) + np.roll(v, 1, axis=1) + np.roll(v, -1, axis=1)) * 0.25 + v
    return v


def means(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = v - v.mean(axis=0) * 0.5
    return v


def rolls(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = np.roll(v, 3, axis=0)
    return v


def joins(v: Any, rounds: int) -> Any:
    for _ in range(rounds):
        v = np.concatenate([v[1:], v[:1] * 0.5])
    return v


@pytest.mark.parametrize(
    ("loop", "rounds"),
    [
        (chain, 500),
        (chain, 20_000 if long() else 4_000),
        (squares, 40),
        (doubles, 60),
        (stencil, 12),
        (means, 60),
        (rolls, 80),
        (joins, 60),
    ],
)
def test_a_loop_of_any_length_gives_numpys_values_inside_its_plan(loop: Loop, rounds: int) -> None:
    lazy = loop(outsize.open(X), rounds)
    plan = lazy.plan("4MiB")
    assert plan.fits
    np.testing.assert_allclose(lazy.compute("4MiB"), loop(X, rounds), rtol=1e-11)


def test_what_is_made_grows_with_the_graph_and_no_faster() -> None:
    def passes(rounds: int) -> int:
        return len(stencil(outsize.open(X), rounds).plan("4MiB").steps)

    few, many = passes(8), passes(16)
    assert 2 * few - 2 <= many <= 2 * few + 2


def test_a_value_with_few_readers_is_not_written_out() -> None:
    x = outsize.open(X)
    twice = xp.sin(x)
    graph = (twice[1:] - twice[:-1]).node
    assert settle(graph) is graph
    assert not any(isinstance(node, Settled) for node in walk(settle((x - x.mean(axis=0)).node)))


def test_reductions_that_share_a_pass_do_not_write_out_what_they_read() -> None:
    y = xp.sin(outsize.open(X))
    both = y.sum() + y.mean() + y.min() + y.max() + y.var() + y.std()
    assert len(both.plan("4MiB").steps) == 2


def test_repr_of_a_deep_graph_is_short() -> None:
    deep = chain(outsize.open(X), 3000)
    assert len(repr(deep)) < 200
    assert len(repr(deep.node)) < 500


def test_rows_of_a_value_that_has_to_be_written_out_are_refused_with_a_way_out() -> None:
    with pytest.raises(outsize.InputError, match="save it first"):
        DataSource(rolls(outsize.open(X), 80))
