# ruff: noqa: E501
"""Single operators over many shapes: what each one allocates besides its results (see `record_cuda.py`)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sweep() -> list[Any]:
    """Signature and allocations of every operator that every probe ran, forward and backward."""
    from record_cuda import Log, read_events

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
    log = Log()
    failed = []
    for name, probe in probes():
        mark = len(log.rows)
        try:
            with log:
                probe()
        except Exception as error:
            failed.append((name, repr(error)[:200]))
            del log.rows[mark:]
        log.rows.append((f"#{name}", 0, 0))
    events = read_events()
    return [(text, events[begin:end], begin) for text, begin, end in log.rows] + [("failed", failed, 0)]


def probes() -> Iterator[tuple[str, Any]]:
    """(name, function to run) of everything probed."""
    for config in convolutions():
        yield f"conv {config}", lambda config=config: convolve(**config)
    for config in attentions():
        yield f"sdpa {config}", lambda config=config: attend(**config)
    for dtype in DTYPES:
        for name, function in small_operators(dtype):
            yield f"{name} {dtype}", function
    for name, function in optimizers():
        yield name, function


def convolutions() -> list[dict[str, Any]]:
    """A spread of the layers that real networks have."""
    rng = random.Random(7)
    configs = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for cl in (False, True):
            for _ in range(70 if not cl else 30):
                kernel = rng.choice([1, 1, 3, 3, 3, 5, 7])
                groups = rng.choice([1, 1, 1, "depth", 4, 32])
                cin = rng.choice([3, 16, 24, 32, 48, 64, 96, 128, 144, 192, 256, 384, 512, 1024])
                cout = rng.choice([16, 24, 32, 64, 96, 128, 192, 256, 384, 512, 1024])
                if groups == "depth":
                    cout = groups = cin
                elif cin % groups or cout % groups:
                    groups = 1
                size = rng.choice([7, 14, 28, 56, 112, 224])
                n = rng.choice([4, 16, 32, 64])
                if n * max(cin, cout) * size * size > 2e8:
                    size = 28
                configs.append({"n": n, "cin": cin, "cout": cout, "size": size, "kernel": kernel, "groups": groups,
                                "stride": rng.choice([1, 1, 1, 2, kernel]), "dtype": dtype, "cl": cl, "bias": rng.random() < 0.3})  # fmt: skip
    return configs


def convolve(
    n: int, cin: int, cout: int, size: int, kernel: int, groups: int, stride: int, dtype: Any, cl: bool, bias: bool
) -> None:
    layer = torch.nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=bias).cuda().to(dtype)
    x = torch.rand(n, cin, size, size, device="cuda", dtype=dtype)
    if cl:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    layer(x).sum().backward()


def attentions() -> list[dict[str, Any]]:
    configs = []
    for dtype in DTYPES:
        for b, h, s, d, kv in ((4, 12, 512, 64, 512), (2, 16, 1024, 64, 1024), (8, 12, 197, 64, 197), (4, 12, 128, 80, 128),
                               (2, 8, 333, 128, 333), (2, 4, 256, 256, 256), (4, 8, 64, 32, 640), (3, 6, 49, 32, 49)):  # fmt: skip
            for causal, mask, dropout in (
                (False, None, 0.0),
                (True, None, 0.0),
                (False, "bool", 0.0),
                (False, "full", 0.0),
                (False, None, 0.1),
            ):
                configs.append(
                    {
                        "b": b,
                        "h": h,
                        "s": s,
                        "d": d,
                        "kv": kv,
                        "dtype": dtype,
                        "causal": causal,
                        "mask": mask,
                        "dropout": dropout,
                    }
                )
    return configs


def attend(b: int, h: int, s: int, d: int, kv: int, dtype: Any, causal: bool, mask: str | None, dropout: float) -> None:
    q = torch.rand(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
    k = torch.rand(b, kv, h, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
    v = torch.rand(b, kv, h, d, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
    bias = None
    if mask == "bool":
        bias = torch.ones(b, 1, s, kv, device="cuda", dtype=torch.bool)
    elif mask == "full":
        bias = torch.zeros(b, h, s, kv, device="cuda", dtype=dtype)
    F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, dropout_p=dropout).sum().backward()


def _rand(*shape: int, dtype: Any) -> Any:
    return torch.rand(*shape, device="cuda", dtype=dtype).requires_grad_()


def small_operators(t: Any) -> Iterator[tuple[str, Any]]:
    """One call each of what models are made of."""

    def r(*shape: int) -> Any:
        return _rand(*shape, dtype=t)

    ids = torch.randint(0, 5000, (8, 512), device="cuda")
    image = (8, 32, 56, 56)
    table: dict[str, Any] = {
        "linear": lambda: F.linear(r(8, 512, 768), r(3072, 768), r(3072)),
        "linear no bias": lambda: F.linear(r(8, 512, 768), r(3072, 768)),
        "linear odd": lambda: F.linear(r(7, 33, 771), r(1003, 771), r(1003)),
        "addmm": lambda: torch.addmm(r(3072), r(4096, 768), r(768, 3072)),
        "bmm": lambda: torch.bmm(r(96, 512, 64), r(96, 64, 512)),
        "einsum": lambda: torch.einsum("bhid,bhjd->bhij", r(8, 12, 256, 64), r(8, 12, 256, 64)),
        "layer_norm": lambda: F.layer_norm(r(8, 512, 768), (768,), r(768), r(768)),
        "rms_norm": lambda: F.rms_norm(r(8, 512, 768), (768,), r(768)),
        "group_norm": lambda: F.group_norm(r(*image), 8, r(32), r(32)),
        "instance_norm": lambda: F.instance_norm(r(*image)),
        "batch_norm": lambda: F.batch_norm(r(*image), None, None, r(32), r(32), training=True),
        "batch_norm 1d": lambda: F.batch_norm(r(512, 256), None, None, r(256), r(256), training=True),
        "batch_norm cl": lambda: F.batch_norm(r(*image).to(memory_format=torch.channels_last), None, None, r(32), r(32), training=True),
        "softmax": lambda: F.softmax(r(8, 12, 512, 512), -1),
        "log_softmax": lambda: F.log_softmax(r(4096, 30522), -1),
        "cross_entropy": lambda: F.cross_entropy(r(4096, 30522), torch.randint(0, 30522, (4096,), device="cuda")),
        "cross_entropy smooth": lambda: F.cross_entropy(r(4096, 1000), torch.randint(0, 1000, (4096,), device="cuda"), label_smoothing=0.1),
        "cross_entropy 2d": lambda: F.cross_entropy(r(8, 21, 128, 128), torch.randint(0, 21, (8, 128, 128), device="cuda")),
        "bce": lambda: F.binary_cross_entropy_with_logits(r(64, 1000), torch.rand(64, 1000, device="cuda", dtype=t)),
        "mse": lambda: F.mse_loss(r(64, 1000), torch.rand(64, 1000, device="cuda", dtype=t)),
        "kl": lambda: F.kl_div(F.log_softmax(r(512, 1000), -1), torch.rand(512, 1000, device="cuda", dtype=t), reduction="batchmean"),
        "embedding": lambda: F.embedding(ids, r(30522, 768)),
        "embedding small": lambda: F.embedding(ids[:, :64] % 512, r(512, 768)),
        "embedding few": lambda: F.embedding(torch.arange(512, device="cuda"), r(512, 768)),
        "embedding padding": lambda: F.embedding(ids, r(30522, 768), padding_idx=0),
        "embedding_bag": lambda: F.embedding_bag(ids, r(30522, 64)),
        "dropout": lambda: F.dropout(r(8, 512, 768), 0.1),
        "gelu": lambda: F.gelu(r(8, 512, 768)), "silu": lambda: F.silu(r(8, 512, 768)), "relu": lambda: F.relu(r(8, 512, 768)),
        "hardswish": lambda: F.hardswish(r(*image)), "glu": lambda: F.glu(r(8, 512, 768)),
        "max_pool": lambda: F.max_pool2d(r(*image), 3, 2, 1), "avg_pool": lambda: F.avg_pool2d(r(*image), 2),
        "adaptive": lambda: F.adaptive_avg_pool2d(r(*image), 1), "adaptive 7": lambda: F.adaptive_avg_pool2d(r(*image), 7),
        "bilinear": lambda: F.interpolate(r(*image), scale_factor=2, mode="bilinear"),
        "nearest": lambda: F.interpolate(r(*image), scale_factor=2), "pad": lambda: F.pad(r(*image), (1, 1, 1, 1)),
        "reflect": lambda: F.pad(r(*image), (1, 1, 1, 1), mode="reflect"),
        "grid_sample": lambda: F.grid_sample(r(*image), torch.rand(8, 56, 56, 2, device="cuda", dtype=t)),
        "conv_transpose": lambda: F.conv_transpose2d(r(*image), r(32, 16, 2, 2), stride=2),
        "conv_transpose 4": lambda: F.conv_transpose2d(r(8, 64, 28, 28), r(64, 32, 4, 4), stride=2, padding=1),
        "conv1d": lambda: F.conv1d(r(8, 80, 3000), r(384, 80, 3), padding=1),
        "conv3d": lambda: F.conv3d(r(2, 16, 16, 56, 56), r(32, 16, 3, 3, 3), padding=1),
        "unfold": lambda: F.unfold(r(*image), 3), "cumsum": lambda: r(8, 512, 768).cumsum(1),
        "sort": lambda: r(512, 4096).sort(-1)[0], "sort long": lambda: r(2_000_000).sort()[0], "topk": lambda: r(512, 30000).topk(50)[0],
        "argsort": lambda: r(8, 4096).argsort(-1), "gather": lambda: r(512, 4096).gather(1, ids[:, :512].reshape(512, 8) % 4096),
        "index": lambda: r(5000, 256)[ids], "index_select": lambda: r(5000, 256).index_select(0, ids.flatten()),
        "index_add": lambda: r(5000, 256).index_add(0, ids.flatten(), r(4096, 256)),
        "scatter_add": lambda: r(8, 5000).scatter_add(1, ids, r(8, 512)), "masked_fill": lambda: r(8, 512, 768).masked_fill(torch.rand(8, 512, 768, device="cuda") > 0.5, 0.0),
        "where": lambda: torch.where(ids[..., None] > 100, r(8, 512, 768), r(1)), "mean": lambda: r(8, 512, 768).mean(-1), "mean all": lambda: r(8, 512, 768).mean(),
        "var": lambda: r(8, 512, 768).var(-1), "norm": lambda: r(8, 512, 768).norm(dim=-1), "max": lambda: r(8, 512, 768).max(-1)[0],
        "logsumexp": lambda: r(512, 30000).logsumexp(-1), "prod": lambda: r(64, 64).prod(-1), "pow": lambda: r(8, 512, 768).pow(2), "rsqrt": lambda: r(8, 512, 768).rsqrt(),
        "cat": lambda: torch.cat([r(8, 512, 64), r(8, 512, 64)], -1), "stack": lambda: torch.stack([r(8, 512, 64), r(8, 512, 64)]),
        "roll": lambda: r(8, 56, 56, 96).roll((-3, -3), (1, 2)), "expand": lambda: r(8, 1, 64).expand(8, 512, 64).contiguous(), "repeat": lambda: r(8, 4, 64).repeat(1, 8, 1),
        "repeat_interleave": lambda: r(8, 4, 64).repeat_interleave(4, 1), "broadcast add": lambda: r(8, 512, 768) + r(768), "to float": lambda: r(8, 512, 768).float(),
        "cdist": lambda: torch.cdist(r(512, 64), r(512, 64)), "cosine": lambda: F.cosine_similarity(r(512, 768), r(512, 768)), "pixel_shuffle": lambda: F.pixel_shuffle(r(8, 64, 28, 28), 2),
        "tril": lambda: r(512, 512).tril(), "prelu": lambda: F.prelu(r(*image), r(1)), "clip": lambda: r(8, 512, 768).clamp(0, 1),
        "fft": lambda: torch.fft.rfft(r(8, 512, 768)).abs(), "multi_head": lambda: torch.nn.MultiheadAttention(256, 8, batch_first=True, device="cuda", dtype=t)(*[r(8, 128, 256)] * 3)[0],
        "lstm": lambda: torch.nn.LSTM(256, 512, 2, batch_first=True, device="cuda", dtype=t)(r(16, 128, 256))[0],
        "lstm dropout": lambda: torch.nn.LSTM(256, 512, 2, dropout=0.2, device="cuda", dtype=t)(r(128, 16, 256))[0],
        "gru": lambda: torch.nn.GRU(256, 512, 1, batch_first=True, device="cuda", dtype=t)(r(16, 128, 256))[0],
        "bi lstm": lambda: torch.nn.LSTM(256, 256, 1, bidirectional=True, device="cuda", dtype=t)(r(64, 8, 256))[0],
        "ctc": lambda: F.ctc_loss(F.log_softmax(r(100, 8, 40).float(), -1), torch.randint(1, 40, (8, 20), device="cuda"), torch.full((8,), 100), torch.full((8,), 20)),
        "unique": lambda: (ids.unique(), r(1))[1], "nonzero": lambda: ((ids > 100).nonzero(), r(1))[1], "mask select": lambda: r(8, 512)[ids > 100],
        "multinomial": lambda: (torch.multinomial(torch.rand(64, 30000, device="cuda"), 1), r(1))[1], "bincount": lambda: (ids.flatten().bincount(), r(1))[1],
        "clip norm": lambda: _clip(r), "weight_norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(256, 256, device="cuda", dtype=t))(r(8, 256)),
    }  # fmt: skip
    for name, make in table.items():
        yield name, lambda make=make: _forward_backward(make)


def _clip(r: Any) -> Any:
    parameters = [r(256, 256) for _ in range(6)]
    for p in parameters:
        p.grad = torch.rand_like(p)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    return parameters[0]


def _forward_backward(make: Any) -> None:
    out = make()
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()


def optimizers() -> Iterator[tuple[str, Any]]:
    for kind in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"):
        for options in ({}, {"foreach": False}, {"momentum": 0.9}, {"fused": True}, {"weight_decay": 0.1}):
            yield f"optimizer {kind} {options}", lambda kind=kind, options=options: _optimize(kind, options)


def _optimize(kind: str, options: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.rand(n, 4096, device="cuda")) for n in (100, 300, 700)]
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-3, **options)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.rand_like(p)
        optimizer.step()
