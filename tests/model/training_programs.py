"""Writes small random training programs, and measures what one really takes.

In: a source of random choices (`random.Random`, or hypothesis's own). Out: the text of a program with `build()` and `step(job)`,
which also runs as a script. A network is a chain of blocks; each takes pictures, sequences or rows and says what it gives on.
`real_peak` runs a program in a process of its own and reads the events of torch's allocator for the CPU, not our tracer.
"""

# ruff: noqa: E501  the lines of programs are kept whole

import json
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

Shape = tuple[int, ...]
"""(channels, height, width) of pictures, (length, width) of sequences, (width,) of rows; the batch is left out."""

STEPS = 4
"""Steps of a real run; one more than an estimate follows."""

HEAD = '''"""A small training program."""

import copy
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        x, square = ctx.saved_tensors
        return 3 * square * grad


class Spectral(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.cfloat) * 0.02)


class Average(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().float().flatten(0, -2).mean(0), 0.1)
        return x - self.mean

'''


class Writer:
    """One program as far as it is written."""

    def __init__(self, source: Any) -> None:
        self.r = source
        self.made: list[str] = []
        self.forward: list[str] = []
        self.shape: Shape = ()
        self.batch = 1
        self.ragged = False
        """The number of rows depends on contents, so that no target goes with them."""
        self.exact = True
        """float32 so far: half precision is allowed."""

    def add(self, module: str, use: str = "x = {m}(x)") -> None:
        """A module and the lines that use it."""
        name = f"self.m{len(self.made)}"
        self.made.append(f"{name} = {module}")
        self.forward += use.format(m=name).splitlines()

    def do(self, lines: str) -> None:
        self.forward += lines.splitlines()

    def pick(self, *values: Any) -> Any:
        return self.r.choice(values)

    def size(self) -> int:
        return math.prod(self.shape)


# pictures


