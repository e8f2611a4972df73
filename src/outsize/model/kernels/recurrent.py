"""Recurrent layers as cuDNN and torch's fused cells run them on a card.

In: the calls behind `torch.nn.LSTM`, `GRU`, `RNN` and their cells. Out: the operators that the card runs instead, what these
return, and the bytes inside them. cuDNN wants all weights of a layer in one block: they are moved there when the module comes to
the card, copied there in half precision under autocast, and their gradients come in one block as well. Sizes were read off an
H200 (cuDNN 9.19): what is kept for the backward pass is exact, the workspace within a few percent for LSTM and GRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from outsize.model.kernels import cpu as onednn
from outsize.model.torch_port.dispatch import aten_operator
from outsize.model.torch_port.objects import count_flat_weights, flat_weights, storage_key
from outsize.model.tracing import packed_sequences as packed
from outsize.model.tracing.ledger import RESULT, Move

if TYPE_CHECKING:
    from outsize.model.tracing.tracer import Tracer

MiB = 2**20

LAYERS = {
    f"{name}.{form}": kind
    for name, kind in (("lstm", 2), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 0))
    for form in ("input", "data")
}
"""Recurrent layer -> cuDNN's number for it."""

KEPT = {2: 5, 3: 6, 1: 1, 0: 1}
"""cuDNN's number -> values kept for the backward pass, per hidden unit and time step."""

GATES = {2: 4, 3: 3, 1: 2, 0: 2}
"""cuDNN's number -> values in the workspace, per hidden unit and time step."""

DROPOUT_STATE = 6_488_064
"""Random numbers' state on an H200, made once and kept."""

STATES = 6
"""Values in the workspace per hidden unit, layer and sequence."""


def replacements(tracer: Tracer) -> list[tuple[str, Callable[..., Any]]]:
    """(operator, what stands for it while a trace runs)."""
    rows = [(name, _layer(name, kind, tracer)) for name, kind in LAYERS.items()]
    return [*rows, ("gru_cell", _gru_cell(tracer)), ("lstm_cell", _lstm_cell(tracer))]


def _layer(name: str, kind: int, tracer: Tracer) -> Callable[..., Any]:
    import torch

    base, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, base), overload)

    def run(x: Any, state: Any, weights: Any, rest: Any, sizes: list[int]) -> Any:
        biases, layers, dropout, train, both, first = rest
        hx, cx = (state[0], state[1]) if kind == 2 else (state, None)
        if torch.is_autocast_enabled("cuda"):
            half = torch.float16  # whatever the autocast dtype is
            weights = _in_one_block(list(weights), half)
            hx, cx, x = hx.to(half), None if cx is None else cx.to(half), x.to(half)
        out = aten_operator("_cudnn_rnn")(
            x, weights, 4 if biases else 2, None, hx, cx, kind, hx.shape[-1], 0, layers, first, dropout, train, both, sizes, None
        )  # fmt: skip
        return out[:3] if kind == 2 else out[:2]

    def elsewhere(x: Any, state: Any, weights: Any) -> bool:
        hx = state[0] if kind == 2 else state
        return not tracer.on_card(x) or hx.shape[-1] != weights[1].shape[-1]

    def plain(x: Any, state: Any, weights: Any, *rest: Any) -> Any:
        if elsewhere(x, state, weights):
            if kind == 2 and not tracer.on_card(x) and onednn.takes_lstm(x, state, weights):
                return onednn.run_lstm(x, state, weights, *rest)
            return op.decompose(x, state, weights, *rest)
        return run(x, state, weights, rest, [])

    def on_packed(x: Any, batch_sizes: Any, state: Any, weights: Any, *rest: Any) -> Any:
        if elsewhere(x, state, weights):
            even = kind == 2 and not tracer.on_card(x) and packed.is_even(tracer, batch_sizes)
            if even and onednn.takes_lstm(x, state, weights):
                whole = x.view(batch_sizes.shape[0], -1, x.shape[-1])
                out, *ends = onednn.run_lstm(whole, state, weights, *(*rest, False))
                return out.flatten(0, 1), *ends
            return op.decompose(x, packed.contents(tracer, batch_sizes), state, weights, *rest)
        return run(x, state, weights, (*rest, False), packed.sizes_of(tracer, batch_sizes))

    return on_packed if overload == "data" else plain


