"""How a smaller model differs from the user's, as plain data; and a fresh model of the user's made into it.

The differences do not depend on the methods that made them: which members of lists are left, which modules were put in place of
others, which numbers of a module changed (channels, heads), and which parameters are derived. So a file of any set of methods
is read by the same lines.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from outsize.compression import codecs
from outsize.compression.derived import as_parameters, derive
from outsize.compression.skipped import keep_places, make_skipped
from outsize.compression.weights import get, put
from outsize.core.errors import InputError, StoreError
from outsize.model.torch_port.objects import parameter_table

_ARGUMENTS = {
    "Linear": ("in_features", "out_features"),
    "Embedding": ("num_embeddings", "embedding_dim"),
    **{f"Conv{n}d": ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups") for n in (1, 2, 3)},
    "Sequential": (),
    "Identity": (),
    "Skipped": ("gives_tuple",),
    "Adapted": ("scale",),
    "HeadAttention": ("embed_dim", "num_heads", "dropout", "batch_first"),
}  # fmt: skip
"""Classes that methods put in -> the attributes that their constructors take."""
_PLAIN = (int, float, str, bool, type(None))


def describe_difference(before: Any, after: Any) -> list[dict[str, Any]]:
    """What has to be done to a model like `before`, in order, to get one that holds the parameters of `after`."""
    found: list[dict[str, Any]] = []
    _compare(before, after, "", found)
    return found


def _compare(before: Any, after: Any, path: str, found: list[dict[str, Any]]) -> None:
    base = _base(after)
    if type(before) is not base:
        found.append({"path": path, "put": describe_module(after, path)})
        return
    attributes = {
        name: value for name, value in _numbers(after).items() if _numbers(before).get(name, math.nan) != value
    }
    if attributes:
        found.append({"path": path, "attributes": attributes})
    derived = _derived(after)
    if derived:
        found.append({"path": path, "derived": derived})
    kept = after.__dict__.get("kept_places")
    if kept is not None:
        found.append({"path": path, "keep": kept})
    names = list(before._modules) if kept is None else [list(before._modules)[place] for place in kept]
    for old, new in zip(names, after._modules, strict=False):
        one, other = before._modules[old], after._modules[new]
        if one is not None and other is not None:
            _compare(one, other, f"{path}.{new}" if path else new, found)


def describe_module(module: Any, path: str = "") -> dict[str, Any]:
    """A module that a method put in, with its arguments and what is inside."""
    name = _base(module).__name__
    if name not in _ARGUMENTS:
        raise InputError(
            f"{path or 'the model'} became a {name}, which a .safetensors file cannot describe: save it as .pt"
        )
    arguments = {key: getattr(module, key) for key in _ARGUMENTS[name]}
    if "bias" in parameter_table(module) or "bias" in module.__dict__.get("derived", {}):
        arguments["bias"] = module.bias is not None
    if getattr(module, "padding_mode", "zeros") != "zeros":
        arguments["padding_mode"] = module.padding_mode
    inside = {key: describe_module(child, f"{path}.{key}") for key, child in module._modules.items()}
    more = {"attributes": _numbers(module), "derived": _derived(module)}
    return {"class": name, "arguments": arguments, "inside": inside, **more}


def _base(module: Any) -> Any:
    return getattr(type(module), "derived_from", type(module))


def _numbers(module: Any) -> dict[str, Any]:
    """Attributes that are plain numbers, words, or tuples of them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in ("training", "kept_places")
        and (isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)))
    }


def _derived(module: Any) -> dict[str, Any]:
    return {
        name: {"codec": type(codec).__name__, "fields": dataclasses.asdict(codec), "parts": list(parts)}
        for name, (codec, parts) in module.__dict__.get("derived", {}).items()
    }


def apply_difference(model: Any, differences: list[dict[str, Any]]) -> Any:
    """The user's model, made into one that holds the parameters of a file. They have no contents yet."""
    for one in differences:
        module = get(model, one["path"])
        if module is None:
            raise StoreError(
                f"the file changes {one['path']!r}, which this model does not have: give the model it was made from"
            )
        if "put" in one:
            model = put(model, module, make_module(one["put"]))
        _set_attributes(module, one.get("attributes", {}))
        if "keep" in one:
            keep_places(module, one["keep"])
        _derive(module, one.get("derived", {}))
    return model


def _set_attributes(module: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(module, name, tuple(value) if isinstance(value, list) else value)


def make_module(described: dict[str, Any]) -> Any:
    """A module that a method put in, without contents."""
    import torch

    name, arguments = described["class"], described["arguments"]
    if name not in _ARGUMENTS:
        raise StoreError(f"the file names a module {name!r} that no method makes")
    words: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    if name == "Skipped":
        return make_skipped(**words)
    if name == "Adapted":
        from outsize.compression.methods.adapters import make_empty

        module = make_empty(**words)
    elif name == "HeadAttention":
        from outsize.compression.pruning.head_attention import HeadAttention

        module = HeadAttention(**words)
    else:
        module = getattr(torch.nn, name)(**words, **({} if name in ("Sequential", "Identity") else {"device": "meta"}))
    _set_attributes(module, described["attributes"])
    for key, inside in described["inside"].items():
        module.add_module(key, make_module(inside))
    _derive(module, described["derived"])
    return module


def _derive(module: Any, derived: dict[str, Any]) -> None:
    import torch

    for name, one in derived.items():
        if one["codec"] not in codecs.CODECS:
            raise StoreError(f"the file keeps {name} as {one['codec']!r}, which no codec reads")
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in one["fields"].items()}
        codec = codecs.CODECS[one["codec"]](**fields)
        derive(module, name, codec, as_parameters(codec, {part: torch.empty(0) for part in one["parts"]}, trained=True))
