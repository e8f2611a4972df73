"""Answers a step's calls for a card that is not there.

In: a step that says `.cuda()`, `device="cuda"`, `x.is_cuda`, `torch.cuda.synchronize()`. Out: the same calls answered without a
card. Every tensor is on torch's meta device, and a label in the ledger says on which device the step has put it. Device names are
rewritten where Python calls torch (a torch-function mode), because torch would start CUDA before the dispatcher sees them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.core.errors import OutsizeError
from outsize.model.torch_port.dispatch import leaves_of, parse_to, torch_off
from outsize.model.torch_port.fake_cuda import card_rows
from outsize.model.torch_port.legacy_types import DTYPES, LegacyType, legacy_rows
from outsize.model.torch_port.parts import find_ours
from outsize.model.torch_port.patches import (
    checkpoints_compared_by,
    foreach_everywhere,
    inner_functions_seen,
    numbered_cards,
    replaced,
    scripting_undisturbed,
    steps_unmarked,
)
from outsize.model.tracing.rules import counts
from outsize.model.tracing.rules.attention_calls import attend
from outsize.model.tracing.rules.recurrent_layers import flatten
from outsize.model.tracing.trace import Trace

GETTERS = ("device", "is_cuda", "is_cpu", "is_meta")


def label_for(tracer: Trace, device: Any) -> str:
    """`0`, `"cuda:0"` -> `"cuda:0"`, `"cuda"` -> the card on which the step runs; anything else by its type."""
    if isinstance(device, int):
        return f"cuda:{device}"
    found = torch.device(device)
    if found.type == "cuda":
        return tracer.card if found.index is None else f"cuda:{found.index}"
    return str(found.type)


def make_function_mode(tracer: Trace) -> Any:
    """The mode that answers Python's calls into torch."""
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    getters = {getattr(tensor, name).__get__: name for name in GETTERS}
    special: dict[Any, Callable[[Any, Any, Any], Any]] = {
        tensor.to: _to, tensor.cuda: _cuda, tensor.cpu: _cpu, tensor.tolist: _tolist, tensor.numpy: _numpy,
        tensor.__repr__: _repr, tensor.__format__: _format, tensor.get_device: _get_device, tensor.pin_memory: _pin,
        tensor.is_pinned: _is_pinned,
        torch.tensor: _literal, torch.as_tensor: _literal, torch.asarray: _literal, tensor.__array__: _numpy,
        torch.nn.functional.scaled_dot_product_attention: attend, tensor.__deepcopy__: _deepcopy,
        tensor.item: _item, tensor.type: _type, tensor.new_tensor: _new_tensor, torch.nn.functional.linear: _linear,
        torch.group_norm: _group_norm,
    }  # fmt: skip

    class Stage(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if tracer.counted:
                counts.use_counts(tracer, (args, kwargs))
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


def _get(tracer: Trace, value: Any, name: str, func: Any) -> Any:
    label = tracer.ledger.label_of(value)
    if label is None:
        return func(value)
    kind = label.partition(":")[0]
    if name == "device":
        return torch.device("cpu" if kind == "pinned" else label)
    return name == f"is_{'cpu' if kind == 'pinned' else kind}"


def _to(tracer: Trace, func: Any, call: Any) -> Any:
    """`x.to(...)` in all its forms: a new label means a copy, the same label none."""
    (value, *rest), kwargs = call
    kwargs = dict(kwargs)
    copy = kwargs.pop("copy", None)
    flags = [place for place, item in enumerate(rest) if isinstance(item, bool)]
    if len(flags) == 2:
        copy = rest.pop(flags[1])
    if rest and isinstance(rest[0], torch.Tensor):
        label, rest = tracer.ledger.label_of(rest[0]), [rest[0].dtype, *rest[1:]]
        device, dtype, layout = parse_to(*rest, **kwargs)
    else:
        device, dtype, layout = parse_to(*rest, **kwargs)
        label = None if device is None else label_for(tracer, device)
    wanted: dict[str, Any] = {"dtype": dtype, "memory_format": layout, "copy": copy or None}
    return move(tracer, value, label, func, {name: item for name, item in wanted.items() if item is not None})


def move(tracer: Trace, value: Any, label: str | None, func: Any, kwargs: Any) -> Any:
    """`value` on another device, or with another dtype, as `Tensor.to` does it."""
    value = tracer.adopt(value)
    if label in (None, "meta", tracer.ledger.label_of(value)):  # torch's own code finds the device to be meta
        return func(value, **kwargs) if kwargs else value
    with tracer.placing(label):
        return func(value, **{"dtype": value.dtype, **kwargs, "copy": True})


def _cuda(tracer: Trace, func: Any, call: Any) -> Any:
    (value, *rest), kwargs = call
    device = rest[0] if rest else kwargs.get("device")
    return move(tracer, value, tracer.card if device is None else label_for(tracer, device), torch.Tensor.to, {})


def _cpu(tracer: Trace, func: Any, call: Any) -> Any:
    return move(tracer, call[0][0], "cpu", torch.Tensor.to, {})


def _pin(tracer: Trace, func: Any, call: Any) -> Any:
    return move(tracer, call[0][0], "pinned", torch.Tensor.to, {})


def _is_pinned(tracer: Trace, func: Any, call: Any) -> Any:
    return tracer.ledger.label_of(call[0][0]) == "pinned"


def _get_device(tracer: Trace, func: Any, call: Any) -> Any:
    label = tracer.ledger.label_of(call[0][0]) or "cpu"
    return int(label.partition(":")[2]) if ":" in label else -1


def _literal(tracer: Trace, func: Any, call: Any) -> Any:
    """`torch.tensor(data, device=...)`: made with its real values, because the step may depend on them, then moved."""
    args, kwargs = call
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    if args and isinstance(args[0], list | tuple):
        args = (_read_out(args[0]), *args[1:])
    if tracer.alone and not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(args)):
        with torch_off():
            value = tracer.take_over(func(*args, **kwargs))
    else:
        value = func(*args, **kwargs)
    if not isinstance(value, torch.Tensor):
        return value
    return move(tracer, value, None if device is None else label_for(tracer, device), torch.Tensor.to, {})


