"""The most that a graph of TensorFlow can hold in whatever order its operators run; TensorFlow itself is not needed."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.model.keras.executor import Order
from outsize.model.keras.graph import Node, finish
from outsize.model.keras.minimum_cut import Network
from outsize.model.keras.trace import Traced, follow


def graph(rows):
    """(type, bytes, operators that it reads) of every operator -> a step."""
    nodes = [
        Node(kind, f"{number}", None, [(each, 0) for each in reads], [], [(size,)], [1])
        for number, (kind, size, reads) in enumerate(rows)
    ]
    last = len(nodes) - 1
    return Traced("step", finish(nodes, [], [(last, 0)], list(range(len(nodes)))), [], (), 0)


def most(traced):
    return follow(traced, Order(1, in_place=False), 1, any_order=True).most


@st.composite
def steps(draw):
    rows = []
    for number in range(draw(st.integers(2, 10))):
        reads = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        rows.append((draw(st.sampled_from(["Conv2D", "Relu"])), draw(st.sampled_from([100, 100, 700])), reads))
    return graph(rows)


@settings(max_examples=60)
@given(steps(), st.integers(1, 4))
def test_no_order_and_no_number_of_threads_holds_more_than_the_most_of_all_orders(step, threads):
    found = most(step)
    for seed in range(6):
        assert follow(step, Order(threads, seed=seed), 1).peak <= found


def test_gradients_of_weights_that_wait_keep_every_activation_and_every_gradient():
    layers, size = 12, 1000
    rows = [("Conv2D", size, [])]
    rows += [("Conv2D", size, [number]) for number in range(layers)]  # forward: each reads the one before
    for layer in range(layers, 0, -1):
        above = len(rows) - 1 if layer == layers else len(rows) - 2
        rows += [("Conv2D", size, [above]), ("Conv2D", 1, [above, layer])]  # gradient of the input, of the weights
    rows.append(("Pack", 1, list(range(len(rows)))[-2 * layers + 1 :: 2]))
    step = graph(rows)
    likely = follow(step, Order(1), 1).peak
    assert likely <= (layers + 4) * size < (2 * layers - 1) * size <= most(step) <= (2 * layers + 2) * size


def test_an_operator_writes_over_its_input_only_where_no_order_lets_another_read_it_later():
    alone = graph([("Conv2D", 1000, []), ("Relu", 1000, [0])])
    shared = graph([("Conv2D", 1000, []), ("Relu", 1000, [0]), ("Conv2D", 10, [0])])
    assert most(alone) == 1000
    assert most(shared) >= 2000


@pytest.mark.parametrize("seed", range(8))
def test_a_flow_equals_the_smallest_of_all_cuts(seed):
    import random

    chance, size = random.Random(seed), 6
    edges = [(a, b, chance.randrange(9)) for a, b in itertools.permutations(range(size), 2) if chance.random() < 0.5]
    network = Network(size)
    for start, end, capacity in edges:
        network.add(start, end, capacity)
    cuts = [
        sum(capacity for start, end, capacity in edges if start in side and end not in side)
        for count in range(size - 1)
        for more in itertools.combinations(range(1, size - 1), count)
        for side in [{0, *more}]
    ]
    assert network.flow(0, size - 1) == min(cuts)
