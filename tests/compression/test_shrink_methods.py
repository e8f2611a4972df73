"""What each method makes: really smaller, the same shapes, equal where it should be."""

import copy

import pytest
import small_networks
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.compression.codecs import Grouped, RowScaled
from outsize.compression.method import Subject
from outsize.compression.methods import METHODS, OF_STATE, choose
from outsize.compression.methods.low_rank import factor, linear_chain, replace_linear
from outsize.compression.methods.tucker import factor_convolution
from outsize.compression.search import build
from outsize.compression.weights import count_bytes, share


def subject_of(case):
    model, loss, data = case
    return Subject(model=share(model).eval(), batches=data, loss=loss)


@pytest.fixture(scope="module")
def subjects():
    return {name: subject_of(getattr(small_networks, name)(2)) for name in ("tokens", "pictures")}


OF_WEIGHTS = [method for method in METHODS if method.name not in (*OF_STATE, "lora")]
"""The others save bytes of training: `test_adapters.py`."""


@pytest.mark.parametrize("method", OF_WEIGHTS, ids=lambda method: method.name)
def test_candidates_of_a_method_are_smaller_or_equal_and_give_the_same_shapes(subjects, method):
    found = 0
    for name, subject in subjects.items():
        first = subject.batches[0] % 20 if name == "tokens" else subject.batches[0][0]
        if name == "tokens":
            subject = Subject(model=subject.model, batches=[first], loss=subject.loss)
        plain = subject.model(first)
        for candidate in method.candidates(subject):
            small = build(subject, [candidate])
            given_back = small(first)
            assert count_bytes(small) < count_bytes(subject.model), candidate
            assert given_back.shape == plain.shape and given_back.dtype == plain.dtype
            again = build(subject, [candidate])(first)
            assert torch.equal(again, given_back)  # nothing is drawn
            assert candidate.touches <= {path for path, _ in subject.model.named_modules()}
            found += 1
        assert torch.equal(subject.model(first), plain)  # the user's model is as it was
    assert found


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 10**6))
@examples(60)
def test_a_linear_layer_at_full_rank_is_the_plain_one(inputs, outputs, bias, moments, seed):
    torch.manual_seed(seed)
    layer, x = torch.nn.Linear(inputs, outputs, bias), torch.randn(3, inputs)
    seen = torch.randn(2 * inputs, inputs)
    left, right = factor(layer.weight.detach(), min(inputs, outputs), seen.T @ seen if moments else None)
    torch.testing.assert_close(linear_chain(right, left, layer.bias)(x), layer(x), rtol=1e-4, atol=1e-4)


@given(
    st.sampled_from([torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d]), st.integers(1, 9), st.integers(1, 9),
    st.integers(1, 3), st.integers(1, 2), st.sampled_from([0, 1, "same"]), st.integers(1, 2), st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
@examples(60)
def test_a_convolution_at_full_rank_is_the_plain_one(
    kind, inputs, outputs, window, stride, padding, dilation, bias, seed
):
    torch.manual_seed(seed)
    stride = 1 if padding == "same" else stride
    layer = kind(inputs, outputs, window, stride=stride, padding=padding, dilation=dilation, bias=bias)
    x = torch.randn(2, inputs, *[6] * {torch.nn.Conv1d: 1, torch.nn.Conv2d: 2, torch.nn.Conv3d: 3}[kind])
    made = factor_convolution(layer, outputs, inputs)
    torch.testing.assert_close(made(x), layer(x), rtol=1e-4, atol=1e-4)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(0, 10**6), st.floats(1e-6, 1e4))
@examples(60)
def test_a_codec_keeps_every_number_within_half_a_step(shape, seed, scale):
    torch.manual_seed(seed)
    weight = torch.randn(shape) * scale
    for codec, most in ((RowScaled("int8", "float32"), 127), (Grouped("int4", "float32", tuple(shape)), 7)):
        again = codec.decode(codec.encode(weight))
        assert again.shape == weight.shape and again.dtype == weight.dtype
        worst = weight.abs().max() / most * (0.51 if most == 127 else 2.0)  # int4 may clip to three quarters
        assert (again - weight).abs().max() <= worst + 1e-12


