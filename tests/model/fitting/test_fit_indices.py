"""Trials of a loss on samples that are cut wrongly: no index may reach a card's kernel that is too large for it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.learn import findings
from outsize.model.fitting.learn.checked_indices import BOUNDS, checked_indices

TABLE, GRID = torch.randn(4, 3), torch.zeros(4, 4)
INSIDE, BEYOND = torch.tensor([0, 3]), torch.tensor([0, 4])
CALLS = {
    "embedding": lambda i: functional.embedding(i, TABLE),
    "_embedding_bag": lambda i: functional.embedding_bag(i[None], TABLE.clone().requires_grad_()),
    "index": lambda i: TABLE[i],
    "index_put_": lambda i: TABLE.clone().index_put_((i,), torch.zeros(2, 3)),
    "index_put": lambda i: TABLE.index_put((i,), torch.zeros(2, 3)),
    "nll_loss_forward": lambda i: functional.nll_loss(torch.randn(2, 4), i),
    "nll_loss2d_forward": lambda i: functional.nll_loss(torch.randn(1, 4, 2, 1), i[None, :, None]),
    "gather": lambda i: GRID.gather(0, i[:, None]),
    "scatter": lambda i: GRID.scatter(0, i[:, None], 1.0),
    "scatter_": lambda i: GRID.clone().scatter_(0, i[:, None], 1.0),
    "scatter_add": lambda i: GRID.scatter_add(0, i[:, None], torch.ones(2, 1)),
    "scatter_add_": lambda i: GRID.clone().scatter_add_(0, i[:, None], torch.ones(2, 1)),
    "scatter_reduce": lambda i: GRID.scatter_reduce(0, i[:, None], torch.ones(2, 1), "sum"),
    "scatter_reduce_": lambda i: GRID.clone().scatter_reduce_(0, i[:, None], torch.ones(2, 1), "sum"),
    "index_select": lambda i: TABLE.index_select(0, i),
    "index_add": lambda i: TABLE.index_add(0, i, torch.ones(2, 3)),
    "index_add_": lambda i: TABLE.clone().index_add_(0, i, torch.ones(2, 3)),
    "index_copy": lambda i: TABLE.index_copy(0, i, torch.ones(2, 3)),
    "index_copy_": lambda i: TABLE.clone().index_copy_(0, i, torch.ones(2, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_index_beyond_a_tensor_is_an_error_before_the_kernel_sees_it(name):
    with checked_indices("cuda"):
        CALLS[name](INSIDE)
        with pytest.raises(IndexError, match=f"^{name}(_forward_only)?: indices of 0 to 4, where .* to 3 are there"):
            CALLS[name](BEYOND)


def test_every_operator_whose_indices_are_looked_at_was_tried_or_has_the_arguments_of_one_that_was():
    alike = {"_embedding_bag_forward_only", "_index_put_impl_", "_unsafe_index"}
    assert set(BOUNDS) == set(CALLS) | alike


def test_masks_negative_indices_and_ignored_labels_are_let_through():
    with checked_indices("cuda"):
        assert TABLE[torch.tensor([True, False, False, True])].shape == (2, 3)
        assert TABLE[torch.ones(4, 3, dtype=torch.bool)].shape == (12,)
        assert torch.zeros(2, 3, 4, 5)[torch.ones(2, 3, dtype=torch.bool), torch.tensor([3])].shape == (6, 5)
        assert TABLE[torch.tensor([-4])].shape == (1, 3)
        functional.cross_entropy(torch.randn(2, 4), torch.tensor([1, -100]))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, a, b):
        return self.left(a) @ self.right(b).T


def contrast(model, batch):
    logits = model(batch["a"], batch["b"])
    there = torch.arange(len(logits))
    return functional.cross_entropy(logits, there) + functional.cross_entropy(logits.T, there)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, source, target):
        return self.out(self.embed(target) + self.embed(source).mean(1, keepdim=True))


def translate(model, batch):
    return functional.cross_entropy(model(batch["source"], batch["target"]).flatten(0, 1), batch["target"].flatten())


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        x = self.first(x)
        return self.last(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))


def classify(model, batch):
    return functional.cross_entropy(model(batch["x"], batch["edges"]), batch["y"])


STEPS = {
    "two towers": (Both, contrast, lambda: {"a": torch.randn(6, 8), "b": torch.randn(6, 8)}),
    "pairs": (Pairs, translate, lambda: {name: torch.randint(0, 30, (6, 5)) for name in ("source", "target")}),
    "graph": (
        Graph,
        classify,
        lambda: {"x": torch.randn(50, 4), "edges": torch.randint(0, 50, (2, 90)), "y": torch.randint(0, 3, (50,))},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_trial_of_a_loss_reads_beyond_a_tensor_unseen(name, monkeypatch):
    """As on a card: whatever raises without the check would have ended the process's work there."""
    make, loss, sample = STEPS[name]
    unseen = []

    def watched(device):
        return checked_indices("cuda")

    for operator in ("embedding", "cross_entropy"):
        plain = getattr(functional, operator)

        def call(*args, plain=plain, **kwargs):
            try:
                return plain(*args, **kwargs)
            except IndexError as error:
                if "are there" not in str(error):
                    unseen.append(str(error))
                raise

        monkeypatch.setattr(functional, operator, call)
    monkeypatch.setattr(findings, "checked_indices", watched)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fitted = outsize.fit(model, loss, optimizer, sample(), budget="1GiB")
    assert unseen == []
    fitted.undo()


def test_a_batch_that_no_reading_cuts_is_looked_at_as_a_whole_where_memory_is_short():
    """A loss that fails on a few samples runs whole; where that has no room, no reading cuts it to fewer."""
    make, loss, sample = STEPS["graph"]
    batch, model, seen = sample(), make(), []

    def short(m, b):
        seen.append(tuple(b["edges"].shape))
        if torch.is_grad_enabled() and len(b["x"]) == 50 and b["edges"].shape == (2, 90):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss(m, b)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    work = findings.Work(model=model, loss=short, optimizer=optimizer)
    found = findings.look(
        findings.replace(work, axes=findings.Axes(at={"batch['edges']": 0, "batch['x']": None, "batch['y']": None})),
        batch,
    )
    assert found.misread and found.normaliser is None
    assert seen == [(2, 90), (1, 90), (2, 90), (2, 90)]  # both, one, the whole, the whole without gradients