def _read_out(data: Any) -> Any:
    """Nested lists with the value of each tensor of one element, as torch reads them."""
    if isinstance(data, list | tuple):
        return [_read_out(value) for value in data]
    return data.item() if isinstance(data, torch.Tensor) and data.numel() == 1 else data


def _linear(tracer: Trace, func: Any, call: Any) -> Any:
    """A linear layer adds its bias in place, but not while a Python mode is active: the tracer has to know."""
    before, tracer.in_linear = tracer.in_linear, True
    try:
        return func(*call[0], **call[1])
    finally:
        tracer.in_linear = before


def _group_norm(tracer: Trace, func: Any, call: Any) -> Any:
    """On the host channels that lie side by side stay so; torch's rule for tensors without contents copies them."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {"weight": None, "bias": None, "eps": 1e-5, **dict(zip(names, call[0], strict=False)), **call[1]}
    x = given["input"]
    if x.dim() < 4 or x.is_contiguous() or not tracer.on_host(x):
        return func(*call[0], **call[1])
    if torch.is_grad_enabled():
        if x.dtype != torch.float32:
            tracer.guess(
                f"what GroupNorm in {x.dtype} takes inside on the CPU where channels lie side by side is not known"
            )
        return func(*call[0], **call[1])
    rows, channels = x.shape[:2]
    places, groups = x.shape[2:].numel(), given["num_groups"]
    return torch.native_group_norm(x, given["weight"], given["bias"], rows, channels, places, groups, given["eps"])[0]


def _new_tensor(tracer: Trace, func: Any, call: Any) -> Any:
    (value, data, *_), kwargs = call
    label = kwargs.get("device") or tracer.ledger.label_of(value) or "cpu"
    made = torch.tensor(data, dtype=kwargs.get("dtype") or value.dtype)
    return move(tracer, made, label_for(tracer, label), torch.Tensor.to, {})


def _type(tracer: Trace, func: Any, call: Any) -> Any:
    """`x.type()` and `x.type(torch.cuda.FloatTensor)`."""
    (value, *rest), kwargs = call
    wanted = rest[0] if rest else kwargs.get("dtype")
    if isinstance(wanted, str):
        wanted = getattr(torch.cuda if "cuda" in wanted else torch, wanted.rpartition(".")[2])
    if isinstance(wanted, LegacyType):
        return move(tracer, value, label_for(tracer, wanted.kind), torch.Tensor.to, {"dtype": wanted.dtype})
    if wanted is None and tracer.alone:
        place = "torch.cuda" if tracer.on_card(value) else "torch"
        dtype = str(value.dtype).rpartition(".")[2]
        return next((f"{place}.{name}" for name, known in DTYPES.items() if known == dtype), func(value))
    return func(*call[0], **kwargs)


def _item(tracer: Trace, func: Any, call: Any) -> Any:
    """A number that only adds up counts (of right answers) decides on no size, until it is used for one."""
    value = call[0][0]
    if tracer.alone and counts.is_count(tracer, value):
        return counts.count(tracer, value)
    return func(value)


def _tolist(tracer: Trace, func: Any, call: Any) -> Any:
    return tracer.real_value(call[0][0], "tolist").tolist()


def _numpy(tracer: Trace, func: Any, call: Any) -> Any:
    real = tracer.real_value(call[0][0].detach(), "numpy")
    dtype = call[0][1] if len(call[0]) > 1 else call[1].get("dtype")
    with torch_off():  # a mode would give NumPy the memory of a tensor without contents
        found = real.numpy()
    return found if dtype is None else found.astype(dtype)


def _format(tracer: Trace, func: Any, call: Any) -> Any:
    """A single number in a text is formatted as a number, as torch does with contents."""
    (value, how), _ = call
    return repr(value) if value.dim() else format(value.item(), how)


def _repr(tracer: Trace, func: Any, call: Any) -> Any:
    value = call[0][0]
    return f"tensor(..., size={tuple(value.shape)}, dtype={value.dtype}, device='{tracer.ledger.label_of(value)}')"


def _deepcopy(tracer: Trace, func: Any, call: Any) -> Any:
    """A copy of a tensor; torch's own would look into storages that hold nothing."""
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
def pretend(tracer: Trace, capability: tuple[int, int], total: int) -> Iterator[None]:
    """`torch.cuda` answers as if the card were there, and does nothing."""
    on_card = tracer.device != "cpu"
    rows = card_rows(int(tracer.card[5:]), capability, total, accelerator=on_card, there=on_card or not tracer.alone)
    rows += [(torch.nn.RNNBase, "flatten_parameters", flatten(tracer)), (torch, "compile", tracer.compile)]
    rows += [*inner_functions_seen(), *foreach_everywhere(), numbered_cards(), *steps_unmarked()]
    if tracer.alone:
        rows += legacy_rows()
        rows += [(torch, name, _taking_over(tracer, getattr(torch, name))) for name in ("from_numpy", "frombuffer")]
    rows.append(scripting_undisturbed(rows))
    with checkpoints_compared_by(_shape_and_dtype), replaced(rows):
        try:
            yield
        except Exception as error:
            ours = None if isinstance(error, OutsizeError) else find_ours(error)
            if ours is None:
                raise
            raise ours from error


def _taking_over(tracer: Trace, function: Any) -> Any:
    """A function whose real tensors only the trace sees; modes do not hear of its calls."""

    def made(*args: Any, **kwargs: Any) -> Any:
        with torch_off():
            real = function(*args, **kwargs)
        return tracer.take_over(real)

    return made


def _shape_and_dtype(value: Any) -> dict[str, Any]:
    """What checkpointing compares between the forward pass and the recomputation; the fake device is left out."""
    return {"shape": value.shape, "dtype": value.dtype}