def test_a_low_rank_layer_is_the_best_on_the_inputs_and_not_on_the_weights():
    torch.manual_seed(0)
    weight, x = torch.randn(24, 24), torch.randn(500, 24) * torch.logspace(0, -3, 24)
    left, right = factor(weight, 6, x.T @ x)
    plain_left, plain_right = factor(weight, 6)

    def error(a, b):
        return (x @ (a @ b - weight).T).norm()

    assert error(left, right) < 0.5 * error(plain_left, plain_right)


def test_weights_that_layers_share_stay_shared():
    subject = subject_of(small_networks.tokens(2))
    small = build(subject, choose("int8")[0].candidates(subject))
    assert small.head.weight_codes is small.embedding.weight_codes
    assert count_bytes(small) < 0.3 * count_bytes(subject.model)


def test_a_skipped_block_leaves_its_list_and_the_cache_counts_anew():
    model, loss, data = small_networks.tokens(5)
    for number, block in enumerate(model.blocks):
        block.layer_idx = number
    small = outsize.shrink(model, data, loss=loss, to="60%", methods="drop blocks", within=1e6)
    assert len(small.model.blocks) == 1 and small.model.blocks[0].layer_idx == 0
    assert type(small.model.blocks[0]) is small_networks.Block


def test_precision_comes_after_factors():
    subject = subject_of(small_networks.tokens(2))
    low = next(one for one in choose("low-rank")[0].candidates(subject) if one.site == "blocks.0.up")
    eight = next(one for one in choose("int8")[0].candidates(subject) if one.site == "blocks.0.up")
    small = build(subject, [eight, low])
    chain = small.blocks[0].up
    assert type(chain) is torch.nn.Sequential and all("weight" in part.derived for part in chain)
    assert count_bytes(small) < min(count_bytes(build(subject, [eight])), count_bytes(build(subject, [low])))


def test_a_layer_that_is_gone_is_left_alone():
    subject = subject_of(small_networks.tokens(2))
    candidates = [one for method in METHODS for one in method.candidates(subject) if one.site.startswith("blocks.0")]
    assert len({one.method for one in candidates}) >= 4
    small = build(subject, candidates[:1] + [one for one in candidates if one.method in ("int8", "low-rank")])
    assert not list(small.blocks[0].parameters())


def test_models_whose_code_reads_the_weights_of_their_layers_still_run():
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    data = [torch.randn(4, 6, 32) for _ in range(2)]
    small = outsize.shrink(encoder, data, loss=lambda model, x: model(x).square().mean(), to="30%", within=1.0)
    assert count_bytes(small.model) <= 0.3 * count_bytes(encoder)
    assert any("low-rank of" in note and "left out" in note for note in small.plan.notes)


def test_recurrent_layers_keep_their_weights_and_the_rest_shrinks():
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(8, 8, batch_first=True), torch.nn.Linear(8, 64)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model, data = Net(), [torch.randn(4, 5, 8)]
    small = outsize.shrink(model, data, loss=lambda model, x: model(x).square().mean(), to="75%", within=1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.lstm.parameters(), small.model.lstm.parameters(), strict=True))


def test_a_model_of_transformers_shrinks_with_its_own_loss():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 64, (4, 16))
    small = outsize.shrink(model, [{"input_ids": ids, "labels": ids}], to="30%", within=1.0)
    assert count_bytes(small.model) <= 0.3 * count_bytes(model)
    assert small.model.generate(ids[:, :4], max_new_tokens=3, do_sample=False).shape == (4, 7)


def test_a_copy_of_a_shrunk_model_computes_the_same_and_can_be_trained():
    model, loss, data = small_networks.tokens(2)
    small = outsize.shrink(model, data, loss=loss, to="25%", within=1.0, methods=["int4", "int8"]).model
    other = copy.deepcopy(small)
    before = loss(other, data[0])
    assert torch.equal(before, loss(small, data[0]))
    before.backward()
    torch.optim.Adam(other.parameters(), 1e-3).step()
    assert loss(other, data[0]) < before
    assert torch.equal(loss(small, data[0]), before)
    assert replace_linear(small, "no.such.layer", 3, None) is small
