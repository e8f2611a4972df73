"""What the card's kernels allocate besides their results: one row per operator.

In: an operator's name, arguments and results. Out: blocks that live only inside the call, before or after its results are made,
and blocks that stay (cuBLAS workspaces). The rows come from traces recorded on an H200 with torch 2.11 by
`benchmarks/record_cuda.py`. An operator without a row allocates only its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from outsize.model.kernels.call_events import CallEvent
from outsize.model.kernels.convolution import Layer, call_bound, layer_of, weight_bound
from outsize.model.kernels.convolution_table import table
from outsize.model.kernels.layouts import copy_bytes, works_last
from outsize.model.kernels.normalization import backward_blocks, backward_copies, forward_blocks
from outsize.model.kernels.recurrent import backward_events, forward_events
from outsize.model.kernels.reduction import buffer_bytes
from outsize.model.torch_port.objects import sizeof

KiB, MiB = 2**10, 2**20

MEASURED = (9, 0)
"""Compute capability of the card that the convolutions were measured on."""


Size = int | tuple[int, int]
"""Bytes of a block, or (likely, at most) where only that is known."""


class Blocks(NamedTuple):
    """Sizes in bytes, in the order in which they are asked for."""

    before: tuple[int, ...] = ()
    """Alive from before the results are made to the end of the call."""
    after: tuple[Size, ...] = ()
    """Asked for after the results, alive to the end of the call."""
    each: tuple[Size, ...] = ()
    """Allocated after the first result, the second, ... and freed before the next; 0 for none."""
    stays: tuple[int, ...] = ()
    """Kept forever."""


class Scratch:
    """The card the rows are for, and what is already there."""

    def __init__(self, capability: tuple[int, int], processors: int = 132) -> None:
        self.capability = capability
        self.processors = processors
        self.cublas = 32 * MiB if capability >= (9, 0) else 8_519_680
        self.cublas_lt = 1 * MiB
        self._there: set[tuple[str, str]] = set()

    def first(self, what: str, thread: str) -> bool:
        """True the first time that a thread uses a library."""
        if (what, thread) in self._there:
            return False
        self._there.add((what, thread))
        return True


Row = Callable[[Scratch, Any, Any, str], Blocks]
NOTHING = Blocks()


def blocks_of(scratch: Scratch, name: str, args: Any, results: list[Any], thread: str) -> Blocks:
    """What one call allocates besides its results."""
    row = ROWS.get(name) or ROWS.get(name.rpartition(".")[0])
    return NOTHING if row is None else row(scratch, args, results, thread)


def _copies(*tensors: Any) -> tuple[int, ...]:
    """A contiguous copy of each tensor that is not contiguous."""
    return tuple(sizeof(t) for t in tensors if t is not None and not t.is_contiguous())


def _copy(position: int) -> Row:
    """The row of an operator that first makes an argument contiguous."""
    return lambda scratch, args, results, thread: Blocks(before=_copies(args[position]))


def _one_more(position: int) -> Row:
    """The row of an operator that takes a block of an argument's size after its results."""
    return lambda scratch, args, results, thread: Blocks(after=(sizeof(args[position]),))


