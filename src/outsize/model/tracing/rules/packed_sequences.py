"""Packed sequences without contents: torch's own code would read the lengths in memory.

In: the calls behind `pack_padded_sequence`, `pad_packed_sequence` and a recurrent layer on packed data. Out: what they
return, made by the same steps as in ATen (native/PackedSequence.cpp). The lengths come from small host tensors whose
values the trace knows. If it does not know them, every sequence is taken as long as possible, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.torch_port.dispatch import torch_off
from outsize.model.tracing.rules import known_values as values
from outsize.model.tracing.trace import Trace


def pack(tracer: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """(packed data, how many sequences go on at each step)."""
    data, lengths, batch_first = args
    known = values.shadow(tracer, lengths)
    steps, count = (data.shape[1], data.shape[0]) if batch_first else (data.shape[0], data.shape[1])
    if known is None:
        tracer.note_value("the lengths of packed sequences, taken as the longest,", tracer.ledger.of(lengths))
        tracer.guessing = count > 1  # a single sequence is even, however long
        known = torch.full((count,), steps, dtype=torch.int64)
    else:
        tracer.guessing = False
    sizes = [int((known > step).sum()) for step in range(int(known[0]))]
    packed = torch.empty(sum(sizes), *data.shape[2:], dtype=data.dtype, device="meta")
    return packed, tracer.known_like(torch.tensor(sizes, dtype=torch.int64), "cpu")


def pack_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, shape, _, batch_first = args
    size = list(shape)
    if batch_first:
        size[:2] = size[1::-1]
    made = torch.empty(size, dtype=grad.dtype, device="meta")
    return made.transpose(0, 1) if batch_first else made


def padded(tracer: Trace) -> Callable[..., Any]:
    """What stands for `_pad_packed_sequence` while the trace runs."""

    def pad(data: Any, batch_sizes: Any, batch_first: bool, padding: Any, total: int) -> Any:
        sizes = sizes_of(tracer, batch_sizes)
        shape = [total if total > 0 else len(sizes), sizes[0], *data.shape[1:]]
        out = torch.full(shape, padding, dtype=data.dtype, device=data.device)
        offset = begin = 0
        for step in range(len(sizes) + 1):
            going = sizes[step] if step < len(sizes) else 0
            if going != sizes[begin]:
                rows = sizes[begin] * (step - begin)
                part = data.narrow(0, offset, rows).view(step - begin, sizes[begin], *data.shape[1:])
                out.narrow(0, begin, step - begin).narrow(1, 0, sizes[begin]).copy_(part)
                offset, begin = offset + rows, step
        lengths = torch.tensor([sum(size > place for size in sizes) for place in range(sizes[0])])
        return (out.transpose(0, 1) if batch_first else out), lengths

    return pad


def contents(tracer: Trace, batch_sizes: Any) -> Any:
    """A real tensor with how many sequences go on at each step."""
    known = values.shadow(tracer, batch_sizes)
    return torch.ones(batch_sizes.shape, dtype=torch.int64) if known is None else known


def sizes_of(tracer: Trace, batch_sizes: Any) -> list[int]:
    """How many sequences go on at each step."""
    with torch_off():
        return [int(size) for size in contents(tracer, batch_sizes)]


def is_even(tracer: Trace, batch_sizes: Any) -> bool:
    """True where all sequences are known to be equally long: torch then runs an LSTM as on a plain tensor."""
    return not tracer.guessing and len(set(sizes_of(tracer, batch_sizes))) == 1


RULES = {**values.RULES, "aten._pack_padded_sequence.default": pack}
"""Operator -> what to do where the contents are not known."""
