"""Operators that the card's torch runs under another name, or in another way, than torch picks for a tensor without a card.

Torch looks at a tensor's real device when it picks the fused form of an operator. While a trace runs, these composite operators
are replaced by what torch picks on CUDA, so that the same things are saved for the backward pass. `SHAPES` says what a few
operators return for which torch has no shape rule, or one that leaves out the bytes that cuDNN keeps.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from outsize.model import packed

if TYPE_CHECKING:
    from outsize.model.trace import Tracer

OnCard = Callable[[Any], bool]

WHOLE = (
    "aten.silu_backward.default",
    "aten.mish_backward.default",
    "aten._pack_padded_sequence_backward.default",
)
"""Composite, but one kernel on CUDA, or one that reads what is not there."""

RNN = {f"{name}.{form}": kind for name, kind in (("lstm", 2), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 0)) for form in ("input", "data")}
"""Recurrent layer -> cuDNN's number for it."""

GATES = {2: 5, 3: 6, 1: 2, 0: 2}
"""cuDNN's number -> values kept for the backward pass, per hidden unit and time step."""


@contextlib.contextmanager
def installed(tracer: Tracer) -> Iterator[None]:
    """The replacements for tensors that a trace has on a card, for as long as the block runs."""
    import torch

    on_card = tracer.on_card

    library = torch.library.Library("aten", "IMPL")
    rows: list[tuple[str, Any]] = [("dropout", _dropout(on_card))]
    rows += [(name.removeprefix("aten.").removesuffix(".default"), _below_autograd(name)) for name in WHOLE]
    rows += [(name, _recurrent(name, kind, tracer)) for name, kind in RNN.items()]
    rows += [("_pad_packed_sequence", packed.padded(tracer))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in rows:
            library.impl(name, function, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _dropout(on_card: OnCard) -> Callable[..., Any]:
    import torch

    def dropout(x: Any, p: float, train: bool) -> Any:
        if p == 0 or not train or not x.numel():
            return x
        if p < 1 and on_card(x):
            return torch.ops.aten.native_dropout(x, p, train)[0]
        if p == 1:
            return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
        noise = torch.empty_like(x).bernoulli_(1 - p)
        return x * noise.div_(1 - p)

    return dropout


def _below_autograd(name: str) -> Callable[..., Any]:
    import torch

    op = getattr(torch.ops.aten, name.split(".")[1]).default

    def whole(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)

    return whole


def _recurrent(name: str, kind: int, tracer: Tracer) -> Callable[..., Any]:
    import torch

    base, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, base), overload)

    def run(x: Any, state: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool,
            first: bool, sizes: list[int]) -> Any:  # fmt: skip
        hx, cx = (state[0], state[1]) if kind == 2 else (state, None)
        if torch.is_autocast_enabled("cuda"):
            half = torch.float16  # whatever the autocast dtype is
            x, hx, weights = x.to(half), hx.to(half), [weight.to(half) for weight in weights]
            cx = None if cx is None else cx.to(half)
        out = torch.ops.aten._cudnn_rnn(
            x, weights, 4 if biases else 2, None, hx, cx, kind, hx.shape[-1], 0, layers, first, dropout, train, both, sizes, None
        )  # fmt: skip
        return out[:3] if kind == 2 else out[:2]

    def elsewhere(x: Any, state: Any, weights: Any) -> bool:
        hx = state[0] if kind == 2 else state
        return not tracer.on_card(x) or hx.shape[-1] != weights[1].shape[-1]

    def recurrent(x: Any, state: Any, weights: Any, *rest: Any) -> Any:
        if elsewhere(x, state, weights):
            return op.decompose(x, state, weights, *rest)
        return run(x, state, weights, *rest, [])

    def packed_recurrent(x: Any, batch_sizes: Any, state: Any, weights: Any, *rest: Any) -> Any:
        sizes = packed.sizes_of(tracer, batch_sizes)
        if elsewhere(x, state, weights):
            return op.decompose(x, packed.contents(tracer, batch_sizes), state, weights, *rest)
        return run(x, state, weights, *rest, False, sizes)

    return packed_recurrent if overload == "data" else recurrent


def _rnn(func: Any, args: Any, kwargs: Any) -> Any:
    """What the layer returns, with the block that cuDNN keeps for the backward pass in its true size."""
    import torch

    out = list(func(*args, **kwargs))
    x, kind, hidden, layers, train, both, sizes = args[0], args[6], args[7], args[9], args[12], args[13], args[14]
    sides = 2 if both else 1
    rows = len(sizes) * sizes[0] if sizes else x.shape[0] * x.shape[1]
    steps = rows * hidden * x.element_size()
    kept = (
        steps * (layers * sides * GATES[kind] + (layers - 1) * sides) + 256 if train and torch.is_grad_enabled() else 0
    )
    if args[10]:  # batch first: the result is a view of one that has time first
        time_first = torch.empty(out[0].shape[1], out[0].shape[0], out[0].shape[2], dtype=x.dtype, device="meta")
        out[0] = time_first.transpose(0, 1)
    out[3] = torch.empty(kept, dtype=torch.uint8, device="meta")
    out[4] = torch.empty(0, dtype=x.dtype, device="meta")
    return tuple(out)


def _rnn_backward(func: Any, args: Any, kwargs: Any) -> Any:
    import torch

    x, weights, hx, cx = args[0], args[1], args[4], args[5]
    return (
        torch.empty_like(x), torch.empty_like(hx), None if cx is None else torch.empty_like(cx),
        [torch.empty_like(weight) for weight in weights],
    )  # fmt: skip


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    """Products of groups of rows, or of groups of columns: torch's own shape rule takes bfloat16 only."""
    import torch

    a, b = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = 0 if offsets is None else offsets.shape[0]
    if a.dim() == b.dim() == 2:
        shape = [groups, a.shape[0], b.shape[1]]
    elif a.dim() == 3 and b.dim() == 2:
        shape = [a.shape[1], b.shape[1]]
    else:
        shape = [*a.shape[:-1], b.shape[-1]]
    return torch.empty(shape, dtype=a.dtype, device="meta")


def _in_place(func: Any, args: Any, kwargs: Any) -> None:
    """An optimizer's kernel that writes into its arguments."""


SHAPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten._cudnn_rnn.default": _rnn,
    "aten._cudnn_rnn_backward.default": _rnn_backward,
    "aten._grouped_mm.default": _grouped_mm,
    "aten._pack_padded_sequence_backward.default": packed.pack_backward,
    "aten._fused_sgd_.default": _in_place,
    "aten._fused_sgd_.tensor_lr": _in_place,
    "aten._fused_adagrad_.default": _in_place,
}
"""Operator -> its results, where torch's own shape rule does not do."""
