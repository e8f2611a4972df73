"""Recurrent layers and losses on the CPU: what a step is projected to hold is what it holds."""

import copy

import networks as nets
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.model.kernels.cpu import lstm_results


class Tagger(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer = nn.Embedding(50, 32), layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 50)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens))[0])


LAYERS = {
    "lstm": lambda: nn.LSTM(32, 64, 2, batch_first=True),
    "both ways": lambda: nn.LSTM(32, 24, 2, bidirectional=True, batch_first=True),
    "without biases": lambda: nn.LSTM(32, 50, bias=False, batch_first=True),
}


def tag_loss(model, batch):
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_step_of_a_recurrent_net_holds_what_is_projected_and_is_the_plain_step(layer):
    torch.manual_seed(0)
    model = Tagger(layer())
    batch = {"x": torch.randint(0, 50, (8, 20)), "y": torch.randint(0, 50, (8, 20))}
    plain = outsize.fit(model, tag_loss, torch.optim.SGD(model.parameters(), 0.1), batch, budget="1GiB", dry_run=True)
    for part in (100, 60):
        one, twin = copy.deepcopy(model), copy.deepcopy(model)
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (one, twin))
        budget = plain.plan.plain * part // 100
        fitted = outsize.fit(one, tag_loss, ours, batch, budget=budget)
        fitted.step(batch)
        assert fitted.measured <= fitted.plan.peak() <= budget
        fitted.undo()
        nets.plain_step(twin, tag_loss, theirs, batch)
        assert nets.worst_difference(one.parameters(), twin.parameters()) < 1e-5


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 3, 7, 11), (20, 8, 32, 50), (10, 4, 16, 128), (33, 5, 100, 64)])
def test_the_workspace_of_an_lstm_layer_has_the_size_that_onednn_gives_it(shape):
    time, rows, width, hidden = shape
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mkldnn_rnn_layer.default:
                seen.append((out[3].untyped_storage().nbytes(), lstm_results(lambda *_: out, args, {})[3].numel()))
            return out

    with Mode():
        nn.LSTM(width, hidden)(torch.randn(time, rows, width))
    if not seen:
        pytest.skip("this torch runs an LSTM without oneDNN")
    assert seen[0][0] == seen[0][1]


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.smooth_l1_loss, functional.soft_margin_loss, functional.l1_loss]
)
def test_a_loss_that_is_reduced_in_place_holds_what_is_projected(loss):
    torch.manual_seed(0)
    model, batch = nn.Linear(16, 512), torch.randn(64, 16)
    fitted = outsize.fit(
        model,
        lambda m, b: loss(m(b), torch.ones(len(b), 512)),
        torch.optim.SGD(model.parameters(), 0.1),
        batch,
        budget="1GiB",
    )
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak()
    fitted.undo()
