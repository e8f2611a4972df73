"""What a plan was made for: the step, the machine, the model, the batch and the optimizer, in lines that can be compared.

In: a checked request. Out: sections of lines, the same in every process for the same work; and the first line that differs
between two of them. Numbers that a schedule changes (the learning rate) and weights themselves are none of it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from outsize.allocator.settings import VARIABLES
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.saved.code import digest_of_code
from outsize.model.torch_port.objects import is_compiled

Lines = dict[str, str]
Basis = Mapping[str, Mapping[str, str]]
"""Section -> name -> what it was."""

SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Numbers of an optimizer that change while it trains."""


def basis_of(request: Request) -> dict[str, Lines]:
    """Of a request that is not spread over ranks."""
    work = request.work
    sections: dict[str, Callable[[], Lines]] = {
        "step": lambda: _step(request),
        "machine": lambda: _machine(request),
        "model": lambda: _model(work.model),
        "batch": lambda: {path: _outline(tensor) for path, tensor in batches.tensors_of(request.batch).items()},
        "optimizer": lambda: _optimizer(work.model, work.optimizer),
        "code": lambda: _code(request),
        "budget": lambda: _budget(request),
    }
    return {name: lines() for name, lines in sections.items()}


def find_difference(then: Basis, now: Basis) -> str:
    """What of `now` is another than it was `then`, in a few words; empty where nothing is."""
    for section, lines in now.items():
        before = then.get(section, {})
        for name in (*lines, *before):
            was, is_now = before.get(name), lines.get(name)
            if was != is_now:
                return f"{section}: {name:.120} {_shorten(was)} and {_shorten(is_now, now=True)}"
    return ""


def _shorten(value: str | None, now: bool = False) -> str:
    if value is None:
        return "is not there" if now else "was not there"
    return f"{'is' if now else 'was'} {value:.120}"


def _step(request: Request) -> Lines:
    work = request.work
    kind = "training step" if request.call is None else "inference"
    device = work.device
    lower = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "kind": f"{kind} of a model on the {'host' if request.host is not None else 'device'}",
        "own_step": str(request.own_step),
        "allow": request.allow,
        "without": ", ".join(sorted(request.without)) or "nothing",
        "clip": str(work.clip is not None),
        "scaler": str(work.scaler is not None),
        "autocast": str(lower).removeprefix("torch."),
        "weights from files": str(request.host is not None and request.host.files is not None),
    }


def _machine(request: Request) -> Lines:
    """What bytes depend on beside the work."""
    found = {"torch": torch.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    device = request.device
    found["device"] = device.type
    if device.type == "cuda":
        there = torch.cuda.is_available()
        card = torch.cuda.get_device_properties(device) if there else None
        found["card"] = f"{card.name} with {card.total_memory} bytes" if card is not None else "not there"
        found["allocator"] = next((os.environ[name] for name in VARIABLES if name in os.environ), "as it comes")
    return found


def _model(model: Any) -> Lines:
    """Modules, parameters and buffers, with those that are tied."""
    found: Lines = {}
    for name, module in model.named_modules():
        compiled = ", compiled" if is_compiled(module) else ""
        mode = "in training" if module.training else "in evaluation"
        detail = module.extra_repr() if type(module).__module__.startswith("torch.") else ""
        found[f"module {name or 'itself'}"] = f"{type(module).__qualname__}({detail}) {mode}{compiled}"
    first: dict[int, str] = {}
    for kind, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            owner = first.setdefault(id(tensor), name)
            trained = " trained" if tensor.requires_grad else ""
            found[f"{kind} {name}"] = f"tied to {owner}" if owner != name else f"{_outline(tensor)}{trained}"
    return found


def _outline(tensor: Any) -> str:
    """Shape, dtype, and the layout where it is not the usual one."""
    kind = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}"
    return f"{tuple(tensor.shape)} {kind}{strides}"


def _optimizer(model: Any, optimizer: Any) -> Lines:
    if optimizer is None:
        return {"kind": "none"}
    found = {"kind": type(optimizer).__qualname__}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: _option(value) for name, value in group.items() if name not in ("params", *SCHEDULED)}
        said = ", ".join(f"{name} {value}" for name, value in sorted(options.items()) if value)
        found[f"group {number}"] = said
        found[f"parameters of group {number}"] = ", ".join(names.get(id(one), "another") for one in group["params"])
    return found


def _option(value: Any) -> str:
    """What an option of a group is for its bytes: a number is zero or not."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "nonzero" if value else "zero"
    return str(value) if value is None or isinstance(value, bool | str) else ""


def _code(request: Request) -> Lines:
    """Digests of the user's own loss (or call) and of the classes of the model that are not torch's."""
    called = request.call or request.work.loss
    kinds = dict.fromkeys(type(module) for module in request.work.model.modules())
    own = {f"class {kind.__qualname__}": digest_of_code(kind) for kind in kinds if not _is_torchs(kind)}
    return {"loss" if request.call is None else "call": digest_of_code(called), **own}


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _budget(request: Request) -> Lines:
    names = ("of the device", "of the host")
    return {name: str(allowance.bytes) for name, allowance in zip(names, request.budgets, strict=False)}
