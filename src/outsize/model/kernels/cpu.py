"""What the CPU's kernels take besides their results: convolutions, LSTM layers, attention. oneDNN computes on copies with the
channels in blocks.

In: an operator's name, arguments and results. Out: the order in which blocks and results come and go. The rules were
found by measuring the resident bytes of single layers with torch 2.13. Input, output and weights are each copied into
blocks of 16 channels (padded to a multiple). The result is made in blocks and then copied out. A transposed
convolution holds one more block of its output's size. The bound adds the partial sums of a weight gradient, one per
thread. Types that oneDNN does not know (float64) go to torch's own kernels, which copy each window into columns
(im2col). Where a picture's channels lie side by side, only weights are copied, each group's padded to whole blocks. An
LSTM is one operator per layer and direction; it keeps a workspace for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.kernels.attention import host_backward_events, host_events
from outsize.model.kernels.call_events import RESULT, CallEvent
from outsize.model.torch_port.objects import sizeof

BLOCK = 16
"""Channels of a block if the processor has AVX-512; 8 otherwise."""
PLAIN = 4
"""Inputs of up to this many channels (usually pictures) are not copied."""
SMALL = 20480
"""Up to this many elements of a single input torch uses its own kernel."""
TIGHT = 9
"""Largest window of a depthwise layer whose weights oneDNN does not pad."""
SLACK = 16384
"""Bytes of small tables that oneDNN makes beside weights."""
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def events_of(name: str, args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """What one call on the CPU does, in order; nothing where it only makes its results."""
    row = ROWS.get(name)
    return iter(()) if row is None else row(args, results)


def _used(x: Any, weight: Any, groups: int) -> bool:
    """True if torch hands a convolution to oneDNN and oneDNN has to change the layout."""
    return bool(x.shape[0] > 1 or groups > 1 or x.numel() > SMALL or min(weight.shape[2:]) > 3)


def _channels_last(x: Any) -> bool:
    """True if a picture's channels lie side by side: oneDNN then copies only the weights."""
    return bool(x.dim() > 3 and x.stride()[1] == 1 and x.shape[1] > 1 and not x.is_contiguous())


