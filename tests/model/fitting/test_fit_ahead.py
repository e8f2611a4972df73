"""Copies of saved tensors that come back before they are asked for."""

import itertools

import streams as pretended
import torch
from effort import examples
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from storages import Storages
from torch.utils._python_dispatch import _disable_current_modes

from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.stores import HostStore, NoStore, Store
from outsize.model.fitting.run.offload import Offload


class Link(Mover):
    """Copies in are numbered; what is computed waits for some of them."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.begun, self.waited = [], []

    def bring(self, into, source, after=()):
        super().bring(into, source, after)
        self.begun.append(len(self.begun) + 1)
        return self.begun[-1]

    def wait(self, mark):
        if mark is not None:
            self.waited.append(mark)


class Near(Store):
    def _make(self, size):
        return torch.empty(size, dtype=torch.uint8)


def test_what_is_computed_waits_for_the_tensor_that_it_asked_for_and_not_for_the_one_that_comes_after_it():
    link = Link()
    away = Offload(Near(link), ahead=True, device="cpu")
    tensors = [torch.full((100,), float(number)) for number in range(6)]
    kept = [away.keep(tensor) for tensor in tensors]
    for number in reversed(range(6)):
        assert torch.equal(away.bring(kept[number]), tensors[number])
        asked = 6 - number
        assert link.waited[-1] == asked
        assert len(link.begun) == min(6, asked + 1)
        kept.pop()
    assert link.waited == [1, 2, 3, 4, 5, 6]


def bytes_over_time(store, sizes, asks, device):
    """Bytes held after each allocation and release, while saved tensors come back in this order and some stay in use."""
    away, counted, used = Offload(store, ahead=True, device="cpu"), Storages(), []
    made = [torch.full((size,), float(number), device=device) for number, size in enumerate(sizes)]
    kept = [away.keep(tensor) for tensor in made]
    store.land()
    made.clear()
    with counted.counting():
        for which, stays in asks:
            number = which % len(kept)
            if kept[number] is None:
                continue
            tensor = away.bring(kept[number])
            with _disable_current_modes():
                assert device == "meta" or bool((tensor == number).all())
            used = [*used, tensor] if stays else [tensor]
            del tensor
            if not stays:
                kept[number] = None
        used.clear()
    store.close()
    return list(itertools.accumulate(held.bytes if new else -held.bytes for new, held in counted.ledger.events))


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from((1, 7, 100, 5_000, 200_000)), min_size=1, max_size=12),
    asks=st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=30),
    backwards=st.booleans(),
    eager=st.sampled_from((0.0, 0.3)),
    seed=st.integers(0, 99),
)
@example(sizes=[1, 7, 1, 7], asks=[(0, True), (2, True), (0, False)], backwards=False, eager=0.0, seed=0)
def test_a_trace_holds_what_a_card_does_however_late_copies_are_and_in_whatever_order_tensors_are_asked_for(
    monkeypatch, sizes, asks, backwards, eager, seed
):
    if backwards:
        asks = [*((number, False) for number in reversed(range(len(sizes)))), *asks]
    projected = bytes_over_time(NoStore(2**30), sizes, asks, "meta")
    with pretended.installed(monkeypatch, pretended.Streams(seed, eager)):
        held = bytes_over_time(HostStore(torch.device("cpu")), sizes, asks, "cpu")
    assert held == projected
