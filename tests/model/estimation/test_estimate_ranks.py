"""Estimates of one of many ranks beside what ranks on this machine hold; how many cards a step takes; what is refused."""

import pathlib

import pytest
import ranked_storages
import ranks
import torch
from torch import nn

import outsize
from outsize.core.errors import InputError
from outsize.core.noun import Known
from outsize.model.estimation.ranks import find_blocks

KINDS = ("ddp", "zero1", "fsdp")
MESH = 4
"""Bytes of a rank's number in the table of ranks that a device mesh keeps, which belongs to no step."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    program = pathlib.Path(ranked_storages.__file__)
    by_rank = ranks.run_ranks(tmp_path_factory.mktemp("ranks"), 2, *KINDS, program=program)
    return {kind: [rows[number] for rows in by_rank] for number, kind in enumerate(KINDS)}


def estimate(sharding, count=2, **more):
    return outsize.estimate(
        ranked_storages.step, build=ranked_storages.build, device="cpu", ranks=count, sharding=sharding, **more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_of_a_rank_is_what_the_rank_with_most_holds_to_the_byte(measured, kind):
    footprint = estimate(kind)
    most = max(rank["peak"] for rank in measured[kind])
    assert footprint.peak_requested.bytes == most + (2 * MESH if kind == "fsdp" else 0)
    assert {part.name: part.bytes for part in footprint.parts}["optimizer state"] == max(
        r["state"] for r in measured[kind]
    )


def test_a_step_that_shards_its_own_model_meets_as_many_ranks_as_were_named():
    own = outsize.estimate(
        ranked_storages.step, build=lambda: ranked_storages.build("fsdp", 2), device="cpu", ranks=2
    )  # fmt: skip
    assert own.sharding == "own"
    parts = {part.name: part.bytes for part in own.parts}
    assert parts["optimizer state"] == {p.name: p.bytes for p in estimate("fsdp").parts}["optimizer state"]
    assert not torch.distributed.is_initialized(), "the ranks are gone when the estimate is there"


def test_more_ranks_hold_less_of_what_is_spread_and_the_same_of_the_rest():
    def parts(sharding, count):
        return {part.name: part.bytes for part in estimate(sharding, count).parts}

    two, eight = parts("fsdp", 2), parts("fsdp", 8)
    assert eight["optimizer state"] < two["optimizer state"] / 3
    assert eight["activations"] == two["activations"]
    assert parts("ddp", 2) == parts("ddp", 8)


def make_step(width=1024, depth=6):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(depth)])
    return model.cuda(), torch.rand(4, width, device="cuda")


def test_the_fewest_cards_fit_and_half_as_many_do_not():
    def build():
        model, x = make_step()
        return model, torch.optim.Adam(model.parameters()), x

    def step(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def spread(count):
        return outsize.estimate(step, build=build, ranks=count, sharding="fsdp", budget="150MiB", steps=2)

    answer = outsize.estimate(step, build=build, ranks="fewest", sharding="fsdp", budget="150MiB", steps=2)
    (row,) = answer.fewest
    assert row.cards is not None
    assert row.cards > 1
    assert row.known == Known.BOUND
    assert spread(row.cards).fits
    assert not spread(row.cards // 2).fits
    assert "fewest cards" in str(answer)
    assert str(row.cards) in str(answer)


def test_blocks_are_the_modules_of_the_outermost_lists_of_equal_ones():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
            self.head = nn.Linear(4, 8)

    net = Net()
    assert find_blocks(net) == list(net.layers)
    assert find_blocks(nn.Linear(4, 4)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"ranks": 0}, "ranks=0 is no number of ranks"),
        ({"ranks": "many"}, "ranks='many' is no number of ranks"),
        ({"sharding": "fsdp"}, "needs a number of ranks"),
        ({"ranks": 4, "sharding": "zero9"}, "'zero9' is unknown: one of ddp"),
        ({"ranks": 12, "sharding": "hsdp"}, "12 ranks are not whole nodes"),
        ({"ranks": "fewest"}, "needs a card"),
    ],
)
def test_mistakes_are_one_sentence(words, message):
    def step(model, x):
        model(x).sum().backward()

    with pytest.raises(InputError, match=message):
        outsize.estimate(step, nn.Linear(4, 4), torch.rand(2, 4), device="cpu", **words)


def test_a_step_without_a_model_cannot_be_spread():
    with pytest.raises(InputError, match=r"no torch\.nn\.Module was found"):
        outsize.estimate(lambda x: x.sum(), torch.rand(4), device="cpu", ranks=2, sharding="fsdp")
