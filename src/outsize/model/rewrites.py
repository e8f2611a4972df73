"""Operators that the card's torch runs under another name, or in another way, than torch picks for a tensor without a card.

Torch looks at a tensor's real device when it picks the fused form of an operator. While a trace runs, these composite operators
are replaced by what torch picks on CUDA, so that the same things are saved for the backward pass. `SHAPES` says what a few
operators return for which torch has no shape rule, or one that leaves out the bytes that cuDNN keeps.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

OnCard = Callable[[Any], bool]

WHOLE = ("aten.silu_backward.default", "aten.mish_backward.default")
"""Composite for other devices, one kernel on CUDA."""

RNN = {"lstm.input": 2, "gru.input": 3, "rnn_tanh.input": 1, "rnn_relu.input": 0}
"""Recurrent layer -> cuDNN's number for it."""

GATES = {2: 5, 3: 6, 1: 2, 0: 2}
"""cuDNN's number -> values kept for the backward pass, per hidden unit and time step."""


@contextlib.contextmanager
def installed(on_card: OnCard) -> Iterator[None]:
    """The replacements for tensors for which `on_card(tensor)` holds, for as long as the block runs."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    rows: list[tuple[str, Any]] = [("dropout", _dropout(on_card))]
    rows += [(name.removeprefix("aten.").removesuffix(".default"), _below_autograd(name)) for name in WHOLE]
    rows += [(name, _recurrent(name, kind, on_card)) for name, kind in RNN.items()]
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


def _recurrent(name: str, kind: int, on_card: OnCard) -> Callable[..., Any]:
    import torch

    base, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, base), overload)

    def recurrent(
        x: Any,
        state: Any,
        weights: Any,
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
        hx, cx = (state[0], state[1]) if kind == 2 else (state, None)
        if not on_card(x) or hx.shape[-1] != weights[1].shape[-1]:
            return op.decompose(x, state, weights, biases, layers, dropout, train, both, batch_first)
        if torch.is_autocast_enabled("cuda"):
            half = torch.float16  # whatever the autocast dtype is
            x, hx, weights = x.to(half), hx.to(half), [weight.to(half) for weight in weights]
            cx = None if cx is None else cx.to(half)
        out = torch.ops.aten._cudnn_rnn(
            x,
            weights,
            4 if biases else 2,
            None,
            hx,
            cx,
            kind,
            hx.shape[-1],
            0,
            layers,
            batch_first,
            dropout,
            train,
            both,
            [],
            None,
        )
        return out[:3] if kind == 2 else out[:2]

    return recurrent


def _rnn(func: Any, args: Any, kwargs: Any) -> Any:
    """What the layer returns, with the block that cuDNN keeps for the backward pass in its true size."""
    import torch

    out = list(func(*args, **kwargs))
    x, hx, kind, hidden, layers, train, both = args[0], args[4], args[6], args[7], args[9], args[12], args[13]
    sides = 2 if both else 1
    steps = x.shape[0] * x.shape[1] * hidden * x.element_size()
    kept = (
        steps * (layers * sides * GATES[kind] + (layers - 1) * sides) + 256 if train and torch.is_grad_enabled() else 0
    )
    if args[10]:  # batch first: the result is a view of one that has time first
        time_first = torch.empty(out[0].shape[1], out[0].shape[0], out[0].shape[2], dtype=x.dtype, device="meta")
        out[0] = time_first.transpose(0, 1)
    out[3] = torch.empty(kept, dtype=torch.uint8, device="meta")
    out[4] = torch.empty(0, dtype=x.dtype, device="meta")
    del hx
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


SHAPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten._cudnn_rnn.default": _rnn,
    "aten._cudnn_rnn_backward.default": _rnn_backward,
    "aten._grouped_mm.default": _grouped_mm,
}
"""Operator -> its results, where torch's own shape rule does not do."""
