"""Smaller models in files: `.pt` (the whole module), `.pt2` (an exported program), `.safetensors` (tensors and the difference).

A `.pt2` needs torch alone to be loaded. A `.pt` needs the code of the user's model, and Outsize where weights are derived. A
`.safetensors` is read by `load` into a fresh model of the user's; nothing in it is run.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

from outsize.compression.structure import apply_difference
from outsize.core.errors import InputError, StoreError
from outsize.model.torch_port.objects import buffer_table, parameter_table

KEY = "outsize.shrink"
"""Where the metadata of a file say what it is."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".pt2")


def save(model: Any, path: str | os.PathLike[str], difference: list[dict[str, Any]] | str, call: Any) -> None:
    """Write a model as its path's suffix says."""
    import torch

    name, suffix = os.fspath(path), check_target(path)
    if suffix == ".safetensors":
        if isinstance(difference, str):
            raise InputError(difference)
        _save_tensors(model, name, difference)
    elif suffix == ".pt2":
        program = _export(model, call, name)
        torch.export.save(program, name)
    else:
        torch.save(model, name)


def check_target(path: str | os.PathLike[str]) -> str:
    """The suffix of a place that can be written; what would fail after all the work is found before it."""
    name = os.fspath(path)
    suffix, folder = os.path.splitext(name)[1].lower(), os.path.dirname(os.path.abspath(name))
    if suffix not in SUFFIXES:
        raise InputError(f"cannot write {name}: the name must end in one of {', '.join(SUFFIXES)}")
    if not os.path.isdir(folder):
        raise InputError(f"cannot write {name}: there is no folder {folder}, make it first")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} may not be written to: choose another folder")
    return suffix


def _export(model: Any, call: Any, name: str) -> Any:
    import torch

    if call is None:
        raise InputError(
            f"cannot export {name}: the loss does not call the model itself, so its arguments are not known"
        )
    was = model.training
    try:
        return torch.export.export(model.eval(), call[0], call[1])
    except Exception as error:
        raise InputError(
            f"this model cannot be exported, save it as .pt: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    finally:
        model.train(was)


def _save_tensors(model: Any, name: str, difference: list[dict[str, Any]]) -> None:
    from safetensors.torch import save_file
    from torch.nn import Parameter

    first: dict[int, str] = {}
    tensors, same = {}, {}
    state = model.state_dict(keep_vars=True)  # all parameters and buffers that are saved, under all their names
    for key, tensor in state.items():
        if hasattr(tensor, "__tensor_flatten__"):
            raise InputError(f"{key} is a {type(tensor).__name__}, which .safetensors does not hold: save it as .pt")
        if id(tensor) in first:
            same[key] = first[id(tensor)]
        else:
            first[id(tensor)] = key
            tensors[key] = tensor.detach().contiguous().clone() if _is_part(tensor) else tensor.detach().contiguous()
    beside = f"{name}.{os.getpid()}.tmp"
    try:
        frozen = [key for key, tensor in state.items() if isinstance(tensor, Parameter) and not tensor.requires_grad]
        said = {"difference": difference, "same": same, "frozen": frozen}
        save_file(tensors, beside, metadata={KEY: json.dumps(said), "format": "pt"})
        os.replace(beside, name)
    except OSError as error:
        raise StoreError(f"cannot write {name}: {error.strerror or error}", path=name) from error


def _is_part(tensor: Any) -> bool:
    """True of a view of a larger storage: only the view is written."""
    return bool(tensor.untyped_storage().nbytes() != tensor.nbytes)


def load(model: Any, path: str | os.PathLike[str]) -> Any:
    """A fresh model of the user's (its weights do not matter, it may be on the meta device) made into the one in the file."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"model is {type(model).__name__}: load takes a torch.nn.Module made as the one that was shrunk"
        )
    name = os.fspath(path)
    if os.path.splitext(name)[1].lower() in SUFFIXES[1:]:
        how = "torch.export.load" if name.endswith(".pt2") else "torch.load"
        raise InputError(f"{name} is no .safetensors file: read it with {how}, which gives the whole model")
    tensors, said = _read(name)
    model = apply_difference(model, said["difference"])
    modules = dict(model.named_modules(remove_duplicate=False))
    filled: dict[str, Any] = {}
    wanted, frozen = set(model.state_dict()), set(said.get("frozen", ()))
    for key in itertools.chain(tensors, said["same"]):
        parent, _, last = key.rpartition(".")
        module = modules.get(parent)
        if module is None or key not in wanted:
            raise StoreError(
                f"{name} has {key}, which this model does not: give a model made as the one it came from", path=name
            )
        tensor = filled[said["same"][key]] if key in said["same"] else tensors[key]
        if last in parameter_table(module):
            if not isinstance(tensor, torch.nn.Parameter):
                trained = tensor.is_floating_point() and key not in frozen
                tensor = torch.nn.Parameter(tensor, requires_grad=trained)
            filled[key] = tensor
            parameter_table(module)[last] = filled[key]
        else:
            filled[key] = buffer_table(module)[last] = tensor
    missing = sorted(wanted - filled.keys())
    if missing:
        raise StoreError(
            f"{name} lacks {missing[0]} (and {len(missing) - 1} more): it was made from another model", path=name
        )
    return model


def _read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not os.path.exists(name):
        raise InputError(f"there is no file {name}")
    try:
        with safe_open(name, "pt") as file:
            said = (file.metadata() or {}).get(KEY)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StoreError(f"cannot read {name}: {error}", path=name) from error
    if said is None:
        raise StoreError(f"{name} was not written by shrink: load its tensors with safetensors", path=name)
    try:
        return tensors, json.loads(said)
    except ValueError:
        raise StoreError(f"{name} is damaged: what it says of the model is not JSON", path=name) from None
