"""A stage on which a step believes that its card is there.

In: a step that says `.cuda()`, `device="cuda"`, `x.is_cuda`, `torch.cuda.synchronize()`. Out: the same calls answered without a
card: every tensor lives on torch's meta device and a label in the ledger says where the step thinks it is. Device names are
rewritten where Python calls torch (a torch-function mode), because torch would start CUDA before the dispatcher sees them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outsize.model.attention import attend
from outsize.model.recurrent import flatten

if TYPE_CHECKING:
    from outsize.model.trace import Tracer

GETTERS = ("device", "is_cuda", "is_cpu", "is_meta")


def label_for(tracer: Tracer, device: Any) -> str:
    """`0`, `"cuda:0"` -> `"cuda:0"`, `"cuda"` -> the card on which the step runs; anything else by its type."""
    import torch

    if isinstance(device, int):
        return f"cuda:{device}"
    found = torch.device(device)
    if found.type == "cuda":
        return tracer.card if found.index is None else f"cuda:{found.index}"
    return str(found.type)


def make_function_mode(tracer: Tracer) -> Any:
    """The mode that answers Python's calls into torch."""
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    getters = {getattr(tensor, name).__get__: name for name in GETTERS}
    special: dict[Any, Callable[[Any, Any, Any], Any]] = {
        tensor.to: _to, tensor.cuda: _cuda, tensor.cpu: _cpu, tensor.tolist: _tolist, tensor.numpy: _numpy,
        tensor.__repr__: _repr, tensor.__format__: _format, tensor.get_device: _get_device, tensor.pin_memory: _pin,
        tensor.is_pinned: _is_pinned,
        torch.tensor: _literal, torch.as_tensor: _literal, torch.asarray: _literal, tensor.__array__: _numpy,
        torch.nn.functional.scaled_dot_product_attention: attend, tensor.__deepcopy__: _deepcopy,
        tensor.new_tensor: _new_tensor, torch.nn.functional.linear: _linear,
    }  # fmt: skip

    class Stage(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = getters.get(func)
            if name is not None:
                return _get(tracer, args[0], name, func)
            rule = special.get(func)
            if rule is not None:
                return rule(tracer, func, (args, kwargs))
            if kwargs.get("device") is not None:
                label = label_for(tracer, kwargs["device"])
                with tracer.placing(label):
                    return func(*args, **{**kwargs, "device": "meta"})
            return func(*args, **kwargs)

    return Stage()


def _get(tracer: Tracer, value: Any, name: str, func: Any) -> Any:
    import torch

    label = tracer.ledger.label_of(value)
    if label is None:
        return func(value)
    kind = label.partition(":")[0]
    if name == "device":
        return torch.device("cpu" if kind == "pinned" else label)
    return name == f"is_{'cpu' if kind == 'pinned' else kind}"


def _to(tracer: Tracer, func: Any, call: Any) -> Any:
    """`x.to(...)` in all its forms: a new label means a copy, the same label none."""
    import torch

    (value, *rest), kwargs = call
    kwargs = dict(kwargs)
    copy = kwargs.pop("copy", None)
    flags = [place for place, item in enumerate(rest) if isinstance(item, bool)]
    if len(flags) == 2:
        copy = rest.pop(flags[1])
    if rest and isinstance(rest[0], torch.Tensor):
        label, rest = tracer.ledger.label_of(rest[0]), [rest[0].dtype, *rest[1:]]
        device, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
    else:
        device, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
        label = None if device is None else label_for(tracer, device)
    wanted: dict[str, Any] = {"dtype": dtype, "memory_format": layout, "copy": copy or None}
    return move(tracer, value, label, func, {name: item for name, item in wanted.items() if item is not None})


def move(tracer: Tracer, value: Any, label: str | None, func: Any, kwargs: Any) -> Any:
    """`value` on another device, or with another dtype, as `Tensor.to` does it."""
    value = tracer.adopt(value)
    if label in (None, "meta", tracer.ledger.label_of(value)):  # torch's own code finds the device to be meta
        return func(value, **kwargs) if kwargs else value
    with tracer.placing(label):
        return func(value, **{"dtype": value.dtype, **kwargs, "copy": True})


def _cuda(tracer: Tracer, func: Any, call: Any) -> Any:
    (value, *rest), kwargs = call
    device = rest[0] if rest else kwargs.get("device")
    import torch

    return move(tracer, value, tracer.card if device is None else label_for(tracer, device), torch.Tensor.to, {})


def _cpu(tracer: Tracer, func: Any, call: Any) -> Any:
    import torch

    return move(tracer, call[0][0], "cpu", torch.Tensor.to, {})


def _pin(tracer: Tracer, func: Any, call: Any) -> Any:
    import torch

    return move(tracer, call[0][0], "pinned", torch.Tensor.to, {})


def _is_pinned(tracer: Tracer, func: Any, call: Any) -> Any:
    return tracer.ledger.label_of(call[0][0]) == "pinned"


def _get_device(tracer: Tracer, func: Any, call: Any) -> Any:
    label = tracer.ledger.label_of(call[0][0]) or "cpu"
    return int(label.partition(":")[2]) if ":" in label else -1


def _literal(tracer: Tracer, func: Any, call: Any) -> Any:
    """`torch.tensor(data, device=...)`: made for real, since its values may steer the step, then moved."""
    import torch

    args, kwargs = call
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    value = func(*args, **kwargs)
    if not isinstance(value, torch.Tensor):
        return value
    return move(tracer, value, None if device is None else label_for(tracer, device), torch.Tensor.to, {})


def _linear(tracer: Tracer, func: Any, call: Any) -> Any:
    """A linear layer adds its bias in place, but not while a mode in Python looks on: the tracer has to know."""
    before, tracer.in_linear = tracer.in_linear, True
    try:
        return func(*call[0], **call[1])
    finally:
        tracer.in_linear = before


def _new_tensor(tracer: Tracer, func: Any, call: Any) -> Any:
    import torch

    (value, data, *_), kwargs = call
    label = kwargs.get("device") or tracer.ledger.label_of(value) or "cpu"
    made = torch.tensor(data, dtype=kwargs.get("dtype") or value.dtype)
    return move(tracer, made, label_for(tracer, label), torch.Tensor.to, {})


def _tolist(tracer: Tracer, func: Any, call: Any) -> Any:
    return tracer.real_value(call[0][0], "tolist").tolist()


def _numpy(tracer: Tracer, func: Any, call: Any) -> Any:
    return tracer.real_value(call[0][0].detach(), "numpy").numpy()


def _format(tracer: Tracer, func: Any, call: Any) -> Any:
    """A single number in a text is formatted as a number, as torch does with contents."""
    (value, how), _ = call
    return repr(value) if value.dim() else format(value.item(), how)


def _repr(tracer: Tracer, func: Any, call: Any) -> Any:
    value = call[0][0]
    return f"tensor(..., size={tuple(value.shape)}, dtype={value.dtype}, device='{tracer.ledger.label_of(value)}')"


def _deepcopy(tracer: Tracer, func: Any, call: Any) -> Any:
    """A copy of a tensor; torch's own would look into storages that hold nothing."""
    import torch

    (value, memo), _ = call
    if id(value) not in memo:
        copy = value.detach().clone()
        if isinstance(value, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, value.requires_grad)
        else:
            copy.requires_grad_(value.requires_grad)
        memo[id(value)] = copy
    return memo[id(value)]


@contextlib.contextmanager
def pretend(tracer: Tracer, capability: tuple[int, int], total: int) -> Iterator[None]:
    """`torch.cuda` answers as if the card were there, and does nothing."""
    import torch
    import torch.utils.checkpoint

    if torch.__version__ < (
        2,
        8,
    ):  # whoever makes an optimizer loads it, and it looks at classes that are replaced here
        importlib.import_module("torch._dynamo")
    properties = SimpleNamespace(
        name="outsize card", major=capability[0], minor=capability[1], total_memory=total, multi_processor_count=132,
        gcnArchName="", warp_size=32, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": int(tracer.card[5:]), "synchronize": None, "empty_cache": None,
        "get_device_properties": properties, "get_device_capability": capability, "get_device_name": properties.name,
        "is_bf16_supported": True, "manual_seed": None, "manual_seed_all": None, "seed": None, "set_device": None,
        "reset_peak_memory_stats": None, "reset_max_memory_allocated": None, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "memory_stats": {},
        "mem_get_info": (total, total), "_lazy_init": None, "init": None, "is_initialized": True, "ipc_collect": None,
        "get_rng_state": None, "set_rng_state": None, "is_current_stream_capturing": False, "memory_summary": "",
        "current_stream": _Stream(), "default_stream": _Stream(), "set_per_process_memory_fraction": None,
    }  # fmt: skip
    replaced: list[tuple[Any, str, Any]] = [(torch.cuda, name, _answer(value)) for name, value in answers.items()]
    replaced += [
        (torch.cuda, "Stream", _Stream), (torch.cuda, "Event", _Stream), (torch.cuda, "stream", _stream),
        (torch.cuda, "device", _stream), (torch.cuda.amp.common, "amp_definitely_not_available", _answer(False)),
        (torch.nn.RNNBase, "flatten_parameters", flatten(tracer)), (torch, "compile", tracer.compile),
        (torch.Tensor, "record_stream", _answer(None)),
    ]  # fmt: skip
    # Functions written in Python would take the stage off for all they call; inside them it has to stay.
    for owner in (torch.nn.functional, torch.functional, torch.nn.init):
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            replaced.append((owner, name, _has_subclass))
    replaced.append((torch.jit, "script", _scripting(torch.jit.script, replaced)))
    with contextlib.ExitStack() as stack:
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.callback(checks.update, dict(checks))
        checks["default"] = _shape_and_dtype
        for owner, name, value in replaced:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)
        yield


