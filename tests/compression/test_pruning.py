"""Structured pruning: every kind of network runs when it is smaller, and what stays whole is named."""

import io
import pickle

import pytest
import small_networks
import torch
from prunable_networks import CASES
from torch import nn

import outsize
from outsize.compression.judge import build
from outsize.compression.method import Subject
from outsize.compression.methods.channels import Channels
from outsize.compression.pruning.prune import prune
from outsize.compression.weights import count_bytes, share
from outsize.core.errors import InputError

WHOLE = {"layernorm": "normalised as a whole", "lstm": "mkldnn_rnn_layer"}
"""Networks of which nothing may leave, and what the error says."""


def output(model, batch):
    with torch.no_grad():
        found = model(*batch)
    return getattr(found, "logits", found)


def make(name):
    torch.manual_seed(0)
    model, batch = CASES[name]()
    return model.eval(), batch


@pytest.mark.parametrize("name", [name for name in CASES if name not in WHOLE])
def test_a_network_of_every_kind_has_half_of_its_bytes_and_runs(name):
    model, batch = make(name)
    pruned = prune(model, [batch], keep=0.5)
    assert pruned.after == count_bytes(pruned.model) <= 0.5 * count_bytes(model)
    assert output(pruned.model, batch).shape == output(model, batch).shape
    saved = io.BytesIO()
    torch.save(pruned.model.state_dict(), saved)
    assert len(saved.getvalue()) < 0.5 * pruned.before + 40_000
    again = pickle.loads(pickle.dumps(pruned.model)) if "<locals>" not in type(model).__qualname__ else pruned.model
    again.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    assert torch.equal(output(again, batch), output(pruned.model, batch))


@pytest.mark.parametrize("name", WHOLE)
def test_what_may_not_leave_is_named_and_the_nearest_size_too(name):
    model, batch = make(name)
    with pytest.raises(InputError, match=f"pruning reaches .*{WHOLE[name]}"):
        prune(model, [batch], keep=0.5)


@pytest.mark.parametrize("name", ["layernorm", "mha", "gpt2", "llama_gqa", "vit"])
def test_axes_that_are_normalised_become_shorter_where_the_user_says_so(name):
    model, batch = make(name)
    pruned = prune(model, [batch], keep=0.3, through_norms=True)
    assert pruned.after <= 0.3 * pruned.before
    assert output(pruned.model, batch).shape == output(model, batch).shape


def test_a_pruned_network_of_torchs_own_layers_needs_nothing_of_outsize():
    for name in ("depthwise", "groupnorm", "vit", "llama_gqa"):
        model, batch = make(name)
        saved = pickle.dumps(prune(model, [batch], keep=0.6).model)
        assert b"outsize" not in saved
    model, batch = make("encoder_layer")
    assert b"HeadAttention" in pickle.dumps(prune(model, [batch], keep=0.6).model)


class Written(nn.Module):
    """Sizes stand in its code."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 24)
        self.idle = nn.Linear(12, 12)
        self.place = nn.Parameter(torch.randn(20, 24))
        self.last = nn.Linear(24, 3)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x.view(-1, 3, 8).flip(1).reshape(-1, 24) + self.place[: x.shape[0]])


def test_sizes_in_code_and_weights_that_did_not_run_stay_whole_and_are_named():
    model = Written()
    pruned = prune(model, [torch.randn(4, 8)], keep=0.9)
    assert pruned.model.idle.weight.shape == (12, 12) and "no part" in pruned.whole["idle.weight"]
    assert pruned.model.place.shape == (20, 24)
    assert pruned.model.last.weight.shape == (3, 24) and "code of the model" in pruned.whole["place"]
    assert pruned.model.first.out_features < 12
    assert model.training and pruned.model.training


def test_torchs_attention_computes_the_same_in_its_open_form():
    from outsize.compression.pruning.head_attention import HeadAttention

    torch.manual_seed(0)
    for batch_first in (True, False):
        whole = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
        q, k = torch.randn(3, 3, 16), torch.randn(3, 3, 16)
        padding = torch.tensor([[False, False, True]]).expand(3, 3)
        causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
        for more in ({}, {"key_padding_mask": padding}, {"attn_mask": causal}, {"need_weights": False, "attn_mask": causal},
                     {"attn_mask": torch.randn(12, 3, 3), "average_attn_weights": False}):  # fmt: skip
            for a, b in zip(HeadAttention.of(whole)(q, k, k, **more), whole(q, k, k, **more), strict=True):
                torch.testing.assert_close(a, b)
        torch.testing.assert_close(HeadAttention.of(whole)(q[0], k[0], k[0])[0], whole(q[0], k[0], k[0])[0])


def test_the_loss_decides_which_channels_leave():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].weight[16:] *= 5  # large, and of no use: the head does not look at them
        model[2].weight[:, 16:] = 1e-6
    pruned = prune(model, [torch.randn(64, 4)], keep=0.5, loss=lambda m, x: ((m(x) - x.sum(1, True)) ** 2).mean())
    assert pruned.model[2].weight.abs().min() > 1e-5


def test_shrink_takes_channels_as_one_of_its_methods():
    model, loss, data = small_networks.pictures()
    small = outsize.shrink(model, data, loss=loss, to="70%", methods="prune", within=10.0)
    assert small.plan.chosen.bytes == count_bytes(small.model) <= small.plan.target
    assert {one.method for one in small.plan.candidates} == {"prune"}


def test_no_data_is_refused():
    with pytest.raises(InputError, match="no batches"):
        prune(nn.Linear(3, 3), [])


def test_two_removals_one_after_another_leave_each_others_numbers_alone():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
    subject = Subject(
        model=share(model).eval(), batches=[torch.randn(2, 5, 32)], loss=lambda m, x: m(x).square().mean()
    )
    heads = [one for one in Channels().candidates(subject) if "q_proj" in one.site and one.level == "to 30%"]
    assert len(heads) == 2
    small = build(subject, heads)
    assert [layer.self_attn.num_heads for layer in small.layers] == [1, 1]
    assert small(torch.randn(2, 5, 32)).shape == (2, 5, 32)
