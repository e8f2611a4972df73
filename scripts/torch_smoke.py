"""A smoke of the model room under one torch: `estimate`, `fit` and `shrink`, each with SGD, AdamW and autocast.

In: the torch of the interpreter that runs it. Out: one line of JSON: the version of torch, and for each case "ok" or what went
wrong in a sentence. No card is used, so a case that reaches for one fails. Results are compared with plain torch.

    PYTHONPATH=src python scripts/torch_smoke.py
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import outsize

WAYS = ("SGD", "AdamW", "autocast")
WIDTH, LENGTH, ROWS = 64, 32, 16
CLOSE = {"SGD": 1e-5, "AdamW": 1e-4, "autocast": 5e-2}
"""Largest difference of a weight after one step, relative to the largest weight."""


class Block(nn.Module):
    """Attention and a wide layer, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.mix(self.norm(x)).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 100))


def make_batch() -> Any:
    return torch.randint(0, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def make_optimizer(way: str, model: nn.Module) -> Any:
    if way == "SGD":
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), 1e-3)


def loss_of(way: str) -> Callable[[Any, Any], Any]:
    def loss(model: Any, batch: Any) -> Any:
        cast = torch.autocast(batch.device.type, torch.bfloat16) if way == "autocast" else contextlib.nullcontext()
        with cast:
            logits = model(batch)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.flatten())

    return loss


def estimate(way: str) -> None:
    for device in ("cuda", "cpu"):

        def build(device: str = device) -> Any:
            model = make_model().to(device)
            return model, make_optimizer(way, model), make_batch().to(device)

        def step(model: Any, optimizer: Any, batch: Any) -> None:
            loss_of(way)(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        found = outsize.estimate(step, build=build, device=device)
        weights = sum(4 * p.numel() for p in make_model().parameters())
        assert found.peak_allocated.bytes > 2 * weights, f"{found.peak_allocated.bytes} bytes are less than two copies"
        assert not found.guesses, found.guesses[0]


def estimate_rank(way: str) -> None:
    """One of eight ranks, with parts of torch.distributed loaded as accelerate loads them."""
    import torch.distributed.tensor.parallel

    def build() -> Any:
        model = make_model().cuda()
        return model, make_optimizer(way, model), make_batch().cuda()

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(way)(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = outsize.estimate(step, build=build).peak_allocated.bytes
    kinds = ("ddp", "fsdp") if hasattr(torch.distributed.fsdp, "fully_shard") else ("ddp",)
    found = {kind: outsize.estimate(step, build=build, ranks=8, sharding=kind).peak_allocated.bytes for kind in kinds}
    assert found.get("fsdp", 0) < whole < found["ddp"], f"{whole} {found}"


def fit(way: str) -> None:
    loss, batch = loss_of(way), make_batch()
    model, optimizer, expected = prepare(way, batch)
    plain = outsize.fit(model, loss, optimizer, batch, budget="8GiB", dry_run=True).plan.plain
    budget = plain * 7 // 10
    fitted = outsize.fit(model, loss, optimizer, batch, budget=budget)
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak() <= budget, f"{fitted.measured} {fitted.plan.peak()} {budget}"
    compare(way, model, expected)


def fit_hosted(way: str) -> None:
    loss, batch = loss_of(way), make_batch()
    model, optimizer, expected = prepare(way, batch)
    dry = outsize.fit(model, loss, optimizer, batch, device="cuda", budget="256MiB", host="16GiB", dry_run=True)
    assert 0 < dry.plan.peak() <= 2**28
    fitted = outsize.fit(model, loss, optimizer, batch, device="cpu", budget="8MiB", host="16GiB")
    fitted.step(batch)
    compare(way, model, expected)


def fit_tensors(way: str) -> None:
    """Saved tensors are made again or moved one by one."""
    loss, batch = loss_of(way), make_batch()
    model, optimizer, expected = prepare(way, batch)
    plain = outsize.fit(model, loss, optimizer, batch, budget="8GiB", dry_run=True).plan.plain
    others = ("slices", "checkpoint", "offload", "chunks")
    fitted = outsize.fit(model, loss, optimizer, batch, budget=plain * 8 // 10, without=others)
    assert fitted.choice.recipes or fitted.choice.tensors_away, str(fitted.choice)
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak(), f"{fitted.measured} {fitted.plan.peak()}"
    compare(way, model, expected)


def shrink(way: str) -> None:
    model, loss = make_model(), loss_of(way)
    small = outsize.shrink(model, [make_batch()], loss=loss, to="60%", methods=("bf16", "int8"), within=1.0)
    size = sum(p.numel() * p.element_size() for p in small.model.parameters())
    size += sum(b.numel() * b.element_size() for b in small.model.buffers())
    assert size <= 0.61 * sum(4 * p.numel() for p in model.parameters()), f"{size} bytes are left"


def prepare(way: str, batch: Any) -> tuple[nn.Module, Any, nn.Module]:
    """(model, its optimizer, what one plain step makes of the model)."""
    model = make_model()
    expected = copy.deepcopy(model)
    optimizer = make_optimizer(way, expected)
    loss_of(way)(expected, batch).backward()
    optimizer.step()
    return model, make_optimizer(way, model), expected


def compare(way: str, model: nn.Module, expected: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        far = float((ours - theirs).abs().max() / theirs.abs().max())
        assert far <= CLOSE[way], f"{name} differs from plain torch's by {far:.1e}"


VERBS = {
    "estimate": estimate, "ranks": estimate_rank, "fit": fit, "tensors": fit_tensors, "hosted fit": fit_hosted,
    "shrink": shrink,
}  # fmt: skip


def try_case(verb: Callable[[str], None], way: str) -> str:
    try:
        verb(way)
    except Exception as error:
        if "--raise" in sys.argv:
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "ok"


found = {f"{name}, {way}": try_case(verb, way) for name, verb in VERBS.items() for way in WAYS}
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "cases": found}))
