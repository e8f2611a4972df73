"""`outsize estimate` that does not fit says what would: each change is traced, and none is invented."""

import json

import pytest

from outsize.cli import main
from outsize.model.estimation.configurations import read_config

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def ways(capsys, *words):
    status = main(["estimate", *words, "--steps", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    return status, found, {way["name"]: way["peak"]["bytes"] for way in found["ways"]}


def test_a_configuration_that_does_not_fit_lists_measured_ways_out(folder, capsys):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    words = ("--hf", "config.json", "--seq", "32", "--budget", "1MiB")
    status, found, peaks = ways(capsys, *words)
    assert status == 1 and found["fits"] is False
    plain = found["peak_reserved"]["bytes"]
    assert peaks["precision bf16"] < plain and peaks["LoRA of rank 16 on 4-bit weights"] <= plain
    status, found, peaks = ways(capsys, *words, "--optimizer", "none")
    assert {"precision bf16", "weights of 8 bits", "weights of 4 bits"} <= set(peaks)
    status, found, peaks = ways(capsys, *words, "--no-ways")
    assert peaks == {}


def test_every_precision_in_one_table(folder, capsys):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert main(["estimate", "--hf", "config.json", "--seq", "16", "--precision", "all", "--optimizer", "none"]) == 0
    text = capsys.readouterr().out
    for name in ("fp32", "bf16", "fp16", "bf16-amp", "fp16-amp"):
        assert f"  {name} " in text


STEP = """
import torch

def make(batch):
    model = torch.nn.Linear(256, 256).cuda()
    x = torch.rand(batch, 1024, 256, device="cuda")
    return lambda: model(x).square().mean().backward()
"""


def test_a_users_own_step_is_traced_at_smaller_sizes_and_under_autocast(folder, capsys):
    (folder / "own_step_of_this_test.py").write_text(STEP)
    status, found, peaks = ways(capsys, "own_step_of_this_test:make", "--batch", "8", "--budget", "4MiB")
    assert status == 1
    assert peaks["batch of 1"] < peaks["batch of 4"] < found["peak_reserved"]["bytes"]
    assert "autocast to bfloat16" in peaks


def test_a_model_that_was_downloaded_is_found_by_its_name(folder, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    place = folder / "models--someone--small" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(LLAMA))
    assert read_config("someone/small").hidden_size == 128
