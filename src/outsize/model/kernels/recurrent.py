"""What cuDNN's recurrent layers and torch's fused cells return and take on a card.

In: the arguments of these operators. Out: their results, and the bytes inside them. Sizes were measured on an H200
(cuDNN 9.19). What is kept for the backward pass is exact. The workspace is within a few percent for LSTM and GRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.kernels.call_events import RESULT, CallEvent
from outsize.model.torch_port.objects import sizeof

MiB = 2**20

KEPT = {2: 5, 3: 6, 1: 1, 0: 1}
"""cuDNN's number -> values kept for the backward pass, per hidden unit and time step."""

GATES = {2: 4, 3: 3, 1: 2, 0: 2}
"""cuDNN's number -> values in the workspace, per hidden unit and time step."""

DROPOUT_STATE = 6_488_064
"""Random numbers' state on an H200, made once and kept."""

STATES = 6
"""Values in the workspace per hidden unit, layer and sequence."""


def views(tensors: Any, dtype: Any = None) -> list[Any]:
    """Tensors of the same shapes, all in one new block."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype or tensors[0].dtype, device=tensors[0].device)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


# what the operators return


def _rnn(func: Any, args: Any, kwargs: Any) -> Any:
    """What the layer returns, with the block that cuDNN keeps for the backward pass in its true size."""
    out = list(func(*args, **kwargs))
    x, kind, hidden, layers, dropout, train, both = args[0], args[6], args[7], args[9], args[11], args[12], args[13]
    sides = 2 if both else 1
    units = _rows(x) * hidden * sides
    kept = 0
    if train and torch.is_grad_enabled():
        kept = units * x.element_size() * (layers * KEPT[kind] + layers - 1) + 256
        kept += (layers - 1) * _padded(x, args[14]) * hidden * sides * sides // 8 if dropout else 0
    if args[10]:  # batch first: the result is a view of one that has time first
        time_first = torch.empty(out[0].shape[1], out[0].shape[0], out[0].shape[2], dtype=x.dtype, device="meta")
        out[0] = time_first.transpose(0, 1)
    out[3] = torch.empty(kept, dtype=torch.uint8, device="meta")
    out[4] = torch.empty(0, dtype=x.dtype, device="meta")
    return tuple(out)


def _rnn_backward(func: Any, args: Any, kwargs: Any) -> Any:
    x, weights, hx, cx = args[0], args[1], args[4], args[5]
    return torch.empty_like(x), torch.empty_like(hx), None if cx is None else torch.empty_like(cx), views(weights)


def _gru_fused(func: Any, args: Any, kwargs: Any) -> Any:
    hx = args[2]
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_fused_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, _, biased = args
    rows, hidden = grad.shape
    sums = grad.new_empty(3 * hidden) if biased else None
    gates = grad.new_empty(rows, 3 * hidden)
    return (
        gates,
        grad.new_empty(rows, 3 * hidden),
        grad.new_empty(rows, hidden),
        sums,
        None if sums is None else sums.clone(),
    )


SHAPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten._cudnn_rnn.default": _rnn,
    "aten._cudnn_rnn_backward.default": _rnn_backward,
    "aten._thnn_fused_gru_cell.default": _gru_fused,
    "aten._thnn_fused_gru_cell_backward.default": _gru_fused_backward,
}
"""Operator -> its results."""


# what is inside them


def forward_events(scratch: Any, args: Any, results: Any) -> Iterator[CallEvent]:
    """Results, workspace and what is kept, in cuDNN's order."""
    x, dropout = args[0], args[11] if args[12] else 0.0
    if dropout and scratch.first("dropout state", "any"):
        yield CallEvent("keep", "dropout state", DROPOUT_STATE)
    if args[10]:
        yield CallEvent("take", "time first", sizeof(x))
    yield from (RESULT,) * 3
    yield CallEvent("take", "workspace", workspace(x, args[1], args[6], args[7], args[9], args[13], args[14], dropout))
    yield RESULT


def backward_events(scratch: Any, args: Any, results: Any) -> Iterator[CallEvent]:
    """The data's gradient first, then the weights'."""
    x, hx, cx, out, first = args[0], args[4], args[5], args[6], args[14]
    inside = workspace(x, args[1], args[10], args[11], args[13], args[17], args[18], args[15] if args[16] else 0.0)
    for name in ("state's gradient", "cell's gradient")[: 1 if cx is None else 2]:
        yield CallEvent("take", name, sizeof(hx))
    if first:
        yield CallEvent("take", "input", sizeof(x))
        yield CallEvent("take", "output", sizeof(out))
    yield from (RESULT,) * (2 if cx is None else 3)
    yield CallEvent("take", "workspace", inside)
    yield CallEvent("free", "workspace")
    if first:
        yield CallEvent("free", "output")
        yield CallEvent("free", "input")
        yield CallEvent("take", "input again", sizeof(x))
    yield RESULT
    yield CallEvent("take", "second workspace", inside)
    yield CallEvent("free", "second workspace")


def workspace(x: Any, weights: Any, kind: int, hidden: int, layers: int, both: bool, sizes: Any, dropout: float) -> int:
    """Bytes inside a call of cuDNN: 8 MiB a layer and direction, the weights, and the gates of all time steps."""
    sides, element = 2 if both else 1, int(x.element_size())
    units = _rows(x) * hidden * sides
    sequences = sizes[0] if sizes else min(int(x.shape[0]), int(x.shape[1]))
    more = 2 if both else int(bool(dropout) and layers > 1)
    values = units * (GATES[kind] + more) + STATES * sequences * hidden * layers * sides
    if not sizes:  # padded data is copied in and out
        values += int(x.numel()) + units
    return layers * sides * 8 * MiB + element * (sum(int(w.numel()) for w in weights) + values)


def _padded(x: Any, sizes: Any) -> int:
    """Time steps if all sequences were as long as the longest."""
    return sizes[0] * len(sizes) if sizes else _rows(x)


def _rows(x: Any) -> int:
    """Time steps of all sequences."""
    return int(x.numel()) // int(x.shape[-1])
