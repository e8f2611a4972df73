"""Projected against measured peak of resident bytes for training steps on the CPU, a fresh process a model.

python benchmarks/estimate_cpu.py
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from estimate_models import LSTMTagger, UNet

Made = tuple[Any, Any, tuple[Any, ...]]


class Attention(torch.nn.Module):
    """A small transformer written out."""

    def __init__(self, width: int = 512, layers: int = 6, heads: int = 8, words: int = 20000) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, dropout=0.0)
        self.body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, words)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.body(self.embed(tokens)))


def mlp() -> Made:
    layers = [torch.nn.Sequential(torch.nn.Linear(3072, 3072), torch.nn.ReLU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(3072, 10))
    return model, torch.optim.AdamW(model.parameters()), (torch.rand(4096, 3072), torch.randint(0, 10, (4096,)))


def small_cnn() -> Made:
    sizes = [3, 64, 128, 256]
    blocks = [
        torch.nn.Sequential(
            torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.BatchNorm2d(b), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
        )
        for a, b in itertools.pairwise(sizes)
    ]
    model = torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 10))
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        (torch.rand(64, 3, 128, 128), torch.randint(0, 10, (64,))),
    )


def unet() -> Made:
    model = UNet(32)
    return (
        model,
        torch.optim.Adam(model.parameters()),
        (torch.rand(8, 3, 128, 128), torch.randint(0, 21, (8, 128, 128))),
    )


def lstm() -> Made:
    model, tokens = LSTMTagger(), torch.randint(0, 30000, (8, 128))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (tokens, tokens)


def transformer() -> Made:
    model, tokens = Attention(), torch.randint(0, 20000, (4, 256))
    return model, torch.optim.AdamW(model.parameters()), (tokens, tokens)


def wide() -> Made:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(200_000, 256), torch.nn.Linear(256, 1000))
    return (
        model,
        torch.optim.Adagrad(model.parameters()),
        (torch.randint(0, 200_000, (4096, 20)), torch.randint(0, 1000, (4096,))),
    )


def narrow_unet() -> Made:
    model = UNet(24)
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.rand(12, 3, 96, 96), torch.randint(0, 21, (12, 96, 96))),
    )


def strided() -> Made:
    sizes = [3, 48, 96, 160, 320]
    layers = [
        torch.nn.Sequential(
            torch.nn.Conv2d(a, b, 3, 2, 1), torch.nn.BatchNorm2d(b), torch.nn.GELU(), torch.nn.Conv2d(b, b, 3, 1, 1)
        )
        for a, b in itertools.pairwise(sizes)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(320, 100))
    return model, torch.optim.AdamW(model.parameters()), (torch.rand(24, 3, 160, 160), torch.randint(0, 100, (24,)))


class Causal(torch.nn.Module):
    """A small language model with fused attention."""

    def __init__(self, width: int = 384, layers: int = 4, heads: int = 6, words: int = 16000) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.head = torch.nn.Embedding(words, width), torch.nn.Linear(width, words)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(layers))

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for mix, out, norm in zip(self.mix, self.out, self.norm, strict=True):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in mix(norm(x)).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x)


def causal() -> Made:
    model, tokens = Causal(), torch.randint(0, 16000, (2, 1024))
    return model, torch.optim.AdamW(model.parameters()), (tokens, tokens)


def depthwise() -> Made:
    layers: list[Any] = [torch.nn.Conv2d(3, 32, 3, 2, 1)]
    for a, b, stride in ((32, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [torch.nn.Conv2d(a, a, 3, stride, 1, groups=a), torch.nn.BatchNorm2d(a), torch.nn.ReLU6()]
        layers += [torch.nn.Conv2d(a, b, 1), torch.nn.BatchNorm2d(b), torch.nn.ReLU6()]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 100))
    solver = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, solver, (torch.rand(32, 3, 160, 160), torch.randint(0, 100, (32,)))


class Tagger(torch.nn.Module):
    """A recurrent tagger on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(20000, 256), torch.nn.Linear(512, 4000)
        self.rnn = torch.nn.GRU(256, 256, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Any) -> Any:
        lengths = torch.tensor([max(1, tokens.shape[1] - 9 * i) for i in range(tokens.shape[0])])
        packed = torch.nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        return self.head(torch.nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def tagger() -> Made:
    model, tokens = Tagger(), torch.randint(0, 4000, (16, 192))
    return model, torch.optim.Adam(model.parameters()), (tokens, tokens)


MODELS = {"mlp": mlp, "cnn": small_cnn, "unet": unet, "lstm": lstm, "transformer": transformer, "wide": wide}
UNSEEN = {"narrow_unet": narrow_unet, "strided": strided, "causal": causal, "depthwise": depthwise, "tagger": tagger}
"""Nothing was fitted to these."""
MODELS |= UNSEEN


def step(model: Any, optimizer: Any, data: tuple[Any, Any]) -> None:
    out = model(data[0])
    if out.dim() == 3:
        out = out.flatten(0, 1)
    F.cross_entropy(out, data[1].flatten() if out.dim() == 2 else data[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(name: str) -> None:
    import resource

    made = MODELS[name]()
    for _ in range(3):
        step(*made)
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def project(name: str) -> None:
    import outsize

    footprint = outsize.estimate(step, build=MODELS[name], device="cpu")
    print(json.dumps([footprint.device_use.bytes, footprint.device_use.bound, footprint.peak_requested.bytes]))


def main() -> None:
    if len(sys.argv) > 2:
        {"measure": measure, "project": project}[sys.argv[1]](sys.argv[2])
        return
    print("| model | measured peak RSS | projected | error | bound |\n|---|---|---|---|---|")
    for name in MODELS:
        answers = {}
        for kind in ("measure", "project"):
            out = subprocess.run([sys.executable, sys.argv[0], kind, name], capture_output=True, text=True)
            assert out.returncode == 0, out.stderr
            answers[kind] = json.loads(out.stdout.splitlines()[-1])
        real, (likely, bound, _) = answers["measure"], answers["project"]
        print(
            f"| {name} | {real / 2**20:,.0f} MiB | {likely / 2**20:,.0f} MiB | {likely / real - 1:+.1%} | {bound / real:.3f}x |",
            flush=True,
        )


if __name__ == "__main__":
    main()
