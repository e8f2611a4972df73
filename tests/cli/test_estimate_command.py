"""`outsize estimate`: verdict first, exit status by the verdict, mistakes named."""

import json

import pytest
from effort import long

torch = pytest.importorskip("torch")

from outsize.cli import main  # noqa: E402

STEP = """
import torch

def make(batch=None):
    model = torch.nn.Linear(1024, 1024).cuda()
    data = torch.rand((batch or 4) * 64, 1024, device="cuda")
    def step():
        model(data).sum().backward()
    return step

def plain():
    return make()

def broken():
    return make().missing

def number():
    return 3

value = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "steps_of_this_test.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_function_is_estimated_and_the_verdict_comes_first(capsys):
    assert main(["estimate", "steps_of_this_test:plain", "--card", "rtx4090"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("steps_of_this_test:plain: fits")


def test_what_does_not_fit_exits_with_one(capsys):
    assert main(["estimate", "steps_of_this_test:plain", "--budget", "20MiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_json_has_the_same_numbers(capsys):
    assert main(["estimate", "steps_of_this_test:make", "--batch", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peak_allocated"]["bytes"] >= 4 * 1024 * 1024
    assert data["growth"][0]["size"] == "batch"
    assert {row["place"] for row in data["largest"]} >= {"RTX 4090", "H200"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate"], "either MODULE:FUNCTION or --hf"),
        (["estimate", "steps_of_this_test"], "is not MODULE:FUNCTION"),
        (["estimate", "no_such_module_here:make"], "no module 'no_such_module_here'"),
        (["estimate", "steps_of_this_test:wrong"], "has no 'wrong': it has make, plain, broken, number"),
        (["estimate", "steps_of_this_test:value"], "is int, not a function"),
        (["estimate", "steps_of_this_test:broken"], "steps_of_this_test.py:15"),
        (["estimate", "steps_of_this_test.py:number"], "number returned int, not the step to run"),
        (["estimate", "cut_short_in_this_test:make"], "importing cut_short_in_this_test raised SyntaxError"),
        (
            ["estimate", "fails_in_this_test:make"],
            "raised ZeroDivisionError at fails_in_this_test.py:2: division by zero",
        ),
        (["estimate", "steps_of_this_test:plain", "--batch", "4"], "takes no argument"),
        (["estimate", "steps_of_this_test:plain", "--card", "rtx9999"], "unknown card 'rtx9999'"),
        (["estimate", "--hf", "nowhere.json"], "no configuration at nowhere.json"),
        (["estimate", "--hf", "empty.json"], "names no model_type"),
        (["estimate", "--hf", "sizes.json"], "has no sizes"),
        (["estimate", "--hf", "text.json"], "is not JSON: line 1"),
    ],
)
def test_a_mistake_is_named_and_exits_with_two(words, said, folder, capsys):
    (folder / "cut_short_in_this_test.py").write_text("make = (")
    (folder / "fails_in_this_test.py").write_text("x = 0\n1 / x")
    (folder / "empty.json").write_text("{}")
    (folder / "sizes.json").write_text('{"model_type": "gpt2"}')
    (folder / "text.json").write_text("hello")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_transformers_config_is_enough(folder, capsys):
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    (folder / "config.json").write_text(json.dumps(config))
    words = [
        "estimate",
        "--hf",
        "config.json",
        "--batch",
        "2",
        "--seq",
        "64",
        "--precision",
        "bf16-amp",
        "--card",
        "t4",
        "--json",
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    weights = next(part["bytes"] for part in data["parts"] if part["name"] == "weights")
    assert weights == 4 * (500 * 64 + 128 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64)


BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 64}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 100,
      "decoder_start_token_id": 0}  # fmt: skip
BEIT = {"model_type": "beit", "architectures": ["BeitForImageClassification"], "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100, "image_size": 32}  # fmt: skip


def from_config(folder, capsys, config, *words):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config))
    status = main(["estimate", "--hf", "config.json", "--seq", "16", "--batch", "2", "--steps", "2", "--json", *words])
    out, err = capsys.readouterr()
    return (json.loads(out), status) if status == 0 else (err, status)


def weights_of(data):
    return next(part["bytes"] for part in data["parts"] if part["name"] == "weights")


SAVED = [
    (saved, *precision)
    for saved in ({"torch_dtype": "bfloat16"}, {"dtype": "float16"})
    for precision in (("fp32", 4), ("bf16-amp", 4), ("bf16", 2))
]


@pytest.mark.parametrize(("saved", "precision", "size"), SAVED if long() else [SAVED[0], SAVED[4], SAVED[2]])
def test_the_weights_are_of_the_precision_asked_for_and_not_of_the_one_they_were_saved_in(
    folder, capsys, saved, precision, size
):
    import transformers

    config = BERT | {"architectures": ["BertForMaskedLM"]}
    count = transformers.BertForMaskedLM(transformers.BertConfig(**config)).num_parameters()
    data, _ = from_config(folder, capsys, config | saved, "--precision", precision)
    assert weights_of(data) == size * count


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BERT | {"architectures": ["BertForSequenceClassification"]}, []),
        (BERT | {"architectures": ["BertModel"]}, ["--optimizer", "none"]),
        (T5 | {"architectures": ["T5Model"]}, ["--optimizer", "none"]),
        (T5 | {"architectures": ["T5ForConditionalGeneration"]}, ["--optimizer", "none"]),
        (BEIT, []),
        ({"model_type": "resnet", "hidden_sizes": [32, 64], "depths": [1, 1], "image_size": 32}, []),
    ],
)
def test_a_configuration_is_called_with_what_its_head_takes(folder, capsys, config, words):
    data, status = from_config(folder, capsys, config, *words)
    assert status == 0, data


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BERT | {"architectures": ["BertModel"]}, "BertModel gives no loss from input_ids: add --optimizer none"),
        ({"model_type": "resnet", "hidden_sizes": [32, 64], "depths": [1, 1]}, "says no image_size: add it"),
        ({"model_type": "whisper", "architectures": ["WhisperModel"], "d_model": 60}, "takes input_features"),
    ],
)
def test_what_a_configuration_cannot_be_called_with_is_said(folder, capsys, config, said):
    error, status = from_config(folder, capsys, config)
    assert status == 2 and said in error


def test_a_model_with_an_encoder_keeps_it_where_the_configuration_names_no_head(folder, capsys):
    bart = {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "pad_token_id": 1}  # fmt: skip
    import transformers

    count = transformers.BartForConditionalGeneration(transformers.BartConfig(**bart)).num_parameters()
    assert weights_of(from_config(folder, capsys, bart)[0]) == 4 * count


def test_lazy_modules_are_followed():
    import torch

    import outsize

    def build():
        model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.ReLU(), torch.nn.LazyLinear(4))
        model(torch.zeros(1, 16))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(4, 16)

    def step(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()

    footprint = outsize.estimate(step, build=build, device="cpu")
    assert {part.name: part.bytes for part in footprint.parts}["weights"] == 4 * (16 * 8 + 8 + 8 * 4 + 4)


def test_what_hangs_on_a_guess_exits_with_one_unless_it_is_trusted(folder, capsys):
    (folder / "guessing_steps.py").write_text(
        "import torch\n\n\ndef make():\n    x = torch.rand(64, 8, device='cuda')\n"
        "    return lambda: x[: int(torch.randint(1, 64, (1,), device='cuda'))].sum()\n"
    )
    words = ["estimate", "guessing_steps:make", "--budget", "8GiB"]
    assert main(words) == 1
    assert "may fit" in capsys.readouterr().out.splitlines()[0]
    assert main([*words, "--trust"]) == 0


@pytest.mark.parametrize(
    ("arguments", "traced"),
    [("batch=32", (16, 32, 64)), ("batch", (1, 2, 16)), ("device='cuda'", ()), ("batch=None", ()), ("", ())],
)
def test_a_function_is_called_with_its_own_batch_where_nobody_says_one(
    arguments, traced, tmp_path, monkeypatch, capsys
):
    name = f"own_batch_{abs(hash(arguments))}"
    rows = "batch or 4" if "batch" in arguments else "4"
    (tmp_path / f"{name}.py").write_text(
        f"import torch\ndef make({arguments}):\n"
        f"    x = torch.zeros({rows}, 2**22, device='cuda')\n    return lambda: (x * 2).sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["estimate", f"{name}:make", "--card", "t4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert tuple(size for growth in answer["growth"] for size, _ in growth["traced"]) == traced
