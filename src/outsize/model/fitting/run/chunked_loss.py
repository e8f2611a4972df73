"""The output head and its cross entropy in pieces, so that the logits of a whole batch never exist.

In: hidden states, the head's weight and the labels. Out: the summed loss and the count of labels, with gradients to
both. The gradients are made in the forward pass, piece by piece, while a piece's logits are there: the head's product
is not computed twice. A model's last linear layer hands on a tensor that only stands for its logits; a cross entropy
takes the loss from where they come from, and whatever else is done to them makes them first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from outsize.core.errors import InputError
from outsize.model.fitting.run.forward_functions import other_forwards
from outsize.model.torch_port.dispatch import no_subclass_functions, unseen
from outsize.model.torch_port.objects import has_hooks


def chunked_cross_entropy(
    hidden: Any, weight: Any, labels: Any, *, bias: Any = None, chunks: int = 8, ignore_index: int = -100
) -> tuple[Any, Any]:
    """(total, count) of `cross_entropy(hidden @ weight.T + bias, labels)`: total / count is its mean.

    `hidden` is [..., features], `labels` [...] of the same leading shape. Under autocast the product runs in its type.
    """
    if hidden.shape[:-1] != labels.shape:
        raise InputError(f"hidden states {tuple(hidden.shape)} and labels {tuple(labels.shape)} do not belong together")
    total = _Pieces.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), chunks, ignore_index,
        hidden.device.type, True,
    )  # fmt: skip
    return total, (labels != ignore_index).sum()


def _autocast_type(kind: str) -> Any:
    """The lower type in which products run now on a kind of device, or None."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _Pieces(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, chunks: int, ignored: int, kind: str, wide: bool
    ) -> Any:  # fmt: skip
        lower = _autocast_type(kind)
        with torch.autocast(kind, enabled=False):
            matrix = weight if lower is None else weight.to(lower)
            offset = bias if bias is None or lower is None else bias.to(lower)
            gradients = _Gradients(ctx.needs_input_grad, hidden, weight, bias, matrix)
            size = -(-hidden.shape[0] // max(1, min(chunks, hidden.shape[0])))
            total = None
            for start in range(0, hidden.shape[0], size):
                rows, wanted = hidden[start : start + size].to(matrix.dtype), labels[start : start + size]
                lost = _piece(gradients, start, (rows, matrix, offset, wanted), ignored, wide)
                total = lost if total is None else total + lost
        ctx.gradients = gradients
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, factor: Any) -> Any:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError("the loss in pieces keeps its gradients for one backward pass only")
        hidden = None if found.hidden is None else found.hidden.to(ctx.dtype).mul_(factor)
        rest = [None if value is None else value.mul_(factor) for value in (found.weight, found.bias)]
        return hidden, *rest, None, None, None, None, None