def convolve(w: Writer) -> None:
    c, h, wide = w.shape
    kernel = w.pick(1, 3, 3, 5, 7)
    dilation = w.pick(1, 1, 1, 2)
    stride = w.pick(1, 1, 2)
    groups = w.pick(1, 1, c, w.pick(*[g for g in (1, 2, 4, 8) if c % g == 0]))
    out = c if groups == c and w.r.random() < 0.7 else groups * max(1, w.pick(8, 16, 24, 32, 64, 128) // groups)
    pad = dilation * (kernel // 2)
    mode = w.pick("zeros", "zeros", "zeros", "reflect", "circular") if pad < min(h, wide) else "zeros"
    w.add(
        f"nn.Conv2d({c}, {out}, {kernel}, stride={stride}, padding={pad}, dilation={dilation}, groups={groups}, "
        f"bias={w.pick(True, False)}, padding_mode={mode!r})"
    )
    w.shape = (out, -(-h // stride), -(-wide // stride))


def convolve_up(w: Writer) -> None:
    c, h, wide = w.shape
    out = w.pick(8, 16, 24)
    groups = w.pick(*[g for g in (1, 1, 2, 4) if c % g == 0 and out % g == 0])
    w.add(f"nn.ConvTranspose2d({c}, {out}, 2, stride=2, groups={groups})")
    w.shape = (out, 2 * h, 2 * wide)


def convolve_other(w: Writer) -> None:
    c, h, wide = w.shape
    kind = w.pick("line", "volume", "double", "normed", "residual", "excite")
    if kind == "line":
        groups = w.pick(1, c)
        w.add(
            f"nn.Conv1d({c}, {c}, 3, padding=1, groups={groups})",
            f"x = {{m}}(x.flatten(2)).unflatten(2, ({h}, {wide}))",
        )
    elif kind == "volume":
        w.add(f"nn.Conv3d({c}, {c}, (1, 3, 3), padding=(0, 1, 1))", "x = {m}(x.unsqueeze(2)).squeeze(2)")
    elif kind == "double":
        w.exact = False
        w.add(f"nn.Conv2d({c}, {c}, 3, padding=1, groups={w.pick(1, c)}).double()", "x = {m}(x.double()).float()")
    elif kind == "normed":
        w.add(f"nn.utils.parametrizations.{w.pick('weight_norm', 'spectral_norm')}(nn.Conv2d({c}, {c}, 3, padding=1))")
    elif kind == "residual":
        body = f"nn.Conv2d({c}, {c}, 3, padding=1), nn.BatchNorm2d({c}), nn.ReLU(), nn.Conv2d({c}, {c}, 3, padding=1)"
        w.add(f"nn.Sequential({body})", w.pick("x = x + {m}(x)", "x = x + checkpoint({m}, x, use_reentrant=False)"))
    else:
        w.add(f"nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d({c}, {c}, 1), nn.Sigmoid())", "x = x * {m}(x)")


def normalize(w: Writer) -> None:
    c = w.shape[0]
    groups = w.pick(*[g for g in (1, 2, 4) if c % g == 0])
    w.add(
        w.pick(
            f"nn.BatchNorm2d({c})", f"nn.GroupNorm({groups}, {c})", f"nn.InstanceNorm2d({c}, affine=True)",
            "nn.LocalResponseNorm(3)", f"nn.LayerNorm({list(w.shape)})", f"nn.BatchNorm2d({c}, affine=False)",
        )
    )  # fmt: skip


def pool(w: Writer) -> None:
    c, h, wide = w.shape
    if min(h, wide) < 4:
        return
    kind = w.pick(
        "MaxPool2d(2)",
        "AvgPool2d(2)",
        "LPPool2d(2, 2)",
        "MaxPool2d(3, 2, 1)",
        "AdaptiveAvgPool2d(3)",
        "AdaptiveMaxPool2d(2)",
        "unpool",
        "FractionalMaxPool2d(2, output_size=3)",
    )
    if kind == "unpool":
        w.add(
            "nn.MaxPool2d(2, return_indices=True)",
            "size = x.shape\nx, where = {m}(x)\nx = F.max_unpool2d(x, where, 2, output_size=size)",
        )
        return
    w.add(f"nn.{kind}")
    if kind.startswith(("Adaptive", "Fractional")):
        side = 2 if "MaxPool2d(2)" in kind else 3
        w.shape = (c, side, side)
    else:
        half = (lambda n: (n + 1) // 2) if "3, 2, 1" in kind else (lambda n: n // 2)
        w.shape = (c, half(h), half(wide))


def resize(w: Writer) -> None:
    c, h, wide = w.shape
    mode = w.pick("nearest", "bilinear", "bicubic", "area", "nearest-exact", "antialias")
    up = w.pick(0.5, 1.5, 2)
    h, wide = max(1, int(h * up)), max(1, int(wide * up))
    more = ", antialias=True" if mode == "antialias" else ""
    w.do(
        f"x = F.interpolate(x, size=({h}, {wide}), mode={'bilinear' if more else mode!r}{more})".replace(
            "=bilinear", "='bilinear'"
        )
    )
    w.shape = (c, h, wide)


def rearrange(w: Writer) -> None:
    c, h, wide = w.shape
    kind = w.pick("shuffle", "unshuffle", "unfold", "pad", "last", "roll", "grid", "flip", "columns")
    if kind == "shuffle" and c % 4 == 0:
        w.do("x = F.pixel_shuffle(x, 2)")
        w.shape = (c // 4, 2 * h, 2 * wide)
    elif kind == "unshuffle" and h % 2 == wide % 2 == 0:
        w.do("x = F.pixel_unshuffle(x, 2)")
        w.shape = (4 * c, h // 2, wide // 2)
    elif kind == "unfold":
        w.do(f"x = F.fold(F.unfold(x, 3, padding=1), ({h}, {wide}), 3, padding=1)")
    elif kind == "pad":
        w.do(f"x = F.pad(x, (1, 1, 1, 1), mode={w.pick('constant', 'replicate')!r})")
        w.shape = (c, h + 2, wide + 2)
    elif kind == "last":
        w.do("x = x.contiguous(memory_format=torch.channels_last)")
    elif kind == "roll":
        w.do("x = torch.roll(x, (1, 2), (2, 3))")
    elif kind == "grid":
        w.do(
            "grid = F.affine_grid(torch.eye(2, 3, device=x.device).repeat(len(x), 1, 1), x.shape, align_corners=False)"
        )
        w.do("x = F.grid_sample(x.float(), grid, align_corners=False)")
    elif kind == "flip":
        w.do("x = x + x.flip(3)")
    else:
        w.do("x = x.cumsum(3) / x.shape[3]")


def spectral_pictures(w: Writer) -> None:
    c, h, wide = w.shape
    if w.pick(True, False):
        w.add(
            f"Spectral({c}, {h}, {wide // 2 + 1})",
            f"x = x.float()\nx = x + torch.fft.irfft2(torch.fft.rfft2(x) * {{m}}.weight, s=({h}, {wide}))",
        )
    else:
        w.do("x = torch.fft.fft2(x.float(), norm='ortho').abs()")


def to_sequence(w: Writer) -> None:
    c, h, wide = w.shape
    w.do("x = x.flatten(2).transpose(1, 2)")
    w.shape = (h * wide, c)


def to_rows_from_pictures(w: Writer) -> None:
    if w.size() <= 2048 and w.pick(True, False):
        w.do("x = x.flatten(1)")
        w.shape = (w.size(),)
    else:
        w.do(
            w.pick(
                "x = x.mean((2, 3))",
                "x = x.amax((2, 3))",
                "x = F.adaptive_avg_pool2d(x, 1).flatten(1)",
                "x = x.flatten(2).logsumexp(2)",
            )
        )
        w.shape = w.shape[:1]


# all shapes


def follows_weights(w: Writer) -> bool:
    """True right after a convolution or a linear layer, which do not keep their results."""
    last = f"x = {w.made[-1].partition(' ')[0]}(x)" if w.made else ""
    return (
        bool(w.forward) and w.forward[-1] == last and w.made[-1].partition("= ")[2].startswith(("nn.Conv", "nn.Linear"))
    )


def activate(w: Writer) -> None:
    w.add("nn." + w.pick(
        "ReLU()", "ReLU(inplace=True)" if follows_weights(w) else "ReLU()", "GELU()", "SiLU()", "Hardswish()", "Mish()", "LeakyReLU()", "PReLU()", "Softplus()",
        "ELU()", "SELU()", "Tanh()", "Sigmoid()", "Softsign()", "RReLU()", "Hardtanh()", "LogSigmoid()",
    ))  # fmt: skip


def drop(w: Writer) -> None:
    w.add(
        f"nn.{w.pick('Dropout', 'AlphaDropout', 'Dropout1d' if len(w.shape) == 2 else 'Dropout')}({w.pick(0.1, 0.5)})"
    )


def compute(w: Writer) -> None:
    w.do(w.pick(
        "x = Cube.apply(x) * 0.1", "x = torch.where(x > 0, x, 0.1 * x)", "x = x.clamp(-3, 3)", "x = x.softmax(-1)",
        "x = F.normalize(x, dim=-1)", "x = x.masked_fill(x < -2, 0)", "x = x.abs().add(1e-3).sqrt()", "x = torch.cat([x, x], 0).chunk(2)[0]",
        "x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)", "x = torch.logcumsumexp(x.float(), -1)",
        "x = x.sort(-1).values", "x = x * (torch.rand(len(x), device=x.device) > 0.1).view(-1, *[1] * (x.dim() - 1))",
        "x = torch.view_as_real(torch.complex(x.float(), x.float())).sum(-1)", "x = x + torch.randn_like(x) * 0.01",
        "x = x.float().cummax(-1).values", "x = torch.stack([x, x.detach()]).mean(0)", "x = x.log_softmax(-1).exp()",
    ))  # fmt: skip


# sequences


def linear(w: Writer) -> None:
    out = w.pick(16, 32, 64, 128, 200, 384)
    use = w.pick(
        "x = {m}(x)",
        "x = {m}(x)",
        "x = checkpoint({m}, x, use_reentrant=False)",
        "x = checkpoint({m}, x, use_reentrant=True)",
    )
    w.add(f"nn.Linear({w.shape[-1]}, {out}, bias={w.pick(True, False)})", use)
    w.shape = (*w.shape[:-1], out)


def norm_last(w: Writer) -> None:
    width = w.shape[-1]
    w.add(w.pick(f"nn.LayerNorm({width})", f"nn.RMSNorm({width})", f"Average({width})"))


def recur(w: Writer) -> None:
    length, width = w.shape
    kind, hidden = w.pick("LSTM", "LSTM", "GRU", "RNN"), w.pick(16, 32, 48, 96)
    both, layers = w.pick(True, False), w.pick(1, 1, 2)
    drop = f", dropout={w.pick(0.0, 0.2)}" if layers == 2 else ""
    if length > 40:
        w.do("x = x[:, :40]")
        length = 40
    module = f"nn.{kind}({width}, {hidden}, num_layers={layers}, batch_first=True, bidirectional={both}{drop})"
    if w.r.random() < 0.25 and not w.ragged:
        w.exact = False
        w.add(
            module,
            f"""lengths = torch.randint(1, {length} + 1, (len(x),))
packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
x = nn.utils.rnn.pad_packed_sequence({{m}}(packed)[0], batch_first=True, total_length={length})[0]""",
        )
    else:
        w.add(module, "x = {m}(x)[0]")
    w.shape = (length, hidden * (2 if both else 1))


def attend(w: Writer) -> None:
    length, width = w.shape
    if length > 256:
        w.do("x = x[:, ::4]")
        length = -(-length // 4)
    heads = w.pick(*[h for h in (1, 2, 4) if width % h == 0])
    w.shape = (length, width)
    kind = w.pick("layer", "weights", "encoder", "fused", "causal", "masked", "dropped", "written", "grouped")
    split = f"q, k, v = {{m}}(x).unflatten(-1, (3, {heads}, {width // heads})).permute(2, 0, 3, 1, 4)\n"
    join = "\nx = x + y.transpose(1, 2).flatten(2)"
    three = f"nn.Linear({width}, {3 * width})"
    if kind in ("layer", "weights"):
        w.add(
            f"nn.MultiheadAttention({width}, {heads}, dropout={w.pick(0.0, 0.1)}, batch_first=True)",
            f"x = x + {{m}}(x, x, x, need_weights={kind == 'weights'})[0]",
        )
    elif kind == "encoder":
        w.add(
            f"nn.TransformerEncoderLayer({width}, {heads}, {2 * width}, dropout={w.pick(0.0, 0.1)}, batch_first=True, norm_first={w.pick(True, False)})"
        )
    elif kind == "written":
        w.add(three, split + f"y = (q @ k.transpose(-1, -2) / {math.sqrt(width // heads):.3f}).softmax(-1) @ v" + join)
    elif kind == "masked":
        w.add(
            three,
            split
            + f"mask = torch.ones({length}, {length}, dtype=torch.bool, device=x.device).tril()\ny = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"
            + join,
        )
    elif kind == "grouped":
        w.add(three, split + "y = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)" + join)
    else:
        more = {"fused": "", "causal": ", is_causal=True", "dropped": ", dropout_p=0.1 if self.training else 0.0"}[kind]
        w.add(three, split + f"y = F.scaled_dot_product_attention(q, k, v{more})" + join)


def reorder(w: Writer) -> None:
    """Sorts, gathers, scatters and sums along a sequence."""
    length, width = w.shape
    kind = w.pick(
        "sort",
        "topk",
        "gather",
        "scatter",
        "index_add",
        "cumsum",
        "einsum",
        "fft",
        "median",
        "filter",
        "unfold",
        "pad",
        "stft",
        "quantile",
        "scan",
        "lookup",
        "distance",
        "mode",
    )
    half = max(1, length // 2)
    w.do({
        "sort": "x = torch.gather(x, 1, x.detach().argsort(1))",
        "topk": f"x = x.topk({half}, dim=1).values",
        "gather": f"x = x.gather(1, torch.randint(0, {length}, (len(x), {half}, 1), device=x.device).expand(-1, -1, {width}))",
        "scatter": "x = torch.zeros_like(x).scatter_add(1, x.detach().argsort(1), x)",
        "index_add": f"x = torch.zeros_like(x).index_add(1, torch.randint(0, {length}, ({length},), device=x.device), x)",
        "cumsum": "x = x.cumsum(1) / x.shape[1]",
        "einsum": "x = x + torch.einsum('btc,bsc,bsd->btd', x, x, x).tanh()",
        "fft": "x = torch.fft.fft(x.float(), dim=1).real / x.shape[1]",
        "median": "x = x - x.median(1, keepdim=True).values",
        "filter": "x = x[:, torch.arange(x.shape[1], device=x.device) % 2 == 0]",
        "unfold": "x = x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)",
        "pad": "x = F.pad(x, (0, 0, 1, 1))",
        "stft": f"x = x + torch.fft.irfft(torch.fft.rfft(x.float(), dim=1), n={length}, dim=1)",
        "quantile": "x = x - torch.quantile(x.float(), 0.25, dim=1, keepdim=True)",
        "scan": "state = x[:, 0]\nouts = []\nfor t in range(min(x.shape[1], 6)):\n    state = torch.tanh(state + x[:, t])\n    outs.append(state)\nx = torch.stack(outs, 1)",
        "lookup": f"x = x + x[torch.arange(len(x)).unsqueeze(1), torch.randperm({length})]",
        "distance": "x = torch.cdist(x.float(), x.float()).softmax(-1) @ x.float()",
        "mode": "x = x + x.kthvalue(1, dim=1, keepdim=True).values",
    }[kind])  # fmt: skip
    length = {"topk": half, "gather": half, "filter": -(-length // 2), "pad": length + 2, "scan": min(length, 6)}.get(
        kind, length
    )
    w.shape = (length, width)


def convolve_sequence(w: Writer) -> None:
    width = w.shape[1]
    w.add(
        f"nn.Conv1d({width}, {width}, {w.pick(3, 5)}, padding='same', groups={w.pick(1, width)}, dilation={w.pick(1, 2)})",
        "x = {m}(x.transpose(1, 2)).transpose(1, 2)",
    )


def to_rows(w: Writer) -> None:
    w.do(w.pick("x = x.mean(1)", "x = x[:, -1]", "x = x.amax(1)", "x = x.sum(1)", "x = (x.softmax(1) * x).sum(1)"))
    w.shape = w.shape[1:]


# rows


def change_rows(w: Writer) -> None:
    (width,) = w.shape
    kind = w.pick(
        "bilinear",
        "norm",
        "select",
        "shared",
        "complex",
        "inverse",
        "outer",
        "svd",
        "moe",
        "bag",
        "unique",
        "dropout",
        "addmm",
    )
    if kind == "bilinear" and width <= 64:
        w.add(f"nn.Bilinear({width}, {width}, 32)", "x = {m}(x, x)")
        w.shape = (32,)
    elif kind == "norm" and not w.ragged:
        w.add(f"nn.BatchNorm1d({width})")
    elif kind == "select":
        w.do("x = x[x.detach().float().sum(1) >= x.detach().float().sum(1).median()]")
        w.ragged = True
    elif kind == "shared":
        w.add(f"nn.Linear({width}, {width})", "x = {m}(F.relu({m}(x)))\nx = F.linear(x, {m}.weight.t())")
    elif kind == "complex":
        w.exact = False
        w.add(f"nn.Linear({width}, 32, dtype=torch.cfloat)", "x = {m}(x.to(torch.cfloat)).abs()")
        w.shape = (32,)
    elif kind == "inverse" and width <= 128:
        w.add(
            f"nn.Linear({width}, {width})",
            f"x = x.float() @ torch.linalg.inv({{m}}.weight + 4 * torch.eye({width}, device=x.device))",
        )
    elif kind == "outer" and width <= 128:
        w.do("x = (x.unsqueeze(2) * x.unsqueeze(1)).mean(2)")
    elif kind == "svd" and width <= 64:
        w.do("u, s, v = torch.linalg.svd(x.float(), full_matrices=False)\nx = x + s.mean()")
    elif kind == "moe":
        w.add(
            f"nn.ModuleList(nn.Linear({width}, {width}) for _ in range(3))",
            "choice = x.detach().argmax(1) % 3\ny = torch.zeros_like(x)\nfor i, expert in enumerate({m}):\n    mask = choice == i\n    y[mask] = expert(x[mask]).to(y.dtype)\nx = y",
        )
    elif kind == "bag" and width >= 4:
        w.add(
            f"nn.EmbeddingBag(500, {width}, mode={w.pick('sum', 'mean', 'max')!r})",
            "x = x + {m}(x.detach().float().topk(4, dim=1).indices)",
        )
    elif kind == "unique":
        w.add(
            f"nn.Embedding(50, {width})",
            "seen, back = x.detach().argmax(1).clamp(max=49).unique(return_inverse=True)\nx = x + {m}(seen)[back]",
        )
    elif kind == "addmm":
        w.add(f"nn.Linear({width}, {width})", "x = torch.addmm({m}.bias, x.float(), {m}.weight.t().float())")
    else:
        drop(w)


PICTURES = (
    convolve,
    convolve,
    convolve,
    convolve_up,
    convolve_other,
    convolve_other,
    normalize,
    pool,
    pool,
    resize,
    rearrange,
    rearrange,
    spectral_pictures,
    activate,
    activate,
    drop,
    compute,
)
SEQUENCES = (
    linear,
    linear,
    norm_last,
    recur,
    recur,
    attend,
    attend,
    attend,
    reorder,
    reorder,
    reorder,
    convolve_sequence,
    activate,
    drop,
    compute,
)
ROWS = (linear, linear, norm_last, change_rows, change_rows, change_rows, activate, drop, compute)
BLOCKS: dict[int, tuple[Callable[[Writer], None], ...]] = {3: PICTURES, 2: SEQUENCES, 1: ROWS}
ELEMENTS = 2**21
"""The most elements of an activation."""

LOSSES = (
    "F.cross_entropy(y, t, label_smoothing={smooth})", "F.cross_entropy(y, t, weight=job['weight'])", "F.nll_loss(y.log_softmax(1), t)",
    "F.mse_loss(y, F.one_hot(t, {classes}).float())", "F.smooth_l1_loss(y, F.one_hot(t, {classes}).float())", "F.multi_margin_loss(y, t)",
    "F.binary_cross_entropy_with_logits(y, F.one_hot(t, {classes}).float())", "F.kl_div(y.log_softmax(1), F.one_hot(t, {classes}).float(), reduction='batchmean')",
    "F.l1_loss(y.softmax(1), F.one_hot(t, {classes}).float())", "(y.logsumexp(1) - y.gather(1, t.unsqueeze(1)).squeeze(1)).mean()",
)  # fmt: skip
OPTIMIZERS = (
    "torch.optim.SGD(p, lr=1e-3)", "torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True)", "torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True)",
    "torch.optim.Adam(p)", "torch.optim.AdamW(p, foreach=True)", "torch.optim.AdamW(p, amsgrad=True)", "torch.optim.Adam(p, fused=True)",
    "torch.optim.AdamW(p, foreach=False)", "torch.optim.Adagrad(p, foreach=True)", "torch.optim.Adagrad(p)", "torch.optim.RMSprop(p, centered=True, momentum=0.9)", "torch.optim.RMSprop(p, foreach=True)",
    "torch.optim.NAdam(p)", "torch.optim.RAdam(p)", "torch.optim.Adadelta(p)", "torch.optim.Adamax(p, foreach=True)", "torch.optim.Rprop(p)", "torch.optim.ASGD(p)",
    "torch.optim.Adafactor(p)", "torch.optim.LBFGS(p, max_iter=3, history_size=4)", "torch.optim.SGD(p, lr=1e-3, fused=True)",
)  # fmt: skip
SCHEDULERS = (
    "torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)", "torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=50, cycle_momentum=False)", "torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1))",
    "torch.optim.lr_scheduler.StepLR(o, 2)", "torch.optim.lr_scheduler.SequentialLR(o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.StepLR(o, 2)], [2])",
)  # fmt: skip


def write_program(source: Any) -> str:
    """The text of a program."""
    w = Writer(source)
    classes = w.pick(4, 10, 37)
    start = _write_input(w)
    for _ in range(w.r.randint(2, 7)):
        before = (list(w.made), list(w.forward), w.shape, w.ragged, w.exact)
        w.pick(*BLOCKS[len(w.shape)])(w)
        if w.size() * w.batch > ELEMENTS or min(w.shape) < 1:
            w.made, w.forward, w.shape, w.ragged, w.exact = before
        if len(w.shape) > 1 and w.r.random() < 0.12:
            (
                to_sequence
                if len(w.shape) == 3 and w.shape[0] <= 256 and w.size() < 2**15 and w.pick(True, False)
                else to_rows_from_pictures
                if len(w.shape) == 3
                else to_rows
            )(w)
    if len(w.shape) == 3:
        to_rows_from_pictures(w)
    elif len(w.shape) == 2:
        to_rows(w)
    w.add(f"nn.Linear({w.shape[0]}, {classes})", "x = {m}(x.float())" if not w.exact else "x = {m}(x)")
    loss = (
        w.pick(*LOSSES).format(classes=classes, smooth=w.pick(0.0, 0.1))
        if not w.ragged
        else w.pick("y.square().mean()", "y.logsumexp(1).sum()")
    )
    lines = [
        HEAD,
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in w.made),
        "",
    ]
    lines += ["    def forward(self, x):", *(f"        {line}" for line in w.forward), "        return x", "", ""]
    return "\n".join(lines + start + _write_loop(w, loss, classes)) + "\n"


def _write_input(w: Writer) -> list[str]:
    """The batch: its shape in the writer, and the function that makes it."""
    kind = w.pick("pictures", "pictures", "pictures", "tokens", "tokens", "sequence", "rows")
    w.batch = w.pick(1, 2, 4, 8, 16, 16, 32, 64)
    rows = str(w.batch)
    lines = []
    if kind == "pictures":
        side = w.pick(2, 7, 8, 14, 16, 28, 32, 33, 56, 64)
        w.shape = (w.pick(1, 3, 3, 16, 40, 96), side, side)
        while w.size() * w.batch > ELEMENTS // 4:
            w.shape = (3, *w.shape[1:])
            w.batch, rows = w.batch // 2, str(w.batch // 2)
        if w.pick(True, False, False):
            lines = [f"x = torch.randint(0, 256, ({{rows}}, {', '.join(map(str, w.shape))}), dtype=torch.uint8)"]
            w.do("x = x.float() / 255")
        else:
            lines = [f"x = torch.randn({{rows}}, {', '.join(map(str, w.shape))})"]
        if w.pick(True, False, False):
            lines.append("x = x.to(memory_format=torch.channels_last)")
    elif kind == "tokens":
        words, width, length = w.pick(100, 1000, 20000), w.pick(16, 32, 64, 128), w.pick(5, 16, 40, 64, 128)
        lines = [f"x = torch.randint(0, {words}, ({{rows}}, {length}))"]
        if w.r.random() < 0.3:
            w.add(f"nn.EmbeddingBag({words}, {width}, mode={w.pick('sum', 'mean', 'max')!r})")
            w.shape = (width,)
        else:
            w.add(
                f"nn.Embedding({words}, {width}{w.pick('', '', ', padding_idx=0', ', max_norm=1.0', ', scale_grad_by_freq=True')})"
            )
            w.shape = (length, width)
            if w.pick(True, False):
                w.made.append(f"self.place = nn.Parameter(torch.zeros({length}, {width}))")
                w.do("x = x + self.place[: x.shape[1]]")
    elif kind == "sequence":
        w.shape = (w.pick(5, 16, 50, 128), w.pick(8, 32, 64, 160))
        lines = [f"x = torch.{w.pick('rand', 'randn')}({{rows}}, {w.shape[0]}, {w.shape[1]})"]
    else:
        w.shape = (w.pick(8, 64, 300, 784),)
        w.batch, rows = 16 * w.batch, str(16 * w.batch)
        lines = [
            f"x = torch.from_numpy(np.random.rand({{rows}}, {w.shape[0]})).float()"
            if w.pick(True, False)
            else f"x = torch.randn({{rows}}, {w.shape[0]})"
        ]
    draw = w.pick(
        "",
        "",
        "",
        "",
        f"torch.randint({max(1, w.batch // 2)}, {w.batch + 1}, ()).item()",
        f"random.randint({max(1, w.batch // 2)}, {w.batch})",
        f"int(np.random.randint({max(1, w.batch // 2)}, {w.batch} + 1))",
        "generator",
        "sampler",
    )
    if draw == "sampler":
        size = 3 * w.batch
        head = ["def make_data(job, classes):", f"    if 'order' not in job or len(job['order']) < {w.batch}:", f"        job['order'] = torch.randperm({size}, generator=job['generator']).tolist()",
                f"    index = [job['order'].pop() for _ in range({w.batch})]", "    rows = len(index)"]  # fmt: skip
    elif draw == "generator":
        head = [
            "def make_data(job, classes):",
            f"    rows = int(torch.randint({max(1, w.batch // 2)}, {w.batch + 1}, (1,), generator=job['generator']))",
        ]
    else:
        head = ["def make_data(job, classes):", f"    rows = {draw or rows}"]
    body = [f"    {line.format(rows='rows')}" for line in lines]
    return [*head, *body, "    t = torch.randint(0, classes, (rows,))", "    return {'x': x, 't': t}", "", ""]


def _write_loop(w: Writer, loss: str, classes: int) -> list[str]:
    """`build`, `step` and the script's own loop."""
    r = w.r
    seed = r.randint(0, 999)
    complex_weights = any("cfloat" in line or "Spectral" in line for line in w.made)
    optimizer = w.pick(*(o for o in OPTIMIZERS if not (complex_weights and "Adafactor" in o)))
    half = w.exact and r.random() < 0.2
    build = [
        "def build():", f"    torch.manual_seed({seed})", f"    random.seed({seed})", f"    np.random.seed({seed})", "    model = Net()",
    ]  # fmt: skip
    if r.random() < 0.1:
        build.append("    model = model.to(memory_format=torch.channels_last)")
    build += [
        "    p = [q for q in model.parameters()]", f"    o = {optimizer}",
        f"    job = {{'model': model, 'o': o, 'generator': torch.Generator().manual_seed({seed}), 'kept': [], 'weight': torch.rand({classes})}}",
    ]  # fmt: skip
    again = r.random() < 0.3
    if not again:
        build.append(f"    job['data'] = make_data(job, {classes})")
    schedule = r.random() < 0.4 and "LBFGS" not in optimizer
    if schedule:
        build.append(f"    job['s'] = {w.pick(*SCHEDULERS)}")
    average = w.pick("", "", "", "deepcopy", "averaged")
    if average == "deepcopy":
        build.append("    job['ema'] = copy.deepcopy(model).requires_grad_(False)")
    elif average:
        build.append(
            "    job['ema'] = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))"
        )
    parts = 1 if "LBFGS" in optimizer else w.pick(1, 1, 1, 2, 3)
    step = ["def step(job):", "    model, o = job['model'], job['o']", "    model.train()"]
    data = f"make_data(job, {classes})" if again else "job['data']"
    forward = [f"data = {data}", "x, t = data['x'], data['t']"]
    forward += (
        ["with torch.autocast('cpu', dtype=torch.bfloat16):", "    y = model(x)", "y = y.float()"]
        if half
        else ["y = model(x)"]
    )
    forward += [f"loss = {loss}"]
    if r.random() < 0.08:
        forward.append("loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters() if not p.is_complex())")
    clip = w.pick(
        "",
        "",
        "",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "nn.utils.clip_grad_value_(model.parameters(), 1.0)",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)",
    )
    if "value" in clip and complex_weights:
        clip = ""
    zero = f"o.zero_grad(set_to_none={w.pick(True, True, False)})"
    keep = w.pick(
        "",
        "",
        "",
        "job['kept'].append(loss.item())",
        "job['kept'].append(loss.detach())",
        "job['kept'].append(loss)",
        "job['kept'].append(y.detach())",
    )
    if "LBFGS" in optimizer:
        step += [
            "    def closure():",
            f"        {zero}",
            *(f"        {line}" for line in forward),
            "        loss.backward()",
            "        return loss",
            "    loss = o.step(closure)",
        ]
        keep = w.pick("", "job['kept'].append(float(loss))")
    else:
        if w.pick(True, False):
            step.append(f"    {zero}")
            zero = ""
        if parts > 1:
            step += [
                f"    for part in range({parts}):",
                *(f"        {line}" for line in forward),
                f"        (loss / {parts}).backward()",
            ]
        else:
            step += [*(f"    {line}" for line in forward), "    loss.backward()"]
        step += [f"    {line}" for line in (clip, "o.step()", zero) if line]
    if schedule:
        step.append("    job['s'].step()")
    if average == "deepcopy":
        step += [
            "    with torch.no_grad():",
            "        for a, b in zip(job['ema'].parameters(), model.parameters()):",
            "            a.lerp_(b, 0.01)",
        ]
    elif average:
        step.append("    job['ema'].update_parameters(model)")
    if keep:
        step.append(f"    {keep}")
    if r.random() < 0.3:
        step += [
            "    model.eval()",
            f"    with torch.{w.pick('no_grad', 'inference_mode')}():",
            f"        data = make_data(job, {classes})",
            "        y = model(data['x'])",
            "        right = (y.argmax(1) == data['t']).sum().item()" if not w.ragged else "        y.mean().item()",
        ]
    main = [
        "",
        "",
        'if __name__ == "__main__":',
        "    job = build()",
        f"    for _ in range({STEPS}):",
        "        step(job)",
    ]
    return [*build, "    return job", "", "", *step, *main]


# the real run


def real_peak(text: str, steps: int = STEPS) -> int | str:
    """The most bytes that torch's allocator for the CPU had given out at once in a process of its own, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            answer = json.dumps(_measure(text, steps))
        except BaseException as error:
            answer = json.dumps(f"{type(error).__name__}: {error}")
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else "the process died"


def _measure(text: str, steps: int) -> int:
    from torch.profiler import ProfilerActivity, profile

    warnings.simplefilter("ignore")
    space = load(text)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        job = space["build"]()
        for _ in range(steps):
            space["step"](job)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def load(text: str) -> dict[str, Any]:
    """The program's names."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), space)
    return space
