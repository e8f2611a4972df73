"""Private parts of torch are used in one folder, and a torch that lacks one is named."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize
from outsize.model.torch_port import dispatch, fake_cuda, parts, patches

SOURCE = Path(outsize.__file__).parent
PORT = SOURCE / "model" / "torch_port"
OF_OTHERS = (SOURCE / "model" / "jax", SOURCE / "model" / "keras")
"""Rooms of other frameworks: what is private there is not torch's, and torch is not named."""
OTHERS = {
    "_asdict", "_replace",  # of named tuples
    "_actions", "_SubParsersAction",  # of argparse, which has no other way to list options
    "_getframe", "_current_frames", "_exit",  # of sys and os
    "_from_config", "_prepare_inputs",  # of transformers
    "_NoValue",  # of NumPy
    "_backends", "_initialized",  # of JAX and TensorFlow, which are not to be started by looking at them
    "_decompress",  # of zfpy, the way to blocks without a header that its manual describes
}  # fmt: skip
"""Private names of other libraries than torch."""
OF_TORCH = {"_buffers", "_version", "_schema", "_parameters", "_base", "_cdata"}
CARD = {
    "array/device/cuda.py": {"torch._C", "torch._C._cuda_clearCublasWorkspaces"},
    "monitor/leaks/device_history.py": {
        "memory._record_memory_history",
        "self._memory._record_memory_history",
        "self._memory._snapshot",
    },
}
"""Rooms below the model room may not import it: what they need of torch's private parts stands in one file each."""


def private_parts(source: str, ours: set[str]) -> Iterator[str]:
    """What a module takes of torch under a private name, or replaces in torch."""
    for node in ast.walk(ast.parse(source)):
        for owner, name, writes in taken(node):
            if re.fullmatch(r"torch(\.\w+)*", owner):
                replaces = writes and not owner.startswith("torch.backends")  # its settings are there to be written
                if replaces or is_private(f"{owner}.{name}"):
                    yield f"{owner}.{name}"
            elif is_private(name) and owner not in ("self", "cls", "super()") and name not in ours | OTHERS:
                yield f"{owner}.{name}"


def taken(node: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """(owner, name, whether it is written) of what an import, an attribute, a getattr or a __dict__ takes."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "", False) for alias in node.names if alias.name.startswith("torch"))
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        yield from ((str(node.module), alias.name, False) for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node.value), node.attr, not isinstance(node.ctx, ast.Load)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "getattr", "hasattr"):
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        yield ast.unparse(node.args[0]), name, ast.unparse(node.func) in ("setattr", "delattr")
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".__dict__"):
        yield ast.unparse(node.value), ast.unparse(node.slice).strip("'"), False


def is_private(name: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in name.split("."))


@functools.cache
def own_names() -> set[str]:
    """Private names that the package gives itself, less those that torch gives too. All of the source is read for them."""
    found = set()
    for path in set(SOURCE.rglob("*.py")) - set(PORT.iterdir()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Tuple):
                found |= {
                    item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)
                }
    return found - OF_TORCH


def imported(text):
    """Modules that a file imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_private_parts_of_torch_are_used_in_one_folder_only():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if any(room in path.parents for room in OF_OTHERS):
            assert "torch" not in {name.split(".")[0] for name in imported(path.read_text())}
        elif PORT not in path.parents:
            private = set(private_parts(path.read_text(), own_names())) - CARD.get(name, set())
            if private:
                found[name] = private
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._dispatch_keys(x)", "from torch.utils._pytree import tree_map", "import torch._dynamo",
        "from torch.nn.modules.batchnorm import _BatchNorm", "x.untyped_storage()._cdata", "module._buffers['mean']",
        "torch.cuda.is_available = lambda: True", "setattr(torch.cuda, 'is_available', answer)", "x._version",
        "torch.autograd._engine_run_backward(x)", "getattr(torch._C, 'x')", "getattr(torch.cuda, '_lazy_init')",
        "module.__dict__['_flat_weights']", "optimizer._optimizer_step_pre_hooks", "torch.ops.aten._cudnn_rnn(x)",
    ],
)  # fmt: skip
def test_a_private_part_that_is_planted_is_found(line):
    assert list(private_parts(line, own_names()))
    assert not list(
        private_parts("self._mine = torch.cuda.is_available() and x.untyped_storage().nbytes()", own_names())
    )