class _Gradients:
    """Gradients of the summed loss, filled piece by piece; None where nobody wants one."""

    __slots__ = ("bias", "hidden", "weight")

    def __init__(self, needed: Any, hidden: Any, weight: Any, bias: Any, matrix: Any) -> None:
        self.hidden = torch.empty_like(hidden, dtype=matrix.dtype) if needed[0] else None
        self.weight = torch.zeros_like(weight) if needed[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    def __bool__(self) -> bool:
        return not (self.hidden is None and self.weight is None and self.bias is None)

    def add(self, start: int, slope: Any, rows: Any, matrix: Any, counts: Any) -> None:
        """`slope`: gradient of a piece's logits; `counts`: one for labels that count, zero for those left out."""
        if self.hidden is not None:
            torch.mm(slope, matrix, out=self.hidden[start : start + rows.shape[0]])
            self.hidden[start : start + rows.shape[0]].mul_(counts)
        if self.weight is not None and self.weight.dtype == rows.dtype:
            self.weight.addmm_(slope.t(), rows * counts)
        elif self.weight is not None:
            self.weight.add_(torch.mm(slope.t(), rows * counts))
        if self.bias is not None:
            self.bias.add_(torch.mm(slope.t(), counts).flatten())


def _piece(gradients: _Gradients, start: int, given: Any, ignored: int, wide: bool) -> Any:
    """Summed loss of some rows; their part of the gradients is added."""
    rows, matrix, offset, wanted = given
    scores = functional.linear(rows, matrix, offset)
    scores = torch.log_softmax(scores.float() if wide else scores, -1)
    counted = wanted != ignored
    place = torch.where(counted, wanted, 0).unsqueeze(1)
    picked = scores.gather(1, place)
    total = -torch.where(counted, picked.squeeze(1), 0.0).sum()
    if gradients:
        slope = scores.exp_().scatter_(1, place, picked.exp() - 1.0).to(matrix.dtype)
        del scores
        gradients.add(start, slope, rows, matrix, counted.unsqueeze(1).to(matrix.dtype))
    return total


@dataclass(slots=True, eq=False)
class Heads:
    """How heads are replaced, and what became of their logits."""

    chunks: int
    kind: str
    """Kind of device; a tensor without contents does not know."""
    taken: int = 0
    """How often a cross entropy took its loss from them."""
    made: int = 0
    """How often something else wanted the logits themselves."""


class _Logits(torch.Tensor):  # type: ignore[misc]
    """Stands for `linear(hidden, weight, bias)`: its shape, type and device, one element of memory."""

    _source: Any
    _made: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = f"get {func.__self__.__name__}"
        with no_subclass_functions():
            rule = _RULES.get(name)
            found = rule(func, args, kwargs) if rule is not None else NotImplemented
            if found is not NotImplemented:
                return found
        return func(*_made(args), **_made(kwargs))


def _stand_for(hidden: Any, head: Any, heads: Heads, wide: bool = False) -> Any:
    """The tensor that stands for a head's logits; `wide`: they were cast to float32."""
    dtype = torch.float32 if wide else (_autocast_type(heads.kind) or hidden.dtype)
    blank = hidden.detach().new_empty((1,), dtype=dtype).expand(*hidden.shape[:-1], head.weight.shape[0])
    logits = unseen(blank.as_subclass, _Logits)
    logits._source, logits._made = (hidden, head, heads, wide), None
    return logits


def _made(value: Any) -> Any:
    """The real logits in the place of what stands for them."""
    if isinstance(value, _Logits):
        if value._made is None:
            hidden, head, heads, wide = value._source
            heads.made += 1
            made = functional.linear(hidden, head.weight, head.bias)
            value._made = made.float() if wide else made
        return value._made
    if isinstance(value, list | tuple):
        return type(value)(_made(item) for item in value)
    return {key: _made(item) for key, item in value.items()} if isinstance(value, dict) else value


def _look(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _same_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """A change of shape that keeps rows whole happens to the hidden states."""
    logits = args[0]
    blank = func(logits, *args[1:], **kwargs)
    hidden, head, heads, wide = logits._source
    if blank.dim() < 2 or blank.shape[-1] != logits.shape[-1] or blank.stride(-1) != 0 or logits.dim() < 2:
        return NotImplemented
    if func.__name__ == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        plain = all(item is Ellipsis or isinstance(item, slice | int) for item in index)
        reaches = len(index) == logits.dim() if Ellipsis not in index else index[-1] is not Ellipsis
        if not plain or (reaches and index[-1] != slice(None)):
            return NotImplemented
        return _stand_for(hidden[args[1]], head, heads, wide)
    return _stand_for(hidden.reshape(*blank.shape[:-1], hidden.shape[-1]), head, heads, wide)


def _widen(func: Any, args: Any, kwargs: Any) -> Any:
    blank = func(args[0].new_empty(1), *args[1:], **kwargs)
    hidden, head, heads, _ = args[0]._source
    if blank.dtype != torch.float32 or blank.device != args[0].device:
        return NotImplemented
    return _stand_for(hidden, head, heads, wide=True)


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    said = {"ignore_index": -100, "reduction": "mean", **dict(zip(names, args, strict=False)), **kwargs}
    logits, labels = said["input"], said["target"]
    unusual = said.get("label_smoothing") or any(
        said.get(name) is not None for name in ("weight", "size_average", "reduce")
    )
    if unusual or not hasattr(logits, "_source") or logits.dim() != 2 or labels.dim() != 1:
        return NotImplemented
    if said["reduction"] not in ("mean", "sum") or labels.dtype.is_floating_point:
        return NotImplemented
    hidden, head, heads, wide = logits._source
    heads.taken += 1
    ignored, wide = said["ignore_index"], wide or _autocast_type(heads.kind) is not None
    given: tuple[Any, ...] = (hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():  # an autograd function is told of tensors that want gradients all the same
        given = tuple(tensor if tensor is None else tensor.detach() for tensor in given)
    total = _Pieces.apply(*given, labels, heads.chunks, ignored, heads.kind, wide)
    return total if said["reduction"] == "sum" else total / (labels != ignored).sum()


_RULES: dict[str, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(
        (
            "size", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "get_device", "element_size", "__len__",
            "__hash__", "get shape", "get dtype", "get device", "get ndim", "get is_cuda", "get is_cpu", "get is_meta",
            "get requires_grad", "get layout", "get is_nested", "get is_sparse", "get is_quantized", "get is_mps",
            "get grad_fn", "untyped_storage", "storage_offset", "stride", "is_contiguous",
        ),
        _look,
    ),
    **dict.fromkeys(("view", "reshape", "flatten", "__getitem__", "unsqueeze", "squeeze"), _same_rows),
    "contiguous": lambda func, args, kwargs: args[0],
    "float": _widen,
    "to": _widen,
    "cross_entropy": _cross_entropy,
}  # fmt: skip
"""Name of a function -> what is done instead of making the logits."""


def find_head(model: Any, ran: list[str]) -> str | None:
    """The linear layer that ran last, where its output is larger than its input: its logits may be a loss's input."""
    modules = dict(model.named_modules())
    linear = [name for name in ran if type(modules[name]) is torch.nn.Linear]
    if not linear:
        return None
    head = modules[linear[-1]]
    hooked = has_hooks(head) or "forward" in head.__dict__
    return None if hooked or head.out_features <= head.in_features else linear[-1]


@contextlib.contextmanager
def chunked_heads(model: Any, names: tuple[str, ...], chunks: int, kind: str, always: bool = False) -> Iterator[Heads]:
    """Heads hand on what stands for their logits, in training only or always."""
    heads = Heads(chunks, kind)

    def forward(head: Any, hidden: Any) -> Any:
        if not always and not torch.is_grad_enabled():
            return functional.linear(hidden, head.weight, head.bias)
        return _stand_for(hidden, head, heads)

    with other_forwards() as put:
        for name, module in model.named_modules():
            if name in names:
                put(module, functools.partial(forward, module))
        yield heads
