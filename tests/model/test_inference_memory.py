"""Answers without gradients: the largest batch, caches of keys and values, weights in fewer bits."""

import pytest
import torch

import outsize
from outsize.core.errors import BudgetError, InputError
from outsize.model.fitting.run.meter import Meter


def measured(model, call, batch):
    meter = Meter("cpu")
    meter.begin(lambda: [*model.parameters(), *model.buffers(), batch])
    with torch.no_grad():
        kept = call(model, batch)
    del kept
    return meter.end()


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_the_largest_batch_of_an_inference_holds_what_was_promised():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    budget = 2 * 2**20
    rows = outsize.batch_size(model, batch=torch.randn(2, 64), budget=budget, inference=True)
    trained = outsize.batch_size(model, lambda m, x: m(x).sum(), None, torch.randn(2, 64), budget=budget)
    assert rows > trained  # nothing is kept for a backward pass
    peak = measured(model, lambda m, x: m(x), torch.randn(rows, 64))
    assert 0.9 * budget < peak <= budget


def test_the_largest_batch_of_a_generation_counts_its_cache_to_the_last_token(llama):
    def generate(model, ids):
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)

    budget = 80_000
    rows = outsize.batch_size(llama, generate, batch=torch.randint(3, 64, (2, 4)), budget=budget, inference=True)
    llama.generation_config.eos_token_id = None  # no sequence ends early: the worst that can come
    peak = measured(llama, generate, torch.randint(3, 64, (rows, 4)))
    llama.generation_config.eos_token_id = 2
    assert rows > 1 and 0.7 * budget < peak <= budget


@pytest.mark.parametrize("kind", [None, "static"])
def test_an_estimate_follows_a_generation_to_its_end_and_names_the_cache(llama, kind):
    ids = torch.randint(3, 64, (4, 2))
    more = {} if kind is None else {"cache_implementation": kind}

    def step(model, ids):
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, **more)

    found = outsize.estimate(step, llama, ids, device="cpu", steps=1)
    cache = next(part.bytes for part in found.parts if part.name == "KV cache")
    tokens = 2 + 16 - 1  # the last one is never asked about
    assert cache >= 4 * tokens * 16 * 2 * 4  # samples, tokens, numbers of a head, keys and values, bytes
    llama.generation_config.eos_token_id = None
    peak = measured(llama, lambda model, batch: step(model, batch), ids)
    llama.generation_config.eos_token_id = 2
    assert peak <= found.peak_requested.bytes <= 1.02 * peak


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give batch="),
        ({"batch": torch.randn(2, 4)}, "give loss"),
        (
            {"batch": torch.randn(2, 4), "inference": True, "optimizer": torch.optim.SGD([torch.zeros(1)])},
            "no optimizer",
        ),
    ],
)
def test_a_mistake_is_one_sentence(given, words):
    with pytest.raises(InputError, match=words):
        outsize.batch_size(torch.nn.Linear(4, 4), **given)


def test_a_budget_below_one_sample_says_what_one_takes():
    with pytest.raises(BudgetError, match="an output of one sample holds"):
        outsize.batch_size(torch.nn.Linear(64, 64), batch=torch.randn(2, 64), budget="10KiB", inference=True)


def test_an_estimate_knows_weights_in_fewer_bits():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    x = torch.randn(8, 128)
    for bits in (16, 8, 4):
        small = outsize.compression.adapt(model, rank=2, bits=bits).eval()
        found = outsize.estimate(answer, small, x, device="cpu", steps=1)
        assert found.peak_requested.bytes == pytest.approx(measured(small, answer, x), rel=0.01)


def answer(model, x):
    with torch.no_grad():
        return model(x)


def test_an_estimate_knows_the_quantised_weights_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    from outsize.compression.weights import count_bytes

    torch.manual_seed(0)
    for config in (quantization.Int8WeightOnlyConfig(), quantization.Float8WeightOnlyConfig()):
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]).eval()
        plain = count_bytes(model)
        quantization.quantize_(model, config)
        x = torch.randn(8, 128)
        found = outsize.estimate(answer, model, x, device="cpu", steps=1)
        weights = next(part.bytes for part in found.parts if part.name == "weights")
        assert weights == count_bytes(model) < 0.3 * plain
        peak = measured(model, answer, x)
        assert peak <= found.peak_requested.bytes <= 1.02 * peak


def test_a_quantised_cache_of_transformers_is_followed(llama):
    pytest.importorskip("optimum.quanto")
    ids = torch.randint(3, 64, (8, 2))
    cache = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 4}

    def step(model, ids):
        with torch.no_grad():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, cache_implementation="quantized",
                cache_config=cache,
            )  # fmt: skip

    found = outsize.estimate(step, llama, ids, device="cpu", steps=1)
    llama.generation_config.eos_token_id = None
    peak = measured(llama, step, ids)
    llama.generation_config.eos_token_id = 2
    assert peak <= found.peak_requested.bytes <= 1.1 * peak
    assert any(part.name == "KV cache" for part in found.parts)