def _weights_inside(x: Any, weight: Any, groups: int) -> tuple[int, int]:
    """Bytes of the weights as oneDNN lays them out beside channels that lie side by side: likely and at most. Each group's
    are padded to whole blocks; a depthwise layer's with a small window are not, nor those with eight channels a group.
    """
    window = math.prod(int(size) for size in weight.shape[2:])
    if window == 1 and groups == 1:
        return 0, 0
    outs, inside = int(weight.shape[0]) // groups, int(weight.shape[1])
    padded = (
        groups * math.prod(-(-size // BLOCK) * BLOCK for size in (outs, inside)) * window * int(weight.element_size())
    )
    tight = (outs == inside == 1 and window <= TIGHT) or min(outs, inside) >= BLOCK // 2
    most = padded + SLACK + (sizeof(x) if window == 1 else 0)
    return (sizeof(weight) if tight else padded), most


def _unknown(x: Any) -> bool:
    """True if oneDNN is missing or does not know the dtype: torch's own kernels then copy windows into columns."""
    return not torch.backends.mkldnn.is_available() or str(x.dtype) not in DTYPES


def _columns(x: Any, weight: Any, out: Any, groups: int, transposed: bool, dilation: Any, *, backward: bool) -> int:
    """Bytes of the columns that torch's own kernels make of one group, or of the whole batch if they make them at
    once."""
    window = math.prod(int(size) for size in weight.shape[2:])
    if window == 1 and x.shape[2:] == out.shape[2:]:
        return 0
    inside, places = (weight.shape[1], x.shape[2:]) if transposed else (x.shape[1] // groups, out.shape[2:])
    one = int(inside) * window * math.prod(int(size) for size in places) * int(x.element_size())
    alone = (backward or x.dim() == 5) if transposed else max(dilation) > 1
    return one if alone else int(x.shape[0]) * one


def _blocked(tensor: Any) -> int:
    """Bytes of a tensor with its channels in blocks."""
    shape = [int(size) for size in tensor.shape]
    full = -(-shape[1] // BLOCK) * BLOCK
    return shape[0] * full * math.prod(shape[2:]) * int(tensor.element_size())


def _read(x: Any) -> int:
    return 0 if x.shape[1] <= PLAIN else _blocked(x)


def _convolution(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    if _unknown(x):
        columns = _columns(x, weight, results[0], groups, transposed, args[5], backward=False)
        yield CallEvent("take", "columns", columns)
        if groups > 1:  # a copy of one group of the input, and all groups of the result before they are joined
            yield CallEvent("take", "groups", sizeof(x) // groups + sizeof(results[0]))
        elif transposed and x.dim() == 5:
            yield CallEvent("take", "input", sizeof(x))
        yield RESULT
        return
    if _channels_last(x):
        likely, most = _weights_inside(x, weight, groups)
        likely = min(likely, sizeof(weight)) if weight.shape[0] == groups and weight.shape[1] == 1 else likely
        yield CallEvent("take", "weight", likely, more=most - likely)
        yield RESULT
        return
    if not _used(x, weight, groups):
        yield CallEvent("take", "columns", _columns(x, weight, results[0], groups, transposed, args[5], backward=False))
        yield RESULT
        return
    out = _blocked(results[0])
    yield CallEvent("take", "input", _read(x))
    yield CallEvent("take", "weight", sizeof(weight))
    yield CallEvent("take", "output", out)
    if transposed:
        yield CallEvent("take", "second output", out)
    yield CallEvent("free", "input")
    yield CallEvent("free", "weight")
    yield RESULT


def _convolution_backward(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    grad, x, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
    if _unknown(x):
        yield from (RESULT,) * sum(map(bool, wanted[:2]))
        yield CallEvent("take", "columns", _columns(x, weight, grad, groups, args[7], args[6], backward=True))
        if groups > 1:  # copies of one group, and all groups of the gradients before they are joined
            yield CallEvent("take", "groups", (sizeof(x) + sizeof(grad)) // groups + sizeof(x) + sizeof(weight))
        if not grad.is_contiguous():
            yield CallEvent("take", "gradient", sizeof(grad))
        return
    if _channels_last(x):
        yield from (RESULT,) * len(results)
        likely, most = _weights_inside(x, weight, groups)
        if most:
            own = sizeof(weight)
            yield CallEvent("take", "weight's gradient", likely + own, more=most - likely + 4 * own + sizeof(x))
        return
    if not _used(x, weight, groups):
        yield from (RESULT,) * len(results)
        yield CallEvent("take", "columns", _columns(x, weight, grad, groups, args[7], args[6], backward=True))
        return
    if not grad.is_contiguous():
        yield CallEvent("take", "whole gradient", sizeof(grad))
    if wanted[0]:
        yield CallEvent("take", "gradient", _blocked(grad))
        yield CallEvent("take", "weight", sizeof(weight))
        yield CallEvent("take", "input's gradient", _blocked(x))
        yield CallEvent("free", "gradient")
        yield CallEvent("free", "weight")
        yield RESULT
        yield CallEvent("free", "input's gradient")
    if wanted[1]:
        yield CallEvent("take", "gradient", _blocked(grad))
        yield CallEvent("take", "input", _read(x))
        yield CallEvent("take", "weight's gradient", sizeof(weight), more=_partial_sums(grad, weight, groups))
        yield CallEvent("free", "gradient")
        yield CallEvent("free", "input")
        yield RESULT


def _partial_sums(grad: Any, weight: Any, groups: int) -> int:
    """Bytes of the sums that threads make of a weight's gradient; grouped layers also copy windows into columns."""
    threads = int(torch.get_num_threads())
    if groups == 1:
        return threads * sizeof(weight)
    columns = math.prod(int(size) for size in (*weight.shape[1:], *grad.shape[2:])) * int(weight.element_size())
    return (threads + 4) * sizeof(weight) + threads * columns


# small ones


def _pool_backward(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """Where channels lie side by side, indices and gradient may be copied into the input's order."""
    yield RESULT
    if _channels_last(args[1]):
        yield CallEvent("take", "copies", 0, more=sizeof(args[7]) + sizeof(args[1]))


def _abs(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """The size of complex numbers is computed as complex numbers."""
    if args[0].is_complex():
        yield CallEvent("take", "complex", sizeof(args[0]))
    yield RESULT


def _promoted(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """An operand of another dtype than the result's is cast as a whole first; a card casts element by element."""
    pair = [value for value in args[:2] if isinstance(value, torch.Tensor)]
    if len(pair) == 2 and pair[0].dtype != pair[1].dtype:
        common = torch.result_type(*pair)
        for place, value in enumerate(pair):
            if value.dim() and value.dtype != common:
                yield CallEvent("take", f"cast {place}", int(value.numel()) * common.itemsize)


LARGEST = 2
"""Number of the mode in which a bag is its largest elements."""


def _bag_backward(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """Indices are sorted and counted; of a maximum, what was largest is taken column by column from copies."""
    if args[8] == LARGEST:
        yield RESULT
        yield CallEvent("take", "copies", sizeof(args[5]) + sizeof(args[0]))
        return
    yield CallEvent("take", "sorted indices", 3 * sizeof(args[1]))
    yield RESULT


# recurrent layers

PAGE = 4096
"""Each part of the workspace fills whole pages."""
LINE = 16
"""Elements of a cache line: rows of gates and states are padded to whole lines."""


def takes_lstm(x: Any, state: Any, weights: Any) -> bool:
    """True where torch hands an LSTM on the CPU to oneDNN."""
    enabled = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    plain = state[0].shape[-1] == weights[1].shape[-1]  # no projection
    return bool(enabled and plain and x.numel() and str(x.dtype) == "torch.float32")


def run_lstm(
    x: Any, state: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
) -> Any:
    """The layer as torch runs it: one operator for each layer and direction."""
    x = (x.transpose(0, 1) if first else x).contiguous()
    hx, cx = (part.contiguous() for part in state)
    sides, each = (2 if both else 1), (4 if biases else 2)
    keeps = torch.is_grad_enabled()  # a workspace for the backward pass, also where the model only evaluates
    ends: list[Any] = []
    for layer in range(layers):
        outs = []
        for side in range(sides):
            index = layer * sides + side
            some = list(weights[index * each : (index + 1) * each])
            some += [torch.zeros_like(weight) for weight in some[: 4 - each]]
            out = torch.ops.aten.mkldnn_rnn_layer(
                x, *some, hx[index], cx[index], side > 0, [], 2, hx.shape[-1], layers, biases, both, first, keeps
            )
            outs.append(out[0])
            ends.append(out[1:3])
        x = outs[0] if sides == 1 else torch.cat(outs, -1)
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    hy, cy = (torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if first else x), hy, cy


def lstm_results(func: Any, args: Any, kwargs: Any) -> Any:
    """What one layer returns, with the workspace in its true size, which torch's shape rule leaves out."""
    out = list(func(*args, **kwargs))
    time, rows, width = args[0].shape
    hidden, train = args[10], args[15]
    steps = 2 * (time + 1) * rows  # states of this layer and the one below, before and after every step
    parts = (
        time * rows * _whole(4 * hidden), *(steps * _whole(max(width, hidden)),) * 3, *(steps * hidden,) * 2,
        time * rows * _whole(hidden),
    )  # fmt: skip
    size = sum(-(-4 * part // PAGE) * PAGE for part in parts)
    out[3] = torch.empty(size if train else 0, dtype=torch.uint8, device="meta")
    return tuple(out)


def lstm_gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """What the backward pass of one layer returns: a tensor for each bias (torch's shape rule gives one tensor
    twice)."""
    out = list(func(*args, **kwargs))
    out[4] = torch.empty_like(out[3])
    return tuple(out)


def _lstm(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """Results, and then the weights laid out for the kernel and the gates of every step."""
    yield from (RESULT,) * len(results)
    yield from _lstm_inside(args[0], args[1:3], args[10])
    time, rows, width = args[0].shape
    if not args[15] and width > args[10]:  # no workspace for a backward pass: states as wide as the input stand beside
        states = 4 * (time + 1) * rows * _whole(width)
        yield CallEvent("take", "states", states, more=states)


def _lstm_backward(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    grad = args[10]
    yield from (RESULT,) * len(results)
    if grad is not None and not grad.is_contiguous():
        yield CallEvent("take", "gradient", sizeof(grad))
    yield from _lstm_inside(args[0], args[1:3], args[15])


def _lstm_inside(x: Any, weights: Any, hidden: int) -> Iterator[CallEvent]:
    time, rows, _ = x.shape
    size = sum(map(sizeof, weights))
    yield CallEvent("take", "weights", size, more=size + size // 4)  # small batches want them in two orders
    yield CallEvent("take", "gates", 4 * rows * (time * _whole(4 * hidden) + 2 * _whole(hidden)), more=64 * 1024)


def _whole(numbers: int) -> int:
    """Elements of a row, padded to whole cache lines and so that rows do not collide in the cache."""
    full = -(-numbers // LINE) * LINE
    return full + LINE if full % 256 == 0 else full


ROWS: dict[str, Callable[[Any, list[Any]], Iterator[CallEvent]]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": host_events,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": host_backward_events,
    "aten.max_pool2d_with_indices_backward.default": _pool_backward,
    "aten.abs.default": _abs,
    **{
        f"aten.{name}.Tensor": _promoted
        for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "eq", "ne", "lt", "le", "gt", "ge")
    },
    "aten._embedding_bag_backward.default": _bag_backward,
    "aten.mkldnn_rnn_layer.default": _lstm,
    "aten.mkldnn_rnn_layer_backward.default": _lstm_backward,
}
"""Operator -> what happens inside it."""
