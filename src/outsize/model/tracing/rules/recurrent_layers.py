"""Recurrent layers as cuDNN and torch's fused cells run them on a card, or oneDNN on a CPU.

In: the calls behind `torch.nn.LSTM`, `GRU`, `RNN` and their cells. Out: the operators that the device runs instead. cuDNN
needs all weights of a layer in one block. They are moved there when the module goes to the card. Under autocast they
are copied there in half precision. Their gradients are in one block too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.kernels import cpu as onednn
from outsize.model.kernels.cells import run_cells
from outsize.model.kernels.recurrent import views
from outsize.model.torch_port.dispatch import aten_operator
from outsize.model.torch_port.objects import count_flat_weights, flat_weights, storage_key
from outsize.model.tracing.rules import packed_sequences as packed
from outsize.model.tracing.trace import Trace

LAYERS = {
    f"{name}.{form}": kind
    for name, kind in (("lstm", 2), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 0))
    for form in ("input", "data")
}
"""Recurrent layer -> cuDNN's number for it."""


def replacements(tracer: Trace) -> list[tuple[str, Callable[..., Any]]]:
    """(operator, what stands for it while a trace runs)."""
    rows = [(name, _layer(name, kind, tracer)) for name, kind in LAYERS.items()]
    return [*rows, ("gru_cell", _gru_cell(tracer)), ("lstm_cell", _lstm_cell(tracer))]


def _layer(name: str, kind: int, tracer: Trace) -> Callable[..., Any]:
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
            if kind == 2 and not tracer.on_card(x) and x.element_size() < 4:
                tracer.guess(f"what an LSTM in {x.dtype} takes inside on the CPU is not known")
            if kind != 2 and not tracer.on_card(x):
                return run_cells(base, x, state, weights, *rest)
            return op.decompose(x, state, weights, *rest)
        return run(x, state, weights, rest, [])

    def on_packed(x: Any, batch_sizes: Any, state: Any, weights: Any, *rest: Any) -> Any:
        if elsewhere(x, state, weights):
            even = kind == 2 and not tracer.on_card(x) and packed.is_even(tracer, batch_sizes)
            if even and onednn.takes_lstm(x, state, weights):
                whole = x.view(batch_sizes.shape[0], -1, x.shape[-1])
                out, *ends = onednn.run_lstm(whole, state, weights, *(*rest, False))
                return out.flatten(0, 1), *ends
            before = None  # on the host torch makes the gates of all steps from the input first
            if not tracer.on_card(x):
                before = x.new_empty(x.shape[0], weights[0].shape[0])
                if kind == 2 and torch.is_grad_enabled():
                    tracer.guess(
                        "what the backward pass of an LSTM on packed sequences takes inside on the CPU is not known"
                    )
            found = op.decompose(x, packed.contents(tracer, batch_sizes), state, weights, *rest)
            del before
            return found
        return run(x, state, weights, (*rest, False), packed.sizes_of(tracer, batch_sizes))

    return on_packed if overload == "data" else plain


def _in_one_block(weights: list[Any], dtype: Any) -> list[Any]:
    """Copies of the weights in another precision, side by side in one block; each gradient is cast back on its own."""

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


def flatten(tracer: Trace) -> Callable[[Any], None]:
    """Stands for `RNNBase.flatten_parameters`: on the card, the weights of a layer go into one block."""

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


def _gru_cell(tracer: Trace) -> Callable[..., Any]:
    aten = torch.ops.aten

    def cell(x: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        if not tracer.on_card(x):
            return aten.gru_cell.default.decompose(x, hx, w_ih, w_hh, b_ih, b_hh)
        return aten_operator("_thnn_fused_gru_cell")(x.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)[0]

    return cell


def _lstm_cell(tracer: Trace) -> Callable[..., Any]:
    aten = torch.ops.aten

    def cell(x: Any, state: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        if not tracer.on_card(x):
            return aten.lstm_cell.default.decompose(x, state, w_ih, w_hh, b_ih, b_hh)
        out = aten_operator("_thnn_fused_lstm_cell")(
            x.matmul(w_ih.t()), state[0].matmul(w_hh.t()), state[1], b_ih, b_hh
        )
        return out[0], out[1]

    return cell
