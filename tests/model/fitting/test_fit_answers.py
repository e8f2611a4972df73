"""Answers of slices, joined, are the answer of the whole, or the batch is not sliced."""

import collections
import dataclasses
import itertools
import math

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import outsize
from outsize.model.fitting.batch import Joined, join
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import NoStore
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.row_pieces import mixes_rows
from outsize.model.fitting.run.runner import Work

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Answer:
    rows: torch.Tensor
    kind: str


class Cache:
    """An object that nobody knows how to join."""


JOINED = {
    "rows": lambda y: y,
    "a tuple of rows": lambda y: (y, None, y > 0),
    "a named tuple": lambda y: Pair(y, y.sum(1)),
    "what torch returns": lambda y: y.topk(2),
    "a dict": lambda y: {0: y, "same": torch.tensor(3.0), "name": "x"},
    "a dataclass": lambda y: Answer(y, "x"),
}

NOT_JOINED = {
    "a mean": lambda y: y.mean(),
    "a mean beside rows": lambda y: (y, y.mean()),
    "a mean for each class": lambda y: y.mean(0),
    "a number": lambda y: float(y.mean()),
    "a count": lambda y: (y, len(y)),
    "a cache": lambda y: (y, Cache()),
    "rows along another axis": lambda y: y.T,
    "a list of samples": list,
    "one that is the same for all": lambda y: (y, torch.arange(4)),
    "fewer rows": lambda y: y[y[:, 0] > 0],
}


def flat(value):
    if dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list | tuple) else [value]


class Answering(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 4)
        self.shape = shape

    def forward(self, x):
        return self.shape(self.down(torch.relu(self.up(x))))


def fit_smaller(shape):
    torch.manual_seed(0)
    model, batch = Answering(shape).eval(), torch.randn(32, 16)
    plain = outsize.fit(model, None, None, batch, budget="1GiB", dry_run=True).plan.plain
    weights = sum(p.numel() * 4 for p in model.parameters())
    try:
        fitted = outsize.fit(model, None, None, batch, budget=weights + (plain - weights) // 2)
    except outsize.BudgetError as error:
        fitted = outsize.fit(model, None, None, batch, budget=error.smallest)
    answer, expected = fitted.infer(batch), model(batch)
    fitted.undo()
    assert type(answer) is type(expected)
    for one, other in zip(flat(answer), flat(expected), strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.allclose(one.float(), other.detach().float(), atol=1e-5)
        elif not isinstance(other, Cache):
            assert one == other
    return fitted


@pytest.mark.parametrize("shape", JOINED.values(), ids=JOINED.keys())
def test_answers_with_a_row_for_each_sample_are_joined(shape):
    assert fit_smaller(shape).choice.slices > 1


def test_answers_are_written_into_their_rows_so_that_an_inference_holds_one_whole_answer_and_no_second():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(512, 8)
    there = sum(p.numel() * 4 for p in model.parameters()) + batch.numel() * 4
    answer = 512 * 64 * 4
    fitted = outsize.fit(model, None, None, batch, budget=there + answer * 7 // 4)
    assert torch.allclose(fitted.infer(batch), model(batch), atol=1e-6)
    assert (
        fitted.choice.slices > 1 and there + answer <= fitted.measured <= fitted.plan.peak() <= there + answer * 7 // 4
    )


@given(st.data())
@examples(80)
def test_slices_written_one_by_one_are_the_tensor_they_were_cut_from(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    order = data.draw(st.permutations(range(1, len(shape))))
    whole = torch.arange(math.prod(shape)).reshape(shape).permute(0, *order)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, shape[0] - 1)), max_size=3)) - {shape[0]})
    joined = Joined(shape[0])
    for start, stop in itertools.pairwise([0, *cuts, shape[0]]):
        joined.add({"a": whole[start:stop]}, stop - start)
    assert torch.equal(joined.whole["a"], whole) and joined.whole["a"].dtype == whole.dtype


def test_pictures_keep_their_channels_last_when_they_are_joined():
    picture = torch.randn(6, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    joined = Joined(6)
    joined.add(picture[:4], 4)
    joined.add(picture[4:], 2)
    assert torch.equal(joined.whole, picture) and joined.whole.stride() == picture.stride()


@pytest.mark.parametrize("shape", NOT_JOINED.values(), ids=NOT_JOINED.keys())
def test_answers_that_no_joining_makes_whole_are_not_sliced(shape):
    fitted = fit_smaller(shape)
    assert fitted.choice.slices == 1
    assert any("slice the batch" in note for note in fitted.plan.notes)


def test_another_call_whose_answers_cannot_be_joined_is_an_error_and_no_number():
    model = Answering(lambda y: y)
    work = Work(model=model, loss=None, optimizer=None)
    runner = open_resident(work, Choice(slices=4), NoStore())
    with pytest.raises(outsize.InputError, match=r"without=\('slices',\)"):
        runner.infer(torch.randn(8, 16), lambda model, part: model(part).mean())
    with pytest.raises(outsize.InputError, match=r"the output\['loss'\] is of shape"):
        join([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}], [2, 2])


def test_a_unit_that_gives_a_sum_beside_its_rows_does_not_run_in_pieces():
    assert mixes_rows(lambda x: (x, x.sum()), (torch.ones(4, 2),), {})
    assert not mixes_rows(lambda x: (x, x + 1), (torch.ones(4, 2),), {})


def test_an_answer_comes_in_the_fewest_slices_that_fit():
    model, batch = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(12, 8)
    stage = Stage(Work(model=model, loss=None, optimizer=None), batch)
    peaks = [stage.project(Choice(slices=n), call=lambda model, part: model(part)).peak for n in (1, 2, 3)]
    assert peaks == sorted(set(peaks), reverse=True)
    for slices, peak in enumerate(peaks, 1):
        assert outsize.fit(model, None, None, batch, budget=peak, dry_run=True).choice.slices == slices
