"""Copies of saved tensors that come back before they are asked for."""

import torch

from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.stores import Store
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


def test_what_is_computed_waits_for_the_tensor_that_it_asked_for_and_not_for_those_that_come_after_it():
    link = Link()
    away = Offload(Near(link), ahead=True, device="cpu")
    tensors = [torch.full((100,), float(number)) for number in range(6)]
    kept = [away.keep(tensor) for tensor in tensors]
    for number in reversed(range(6)):
        assert torch.equal(away.bring(kept[number]), tensors[number])
        asked = 6 - number
        assert link.waited[-1] == asked
        assert len(link.begun) == min(6, asked + 2)
        kept.pop()
    assert link.waited == [1, 2, 3, 4, 5, 6]


def test_as_many_small_tensors_come_ahead_as_two_large_ones_take():
    link = Link()
    away = Offload(Near(link), ahead=True, device="cpu")
    kept = [away.keep(torch.zeros(size)) for size in (100, 50, 50, 50, 50, 100)]
    away.bring(kept.pop())
    assert len(link.begun) == 1 + 4  # four of 50 take what two of 100 do
