"""What an operator takes on the CPU: by a rule, or measured in one real call.

In: an operator and its arguments without contents. Out: the order in which a call takes and frees blocks and makes its results.
Kernels of the CPU take scratch that no shape shows: copies in another layout, columns, sums per thread. One call on zeros shows
it, and torch's own profiler counts it. A call is made only for an operator of torch's own, once for each set of shapes, and only
if its tensors and its work are small. Larger ones go by the rules in `kernels/cpu.py`; where there is no rule, a note says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from outsize.core.units import MiB
from outsize.model.kernels import cpu
from outsize.model.kernels.call_events import RESULT, CallEvent
from outsize.model.torch_port.dispatch import map_tensors, profiled_bytes, tensors_in, torch_off
from outsize.model.tracing.rules import packed_sequences as packed
from outsize.model.tracing.rules.operators import Operator
from outsize.model.tracing.rules.result_shapes import describe
from outsize.model.tracing.trace import Trace

MOST_BYTES = 64 * MiB
"""Largest arguments and results of a call that is made."""
MOST_FLOPS = 10**9
UNSAFE = (
    "lu_solve", "lu_unpack", "ldl_", "ormqr", "orgqr", "householder", "mkldnn", "sparse", "flash", "nested", "quant",
    "pin_memory", "aten.set_.", "resize", "embedding_bag_backward",
)  # fmt: skip
"""Words in the names of operators whose kernels trust the contents of their arguments, or that have rules of their own."""

QUIET = {
    "set_", "resize_", "resize_as_", "_unsafe_view",
    "mm", "addmm", "bmm", "baddbmm", "dot", "mv", "addmv", "cat", "stack", "clone", "copy_", "_to_copy", "sum", "mean",
    "amax", "amin", "argmax", "argmin", "max", "min", "any", "all", "embedding", "gather", "index", "index_select",
    "index_put_", "index_put", "index_add", "scatter", "scatter_add", "native_layer_norm", "native_batch_norm",
    "native_group_norm", "native_dropout", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "arange", "nll_loss2d_forward",
    "nll_loss2d_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "cumsum",
    "slice_backward", "select_backward", "constant_pad_nd", "zeros", "ones", "full", "tril", "triu", "norm",
    "linalg_vector_norm", "zero_", "fill_",
}  # fmt: skip
"""Operators that take little inside at any size, if their arguments are contiguous."""


COPYING = {
    "native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward", "hardtanh_backward",
    "avg_pool2d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "embedding_dense_backward",
}  # fmt: skip
"""Operators that may copy the arguments that are not contiguous, and take nothing else."""

MAKING = ("empty", "full", "zeros", "ones", "rand", "new_", "normal", "uniform")
"""How the names of operators begin that only fill a tensor."""


class Call(NamedTuple):
    """One call as it was seen."""

    events: tuple[CallEvent, ...]
    order: tuple[int, ...]
    """Which result each `RESULT` is, and then those that were not new."""
    strides: tuple[tuple[int, ...], ...]
    """How each result lies in memory: some kernels choose otherwise than torch's shape rules."""


_SEEN: dict[Any, Call | None] = {}
"""Operator and shapes -> what a call did; None where none was made."""


def follow(
    tracer: Trace, operator: Operator, args: Any, kwargs: dict[str, Any], out: Any, results: list[Any], flat: list[Any]
) -> tuple[Iterable[CallEvent], list[Any]]:
    """(what a call does, its results in the order in which they are made); `flat`: the tensors among the arguments."""
    if operator.view or operator.name in packed.RULES:
        return (), results
    tensors = [*flat, *tensors_in(kwargs), *results]
    if not tensors:  # a profiler's mark
        return (), results
    if operator.pointwise and _is_plain(tensors):
        return (), results
    call = _seen(operator, args, kwargs, out, results, tensors)
    if call is not None:
        new = sum(event is RESULT for event in call.events)
        for place in call.order[:new]:
            _lay_out(results[place], call.strides[place])
        # in a backward pass the columns come in another order than shapes tell, and are copied
        copy = [CallEvent("take", "copy", 0, more=_extent(args[0]))] if operator.base == "col2im" else []
        return (*copy, *call.events), [results[place] for place in call.order]
    if operator.base in COPYING:
        return (CallEvent("take", "copies", 0, more=sum(map(_extra, flat))),), results
    quiet = operator.pointwise or operator.base in QUIET or operator.base.startswith(MAKING)
    if not quiet and operator.name not in cpu.ROWS:
        tracer.guess(f"what {operator.name} takes inside on the CPU is not known")
    return cpu.events_of(operator.name, args, results), results