def test_a_part_that_torch_lacks_is_an_error_in_one_sentence_that_names_the_version():
    for path in ("_C._no_such_part", "utils._no_such_module", "ops.aten._no_such_operator"):
        with pytest.raises(outsize.OutsizeError) as caught:
            parts.part(path)
        assert str(caught.value).startswith(f"torch {torch.__version__} has no torch.{path}")
        assert parts.FLOOR in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(outsize.OutsizeError, match=r"has no Linear\._no_such_table"):
        parts.attribute(nn.Linear(1, 1), "_no_such_table")


def test_the_error_for_a_missing_part_names_no_line_of_the_user(monkeypatch):
    def lacks() -> bool:
        raise parts.missing("torch._C._current_graph_task_id")

    monkeypatch.setattr("outsize.model.tracing.records.attribution.in_backward", lacks)
    model = nn.Linear(4, 4)
    with pytest.raises(outsize.OutsizeError) as caught:
        outsize.estimate(lambda x: model(x).sum(), torch.ones(2, 4), device="cpu")
    assert not isinstance(caught.value, outsize.InputError)
    assert "test_torch_port" not in str(caught.value) and torch.__version__ in str(caught.value)


@pytest.mark.parametrize("verb", ["estimate", "fit"])
def test_a_call_of_torch_that_reaches_for_a_real_card_is_not_the_users_mistake(verb):
    def reach(*args):
        if torch.cuda.is_available():
            raise RuntimeError("Found no NVIDIA driver on your system. Please check")
        return nn.functional.linear(*args).sum()

    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.OutsizeError, match=r"^Outsize does not know this part of torch 2.*Found no") as caught:
        if verb == "estimate":
            outsize.estimate(lambda x: reach(x, model.weight, model.bias), batch)
        else:
            outsize.fit(model, lambda m, x: reach(x, m.weight, m.bias), optimizer, batch, budget="1GiB", dry_run=True)
    assert not isinstance(caught.value, outsize.InputError)


@pytest.mark.parametrize("version", ["2.3.1", "1.13.0+cu117"])
def test_a_torch_that_is_too_old_is_refused_by_every_verb(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    model = nn.Linear(4, 4)
    asked = f"torch {version.replace('+', '.')} is too old: Outsize needs torch {parts.FLOOR} or newer"
    with pytest.raises(outsize.OutsizeError, match=asked):
        outsize.estimate(lambda x: model(x).sum(), torch.ones(2, 4), device="cpu")
    for device in (None, "cpu"):
        with pytest.raises(outsize.OutsizeError, match=asked):
            outsize.fit(model, lambda model, batch: model(batch).sum(), None, torch.ones(2, 4), device=device)


def test_versions_are_compared_as_numbers(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    assert not parts.is_older_than("2.4") and parts.is_older_than("2.11") and not parts.is_older_than("2.10")


def test_the_accelerator_of_a_wheel_built_for_cuda_answers_for_a_card_that_is_not_there():
    before = torch.accelerator.current_stream, torch.accelerator.current_accelerator, torch.cuda.is_available
    with patches.replaced(fake_cuda.card_rows(0, (9, 0), 2**30, accelerator=True)):
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
        assert not torch.accelerator.current_stream().is_capturing()
        assert torch.cuda.is_available() and torch.accelerator.device_count() == 1
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        torch.optim.AdamW([parameter]).step()  # asks whether the card records a graph
    assert before == (torch.accelerator.current_stream, torch.accelerator.current_accelerator, torch.cuda.is_available)


def test_a_trace_leaves_checkpointing_its_default_device():
    from torch.utils.checkpoint import DefaultDeviceType, checkpoint

    before = DefaultDeviceType._default_device_type
    model = nn.Linear(4, 4)

    def step(x):
        checkpoint(model, x, use_reentrant=False).sum().backward()

    outsize.estimate(step, torch.ones(2, 4), device="cuda")
    assert DefaultDeviceType._default_device_type == before


def test_keys_that_torch_writes_only_as_text_tell_tensors_apart_too(monkeypatch):
    monkeypatch.setattr(dispatch, "_bits", lambda: repr)
    plain = torch.ones(2, dtype=torch.complex64)
    assert dispatch.key_bits(plain) == dispatch.key_bits(plain.clone()) != dispatch.key_bits(plain.conj())
