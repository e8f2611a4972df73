"""Files of smaller models: read back the same, and read in a process that has no Outsize."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import small_networks
import torch

import outsize
from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError, StoreError

SETS = {
    "mixture": ("tokens", None, "20%"),
    "vocabulary": ("tokens", ["vocabulary", "int4"], "16%"),
    "blocks": ("tokens", ["drop blocks", "bf16"], "30%"),
    "factors": ("tokens", ["low-rank"], "60%"),
    "convolutions": ("pictures", ["tucker", "low-rank"], "60%"),
    "pictures": ("pictures", None, "15%"),
    "pruned": ("tokens", ["prune", "int8"], "20%"),
    "heads": ("encoder", ["prune", "low-rank", "bf16"], "30%"),
}
FREE = ("factors", "convolutions")
"""Sets of plain torch modules: their .pt needs no Outsize."""

EXPORTED = ("mixture", "vocabulary", "convolutions")
"""Sets that are exported."""

READER = """
import pathlib, sys
sys.modules["outsize"] = None  # not installed here
import torch
for path in sorted(pathlib.Path(".").glob("small-*")):
    data, expected = (torch.load(f"data-{path.stem}.{kind}") for kind in "xy")
    model = torch.export.load(path).module() if path.suffix == ".pt2" else torch.load(path, weights_only=False).eval()
    torch.testing.assert_close(model(data), expected)
    print(path.name)
assert not [name for name in sys.modules if name.startswith("outsize.")]
"""


@functools.cache
def make(name):
    network, methods, to = SETS[name]
    model, loss, data = getattr(small_networks, network)(5)
    if methods and "vocabulary" in methods:
        data = [batch % 10 for batch in data]
    small = outsize.shrink(model, data, loss=loss, to=to, methods=methods, within=1e6)
    return name, small, data[0][0] if network == "pictures" else data[0]


@pytest.fixture(scope="module", params=SETS)
def made(request):
    return make(request.param)


def test_a_safetensors_file_is_read_into_a_fresh_model(made, tmp_path):
    name, small, x = made
    small.save(tmp_path / "small.safetensors")
    fresh = small_networks.NETWORKS[SETS[name][0]]()
    again = outsize.compression.load(fresh, tmp_path / "small.safetensors").eval()
    assert torch.equal(again(x), small.model.eval()(x))
    assert count_bytes(again) == small.plan.chosen.bytes
    assert (tmp_path / "small.safetensors").stat().st_size < small.plan.chosen.bytes + 12_000  # names and numbers


def test_a_whole_module_is_read_by_torch(made, tmp_path):
    _, small, x = made
    small.save(tmp_path / "small.pt")
    again = torch.load(tmp_path / "small.pt", weights_only=False).eval()
    assert torch.equal(again(x), small.model.eval()(x))


def test_a_process_without_outsize_reads_what_the_page_says(tmp_path):
    files = {"small-factors.pt", "small-convolutions.pt", *(f"small-{name}.pt2" for name in EXPORTED)}
    for file in files:
        name, small, x = make(pathlib.Path(file).stem.removeprefix("small-"))
        small.save(tmp_path / file)
        torch.save(x, tmp_path / f"small-{name}.x")
        torch.save(small.model.eval()(x).detach(), tmp_path / f"small-{name}.y")
    for path in tmp_path.glob("small-*.[xy]"):
        path.rename(path.with_name("data-" + path.name))
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    answer = subprocess.run(
        [sys.executable, "-c", READER], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert set(answer.stdout.split()) == files, answer.stderr[-1500:]


def test_a_wrong_or_damaged_file_is_one_sentence(tmp_path):
    model, loss, data = small_networks.tokens(2)
    small = outsize.shrink(model, data, loss=loss, to="40%", within=1e6)
    path = tmp_path / "small.safetensors"
    small.save(path)
    with pytest.raises(InputError, match="no file"):
        outsize.compression.load(small_networks.Tokens(), tmp_path / "none.safetensors")
    with pytest.raises(StoreError, match="which this model does not"):
        outsize.compression.load(small_networks.Pictures(), path)
    with pytest.raises(InputError, match="must end in one of"):
        small.save(tmp_path / "small.onnx")
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(StoreError, match="was not written by shrink"):
        outsize.compression.load(small_networks.Tokens(), tmp_path / "other.safetensors")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StoreError, match="cannot read"):
        outsize.compression.load(small_networks.Tokens(), path)


def test_a_hostile_file_makes_no_module_that_no_method_makes(tmp_path):
    from safetensors.torch import save_file

    for what in ({"path": "head", "put": {"class": "Bilinear", "arguments": {}, "inside": {}, "derived": {}}},
                 {"path": "head", "derived": {"weight": {"codec": "os", "fields": {}, "parts": []}}}):  # fmt: skip
        said = json.dumps({"difference": [what], "same": {}})
        save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"outsize.shrink": said})
        with pytest.raises(StoreError, match=r"no method makes|no codec reads"):
            outsize.compression.load(small_networks.Tokens(), tmp_path / "x.safetensors")