def _in_one_block(weights: list[Any], dtype: Any) -> list[Any]:
    """Copies of the weights in another precision, side by side in one block; each gradient is cast back on its own."""
    import torch

    class Side(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, *given: Any) -> Any:
            context.dtypes = [weight.dtype for weight in given]
            return tuple(views(given, dtype))

        @staticmethod
        def backward(context: Any, *grads: Any) -> Any:
            return tuple(
                None if grad is None else grad.to(kind) for grad, kind in zip(grads, context.dtypes, strict=True)
            )

    return list(Side.apply(*weights))


def views(tensors: Any, dtype: Any = None) -> list[Any]:
    """Tensors of the same shapes, all in one new block."""
    import torch

    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype or tensors[0].dtype, device=tensors[0].device)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def flatten(tracer: Tracer) -> Callable[[Any], None]:
    """Stands for `RNNBase.flatten_parameters`: on the card, the weights of a layer go into one block."""
    import torch

    def flatten_parameters(layer: Any) -> None:
        weights = [w for w in flat_weights(layer) or () if isinstance(w, torch.Tensor)]
        if len(weights) != count_flat_weights(layer) or not all(tracer.on_card(w) for w in weights):
            return
        if len({w.dtype for w in weights}) > 1 or len({storage_key(w) for w in weights}) < len(weights):
            return
        with torch.no_grad():
            for weight, part in zip(weights, views(weights), strict=True):
                weight.data = part

    return flatten_parameters


def _gru_cell(tracer: Tracer) -> Callable[..., Any]:
    import torch

    aten = torch.ops.aten

    def cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        if not tracer.on_card(x):
            return aten.gru_cell.default.decompose(x, hx, w_ih, w_hh, b_ih, b_hh)
        return aten_operator("_thnn_fused_gru_cell")(x.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)[0]

    return cell


def _lstm_cell(tracer: Tracer) -> Callable[..., Any]:
    import torch

    aten = torch.ops.aten

    def cell(x: Any, state: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        if not tracer.on_card(x):
            return aten.lstm_cell.default.decompose(x, state, w_ih, w_hh, b_ih, b_hh)
        out = aten_operator("_thnn_fused_lstm_cell")(
            x.matmul(w_ih.t()), state[0].matmul(w_hh.t()), state[1], b_ih, b_hh
        )
        return out[0], out[1]

    return cell


# what the operators return


def _rnn(func: Any, args: Any, kwargs: Any) -> Any:
    """What the layer returns, with the block that cuDNN keeps for the backward pass in its true size."""
    import torch

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
    import torch

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
    "aten._pack_padded_sequence_backward.default": packed.pack_backward,
}
"""Operator -> its results."""


# what is inside them


def forward_moves(scratch: Any, args: Any, results: Any) -> Iterator[Move]:
    """Results, workspace and what is kept, in cuDNN's order."""
    x, dropout = args[0], args[11] if args[12] else 0.0
    if dropout and scratch.first("dropout state", "any"):
        yield Move("keep", "dropout state", DROPOUT_STATE)
    if args[10]:
        yield Move("take", "time first", _bytes(x))
    yield from (RESULT,) * 3
    yield Move("take", "workspace", workspace(x, args[1], args[6], args[7], args[9], args[13], args[14], dropout))
    yield RESULT


def backward_moves(scratch: Any, args: Any, results: Any) -> Iterator[Move]:
    """The data's gradient first, then the weights'."""
    x, hx, cx, out, first = args[0], args[4], args[5], args[6], args[14]
    inside = workspace(x, args[1], args[10], args[11], args[13], args[17], args[18], args[15] if args[16] else 0.0)
    for name in ("state's gradient", "cell's gradient")[: 1 if cx is None else 2]:
        yield Move("take", name, _bytes(hx))
    if first:
        yield Move("take", "input", _bytes(x))
        yield Move("take", "output", _bytes(out))
    yield from (RESULT,) * (2 if cx is None else 3)
    yield Move("take", "workspace", inside)
    yield Move("free", "workspace")
    if first:
        yield Move("free", "output")
        yield Move("free", "input")
        yield Move("take", "input again", _bytes(x))
    yield RESULT
    yield Move("take", "second workspace", inside)
    yield Move("free", "second workspace")


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


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _rows(x: Any) -> int:
    """Time steps of all sequences."""
    return int(x.numel()) // int(x.shape[-1])
