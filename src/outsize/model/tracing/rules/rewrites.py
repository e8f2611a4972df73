"""Operators for which torch picks another kernel on a card than for a meta tensor.

Torch looks at a tensor's real device when it picks the fused form of an operator. While a trace runs, these composite
operators are replaced by what torch picks on CUDA, so that the same tensors are saved for the backward pass. `SHAPES`
has the results of a few operators for which torch has no shape rule, or one without the bytes that cuDNN keeps.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.kernels import cpu as onednn
from outsize.model.kernels import recurrent
from outsize.model.torch_port.dispatch import below_autograd, fused_rms_norm, replacing_kernels
from outsize.model.tracing.rules import packed_sequences as packed
from outsize.model.tracing.rules import recurrent_layers, rms_norm
from outsize.model.tracing.trace import Trace

OnCard = Callable[[Any], bool]

WHOLE = (
    "aten.silu_backward.default",
    "aten.mish_backward.default",
    "aten._pack_padded_sequence_backward.default",
)
"""Composite operators that are one kernel on CUDA, or that read contents."""


@contextlib.contextmanager
def installed(tracer: Trace) -> Iterator[dict[str, Callable[..., Any]]]:
    """The replacements for tensors that a trace has on a card, for as long as the block runs. They are also given by name:
    in inference mode torch does not ask them, and composite operators reach the trace itself.
    """

    on_card = tracer.on_card
    rows: list[tuple[str, Any]] = [("dropout", _dropout(on_card))]
    rows += [(name.removeprefix("aten.").removesuffix(".default"), _below_autograd(name)) for name in WHOLE]
    rows += recurrent_layers.replacements(tracer)
    rows += [("_pad_packed_sequence", packed.padded(tracer))]
    rows += [("rms_norm", rms_norm.replacement(on_card, fused))] if (fused := fused_rms_norm()) else []
    with replacing_kernels() as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in rows:
                library.impl(name, function, "AutogradMeta")
        yield dict(rows)


def _dropout(on_card: OnCard) -> Callable[..., Any]:
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
    op = getattr(torch.ops.aten, name.split(".")[1]).default

    def whole(*args: Any, **kwargs: Any) -> Any:
        with below_autograd():
            return op(*args, **kwargs)

    return whole


def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    """Products of groups of rows, or of groups of columns: torch's own shape rule takes bfloat16 only."""
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


def _batch_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Only the gradients that are asked for, the input's laid out as the input."""
    x, weight, wanted = args[1], args[2], args[9]
    sums = [torch.empty_like(weight) if want and weight is not None else None for want in wanted[1:]]
    return (torch.empty_like(x) if wanted[0] else None, *sums)


def _in_place(func: Any, args: Any, kwargs: Any) -> None:
    """An optimizer's kernel that writes into its arguments."""


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses that are computed per element and then reduced into the same tensor, whose memory does not shrink."""
    out = func(*args, **kwargs)
    if out.dim():
        return out
    whole = torch.empty(torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=out.dtype, device="meta")
    return whole.resize_(())


def _ctc(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses, and for each sample and time a place for every label and the blanks around it.

    Lengths in a tensor are taken as the longest that there is room for; targets in one row are taken as equally long.
    """
    scores, targets, lengths = args[0], args[1], args[3]
    samples = scores.shape[1] if scores.dim() == 3 else 1
    if not isinstance(lengths, torch.Tensor):
        longest = max(lengths, default=0)
    else:
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(1, samples))
    made = {"dtype": scores.dtype, "device": "meta"}
    return torch.empty(samples, **made), torch.empty(samples, scores.shape[0], 2 * longest + 1, **made)


def _ctc_backward(func: Any, args: Any, kwargs: Any) -> Any:
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


SHAPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    **recurrent.SHAPES,
    "aten._pack_padded_sequence_backward.default": packed.pack_backward,
    "aten.mkldnn_rnn_layer.default": onednn.lstm_results,
    "aten.mkldnn_rnn_layer_backward.default": onednn.lstm_gradients,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.mse_loss.default": _reduced,
    "aten.smooth_l1_loss.default": _reduced,
    "aten.binary_cross_entropy.default": _reduced,
    "aten.soft_margin_loss.default": _reduced,
    "aten._ctc_loss.default": _ctc,
    "aten._ctc_loss.Tensor": _ctc,
    "aten._ctc_loss_backward.default": _ctc_backward,
    "aten._ctc_loss_backward.Tensor": _ctc_backward,
    "aten._fused_rms_norm.default": rms_norm.results,
    "aten._fused_rms_norm_backward.default": rms_norm.gradients,
    "aten._fused_sgd_.default": _in_place,
    "aten._fused_sgd_.tensor_lr": _in_place,
    "aten._fused_adagrad_.default": _in_place,
}
"""Operator -> its results, if torch's own shape rule is not enough."""