def _result_before(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    """A block of the result's size, before the result."""
    return Blocks(before=(sizeof(results[0]),))


def _small(size: int) -> Row:
    """The row of an operator that takes some bytes after its results, whatever it is given."""
    return lambda scratch, args, results, thread: Blocks(after=(size,))


def _matmul(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    return Blocks(stays=(scratch.cublas,)) if scratch.first("cublas", thread) else NOTHING


def _addmm(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    stays = _matmul(scratch, args, results, thread).stays
    if args[0].dim() == 1 and scratch.first("cublasLt", thread):
        stays += (scratch.cublas_lt,)
    return Blocks(stays=stays)


def _convolution(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    x, weight, _, stride, _, dilation, transposed, _, groups = args[:9]
    last = works_last(x, weight)
    if transposed:  # the forward call of a transposed convolution is the input's gradient of a plain one
        sizes = _inside(scratch, layer_of(results[0], weight, x.shape, stride, dilation, groups, last))[1]
    else:
        sizes = _inside(scratch, layer_of(x, weight, results[0].shape, stride, dilation, groups, last))[0]
    return Blocks(before=copy_bytes(x, last) + copy_bytes(weight, last), after=_some(sizes))


def _convolution_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    grad, x, weight, _, stride, _, dilation, transposed, _, groups, wanted = args[:11]
    first, second = (grad, x.shape) if transposed else (x, grad.shape)
    last = works_last(x, weight)
    layer = layer_of(first, weight, second, stride, dilation, groups, last)
    inside = _inside(scratch, layer)
    sizes = []
    if wanted[0]:
        sizes.append(inside[0 if transposed else 1])
    if wanted[1]:
        sizes.append(inside[2])
    copies = copy_bytes(grad, last) + copy_bytes(x, last) + copy_bytes(weight, last)
    return Blocks(before=copies, each=tuple(sizes))


def _inside(scratch: Scratch, layer: Layer) -> tuple[tuple[int, int], ...]:
    """(likely, at most) of the three calls of a convolution: as measured or as in a similar layer, and the bound."""
    most = (call_bound(layer), call_bound(layer), weight_bound(layer))
    found = table().look_up(layer)
    if found is None:  # a byte of doubt says that nothing was measured
        return tuple((size, size + 1 if size else 0) for size in most)
    sure = table().sure(layer) if scratch.capability == MEASURED else (False,) * 3
    return tuple(
        (size or 0, size if known and size is not None else max(size or 0, bound))
        for size, known, bound in zip(found, sure, most, strict=True)
    )


def _some(size: tuple[int, int]) -> tuple[Size, ...]:
    return (size,) if size[1] else ()


def _reduce(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    x = args[0]
    given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else None
    axes = range(x.dim()) if given is None or given == [] else ([given] if isinstance(given, int) else given)
    cast = (
        (sizeof(x) // x.element_size() * 8,)
        if not x.dtype.is_floating_point and results and results[0].dtype != x.dtype
        else ()
    )
    return Blocks(before=cast, after=buffer_bytes(x, {axis % max(1, x.dim()) for axis in axes}, scratch.processors))


def _norm_backward(partials: int) -> Row:
    """Copies of what does not lie row by row, and partial sums of the gradients of weight and bias where rows are many."""

    def row(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
        rows = args[0].numel() // math.prod(args[2])
        partial = () if rows < 64 * 1024 else (rows // 64 * math.prod(args[2]) * 4,) * partials
        return Blocks(after=_copies(args[0], args[1]) + partial)

    return row


def _batch_norm(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    return Blocks(after=forward_blocks(args[0], args[1], args[5]))


def _batch_norm_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    grad, x, weight = args[:3]
    return Blocks(before=backward_copies(grad, x, weight), after=backward_blocks(x, weight))


def _group_norm(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    return Blocks(before=_copies(args[0]), after=(4 * args[3] * args[4],) * 2)


def _group_norm_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    return Blocks(after=(4 * args[5] * args[6],) * 3)


def _safe_softmax(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    x = args[0]
    return Blocks(after=(x.numel(), x.numel() // max(1, x.shape[-1])))


def _roll(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    return Blocks(before=(sizeof(args[0]),) if len(args[1]) > 1 else ())


def _embedding_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    grad, indices, rows = args[:3]
    count = int(indices.numel())
    if count <= 3072:
        return Blocks(before=_copies(grad, indices))
    parts = count // 10 + min(count, rows)
    last = grad.shape[-1] * max(4, grad.element_size())
    return Blocks(before=(8 * count,) * 2, after=(8 * count,) * 4 + (8 * parts, parts * last))


def _index_put(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    accumulate = len(args) > 3 and args[3]
    if not accumulate:
        return NOTHING
    count = max((int(index.numel()) for index in args[1] if index is not None), default=0)
    return Blocks(after=(8 * count, *_copies(args[2]), 8 * count, 8 * count, 8 * count))


def _efficient_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    q = args[1]
    heads, length, width = q.shape[0] * q.shape[1], q.shape[2], q.shape[3]
    tile, columns = (128, 64) if 64 < width <= 128 else ((64, 64) if width <= 64 else (64, 128))
    rows, cols = -(-length // tile), -(-width // columns)
    sums = 4 * heads * length
    store = heads * rows * cols * (4 * tile * columns + 16)
    return Blocks(after=(4 * int(q.numel()), sums, sums, store))


def _cudnn_attention_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    """A float32 gradient of the queries and two rows of sums; grouped keys and values are first expanded to all
    heads."""
    q, k = args[1], args[2]
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    size = 4 * int(q.numel()) + 4 * rows + 256
    if k.shape[1] != q.shape[1]:
        size += 4 * int(k.numel()) * q.shape[1] // k.shape[1]
    return Blocks(after=(size,))


def _gru_backward(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    return Blocks(after=buffer_bytes(results[0], {0}, scratch.processors) if args[2] else ())


def _sort(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    count = int(args[0].numel())
    return Blocks(after=(sizeof(args[0]), 8 * count, 8 * count))


def _cast_sum(scratch: Scratch, args: Any, results: Any, thread: str) -> Blocks:
    x = args[0]
    return Blocks(before=(8 * int(x.numel()),) if not x.dtype.is_floating_point and x.element_size() < 8 else ())


CALL_EVENTS: dict[str, Callable[[Scratch, Any, Any], Iterator[CallEvent]]] = {
    "aten._cudnn_rnn.default": forward_events,
    "aten._cudnn_rnn_backward.default": backward_events,
}
"""Operator -> what happens inside it, where that is more than blocks around its results."""


ROWS: dict[str, Row] = {
    "aten._ctc_loss_backward": _one_more(6),
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.baddbmm": _matmul,
    "aten.addmm": _addmm,
    "aten._addmm_activation": _addmm,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten.sum.dim_IntList": _reduce,
    "aten.sum.default": _reduce,
    "aten.mean": _reduce,
    "aten.linalg_vector_norm": _reduce,
    "aten.native_layer_norm": _copy(0),
    "aten.native_layer_norm_backward": _norm_backward(partials=2),
    "aten._fused_rms_norm": _copy(0),
    "aten._fused_rms_norm_backward": _norm_backward(partials=1),
    "aten.native_batch_norm": _batch_norm,
    "aten.native_batch_norm_backward": _batch_norm_backward,
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _group_norm_backward,
    "aten._softmax_backward_data": _one_more(0),
    "aten._safe_softmax": _safe_softmax,
    "aten.roll": _roll,
    "aten.embedding": _copy(1),
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten._index_put_impl_": _index_put,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten._scaled_dot_product_cudnn_attention": _small(256),
    "aten._scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten._thnn_fused_gru_cell_backward": _gru_backward,
    "aten._pack_padded_sequence": _result_before,
    "aten.max_pool2d_with_indices_backward": _copy(0),
    "aten.sort": _sort,
    "aten.cumsum": _cast_sum,
}
"""Operator, with or without its overload -> the rule for what it takes inside."""
