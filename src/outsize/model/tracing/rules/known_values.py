"""What a trace does when a step reads values of a tensor without contents.

In: an operator whose result depends on contents (`.item()`, `nonzero`, indexing by a mask). Out: the real result where the
contents are known, else a result chosen by the rules below and a note. Small tensors made on the host keep their contents (a
count of steps, a table of drop rates, a list of lengths), so that most reads are answered exactly.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.torch_port.dispatch import has_modes, map_tensors, no_functions, no_modes, tensors_in, torch_off
from outsize.model.torch_port.objects import storage_key
from outsize.model.tracing.trace import Trace

KEEP_ELEMENTS = 4096
"""The most elements of a tensor whose contents are kept: indices and lengths are small, data is not."""

DRAWN_ELEMENTS = 2**22
"""Most whole numbers that are drawn for real at once: an order of samples is longer than a batch."""

ADVANCED_ELEMENTS = 2**24
"""Most fractions that are drawn for real in a trace, only so that whole numbers drawn later are those of a real run."""

KEEP_BYTES = 8 * KEEP_ELEMENTS
"""Largest real storage whose contents are kept."""

ZERO_ELEMENTS = 2**24
"""Most elements of an operator without a shape rule that is run on zeros."""

PLAIN = ("arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor")
"""Operators whose results are known on a card too: positions and masks, not random weights."""


UNWRITTEN = ("empty", "new_empty", "_efficientzerotensor")
"""Operators that make unwritten tensors; the last one makes a tensor without memory."""

DRAWN = ("rand", "uniform", "normal", "bernoulli")
"""Words in the names of operators that draw numbers."""


def shadow(tracer: Trace, tensor: Any) -> Any:
    """The tensor with its real contents, or None where they are not known."""
    with no_functions():
        if tensor.device.type == "cpu":
            return tensor.detach()
        storage = tracer.ledger.values.get(storage_key(tensor))
        if storage is None:
            return None
        with unseen():
            plain = torch.empty(0, dtype=tensor.dtype)
            return plain.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def run_on_contents(tracer: Trace, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator gives for the real contents of its operands, which are all known."""
    return func(*replace_tensors(args, functools.partial(shadow, tracer)), **on_cpu(kwargs))


def on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operator that is run for real."""
    return {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs


def replace_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists and tuples with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(replace_tensors(item, change) for item in value)
    return value


def keep(tracer: Trace, base: Any, storage: Any) -> None:
    """Remember a copy of the contents of a small real storage, which `base` stands for, so that the real one can be
    freed."""
    if storage.nbytes() <= KEEP_BYTES:
        with torch_off():
            tracer.ledger.values[storage_key(base)] = storage.cpu().clone()


def unseen() -> Any:
    """Turn off all modes. Inside an operator none is on, and this takes no time."""

    return no_modes() if has_modes() else contextlib.nullcontext()


def item(tracer: Trace, tensor: Any) -> Any:
    """A Python number for a one-element tensor: the real one if known, else a likely one and a note."""
    known = shadow(tracer, tensor)
    if known is not None:
        tracer.chance |= storage_key(tensor) in tracer.ledger.drawn
        return known.item()
    held = tracer.ledger.of(tensor)
    source = held.op if held is not None else ""
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
    tracer.note_value("a value read on the host", held, guess=whole or tracer.owners.phase() == "optimizer")
    if tensor.dtype == torch.bool:
        return "all" in source or "eq" in source or "isfinite" in source
    if tensor.dtype.is_floating_point:  # what is left out by chance (a layer, a path) is there
        return 1.0 if any(word in source for word in DRAWN) else 0.0
    return 1 if not tensor.dtype.is_complex else 0j


def real(tracer: Trace, tensor: Any, what: str) -> Any:
    """A real tensor of the same shape: its contents if known, else zeros and a note."""
    known = shadow(tracer, tensor)
    if known is not None:
        tracer.chance |= storage_key(tensor) in tracer.ledger.drawn
        return known
    tracer.note_value(
        f"contents read by {what}()",
        tracer.ledger.of(tensor),
        guess=not tensor.is_floating_point() and tensor.dtype != torch.uint8,
    )  # bytes are pictures
    with torch_off():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def run_on_zeros(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Results without contents of an operator that has no shape rule, by running it on zeros; None where that is not possible."""
    if sum(t.numel() for t in tensors_in((args, kwargs))) > ZERO_ELEMENTS:
        return None
    with torch_off():
        try:
            here = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs))
            real = func(*here[0], **{**here[1], **({"device": "cpu"} if "device" in kwargs else {})})
        except (NotImplementedError, RuntimeError):
            return None
        out = map_tensors(lambda t: torch.empty_like(t, device="meta"), real)
    tracer.note_value(f"the result of {func}, run on zeros for its shape,", None, guess=True)
    return out


def _nonzero(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tracer.note_value("the number of non-zero elements, taken as all of them", tracer.ledger.of(args[0]))
    count = args[0].numel()
    if count <= tracer.keep:  # then it is known where they are: modules are looked up by it
        return tracer.known_like(torch.ones(args[0].shape).nonzero(), tracer.ledger.label_of(args[0]) or tracer.device)
    return torch.empty_strided((count, args[0].dim()), (1, count), dtype=torch.int64, device="meta")


def _masked_select(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tracer.note_value("the elements that a mask selects, taken as all of them", tracer.ledger.of(args[0]))
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return torch.empty(shape.numel(), dtype=args[0].dtype, device="meta")


def _unique(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tracer.note_value("the number of distinct values, taken as all", tracer.ledger.of(args[0]))
    count = args[0].numel()
    index = torch.empty(args[0].shape, dtype=torch.int64, device="meta")
    return (
        torch.empty(count, dtype=args[0].dtype, device="meta"),
        index,
        torch.empty(count, dtype=torch.int64, device="meta"),
    )


def _repeat(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        tracer.note_value(
            "the length after repeat_interleave, taken as one each", tracer.ledger.of(args[0]), guess=True
        )
    return torch.empty(size or args[0].numel(), dtype=torch.int64, device="meta")


def _bincount(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    bins = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if not bins:
        tracer.note_value("the largest value, taken as the number of values", tracer.ledger.of(args[0]), guess=True)
    whole = weights is None or not weights.dtype.is_floating_point
    dtype = (torch.int64 if weights is None else torch.float64) if whole else weights.dtype
    return torch.empty(bins or args[0].numel(), dtype=dtype, device="meta")


def _index(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing by a mask is indexing by where it is true: as many as it has elements at most."""
    indices: list[Any] = []
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
            continue
        known = shadow(tracer, index)
        if known is None:
            tracer.note_value("the elements that a mask selects, taken as all of them", tracer.ledger.of(index))
        count = index.numel() if known is None else int(known.count_nonzero())
        indices += [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]
    return func(args[0], indices, *args[2:], **kwargs)


def _true(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    tracer.note_value("a comparison, taken as true", tracer.ledger.of(args[0]))
    return True


def _nothing(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    return None


RULES = {
    "aten._local_scalar_dense.default": lambda tracer, func, args, kwargs: item(tracer, args[0]),
    "aten.nonzero.default": _nonzero,
    "aten.masked_select.default": _masked_select,
    "aten._unique2.default": _unique,
    "aten._unique.default": _unique,
    "aten.unique_consecutive.default": _unique,
    "aten.repeat_interleave.Tensor": _repeat,
    "aten.bincount.default": _bincount,
    "aten.index.Tensor": _index,
    "aten.equal.default": _true,
    "aten._assert_async.msg": _nothing,
    "aten._assert_async.default": _nothing,
}
"""Operator -> what to do where the contents are not known."""