def _seen(
    operator: Operator, args: Any, kwargs: dict[str, Any], out: Any, results: list[Any], tensors: list[Any]
) -> Call | None:
    key: list[Any] = [id(operator.func), torch.get_num_threads()]
    if not operator.name.startswith("aten.") or any(word in operator.name for word in UNSAFE):
        return None
    if not describe((*args, *kwargs, *kwargs.values()), key) or any(
        t.layout != torch.strided or t.is_neg() for t in tensors
    ):
        return None
    whole = tuple(key)
    if whole not in _SEEN:
        work = 0 if operator.flops is None else operator.flops(*args, **kwargs, out_val=out)
        small = sum(map(_extent, tensors)) <= MOST_BYTES and work <= MOST_FLOPS
        _SEEN[whole] = _measure(operator.func, args, kwargs, results) if small else None
    return _SEEN[whole]


def _is_plain(tensors: list[Any]) -> bool:
    """True where an element-wise operator needs nothing but its results: one dtype and one order of elements."""
    wide = [t for t in tensors if t.dim()]
    return all(t.is_contiguous() and t.dtype == wide[0].dtype and not t.is_complex() for t in wide)


def _measure(func: Any, args: Any, kwargs: dict[str, Any], results: list[Any]) -> Call | None:
    """What one real call on zeros does; None where it fails, or where it gives something else."""
    with torch_off(), contextlib.ExitStack() as stack:
        try:
            here, named = map_tensors(_zeros, (args, kwargs))
            if "device" in named:
                named["device"] = torch.device("cpu")
            if torch.Tag.nondeterministic_seeded in func.tags:
                stack.enter_context(torch.random.fork_rng(devices=[]))
            changes, out = profiled_bytes(lambda: func(*here, **named))
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None
        made = tensors_in(out)
        if len(made) != len(results):
            return None
    return _as_events(changes, made)


def _as_events(changes: list[int], made: list[Any]) -> Call:
    """Blocks that are freed again, and the results between them."""
    ends: list[int | None] = [None] * len(changes)
    open_blocks: list[int] = []
    for place, change in enumerate(changes):
        if change > 0:
            open_blocks.append(place)
        elif change < 0:
            begin = next((b for b in reversed(open_blocks) if changes[b] == -change), None)
            if begin is not None:
                open_blocks.remove(begin)
                ends[begin] = place
    begins = {end: begin for begin, end in enumerate(ends) if end is not None}
    left = {place: t.untyped_storage().nbytes() for place, t in enumerate(made)}
    events, order = [], []
    for place, change in enumerate(changes):
        if place in begins:
            events.append(CallEvent("free", str(begins[place])))
        elif change > 0:
            result = None if ends[place] is not None else next((i for i, size in left.items() if size == change), None)
            if result is None:
                events.append(CallEvent("take", str(place), change))
            else:
                del left[result]
                order.append(result)
                events.append(RESULT)
    return Call(tuple(events), (*order, *left), tuple(t.stride() for t in made))


def _lay_out(tensor: Any, strides: tuple[int, ...]) -> None:
    """Give a new result the layout that the kernel gives it."""
    if tensor.stride() != strides and tensor.is_meta and not tensor.storage_offset() and len(strides) == tensor.dim():
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
        if whole and last + 1 == tensor.numel():
            with torch_off():
                tensor.as_strided_(tensor.shape, strides)


def _zeros(tensor: Any) -> Any:
    """A real tensor of zeros with the same layout."""
    numbers = torch.zeros(_extent(tensor) // tensor.element_size(), dtype=tensor.dtype)
    made = numbers.as_strided(tensor.shape, tensor.stride())
    return made.conj() if tensor.is_conj() else made


def _extent(tensor: Any) -> int:
    """Bytes between the first and the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * int(tensor.element_size())


def _extra(tensor: Any) -> int:
    """Bytes of a contiguous copy; 0 for a tensor that is in order, its channels first or last."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return 0 if last or tensor.is_contiguous() else int(tensor.numel()) * int(tensor.element_size())