def _scripting(script: Callable[..., Any], replaced: list[tuple[Any, str, Any]]) -> Callable[..., Any]:
    """`torch.jit.script` with torch as it is: a library that is first imported by the step may compile functions then."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    before = {(id(owner), name): vars(owner).get(name) for owner, name, _ in replaced}

    def compile(*args: Any, **kwargs: Any) -> Any:
        for owner, name, _ in replaced:
            if name in vars(owner) and (id(owner), name) in before:
                setattr(owner, name, before[id(owner), name])
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return script(*args, **kwargs)
        finally:
            for owner, name, value in replaced:
                if name in vars(owner):
                    setattr(owner, name, value)

    return compile


def _shape_and_dtype(value: Any) -> dict[str, Any]:
    """What checkpointing compares between forward and recomputation; the device is the stage's own affair."""
    return {"shape": value.shape, "dtype": value.dtype}


def _has_subclass(*values: Any) -> bool:
    """True where a tensor subclass wants to be asked, the stage itself not counted."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    flat = values[0] if len(values) == 1 and isinstance(values[0], tuple | list) else values
    return any(isinstance(v, torch.Tensor) and type(v) not in plain and _asks(type(v)) for v in flat)


def _asks(kind: Any) -> bool:
    import torch

    return kind.__torch_function__ is not torch._C._disabled_torch_function_impl and "Buffer" not in kind.__name__


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _Stream:
    """Stands for CUDA streams and events: work is in order, so there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _answer(0.0 if name == "elapsed_time" else name == "query")


def _stream(*args: Any, **kwargs: Any) -> _Stream:
    return _Stream()
