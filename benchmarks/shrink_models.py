"""Four models that are trained here, on data that need no network: characters of the standard library, digits, drawn shapes.

Each maker takes a seed, which draws first weights and data (and a fold, where all data are held out in turn), and gives
(model, loss, batches to train on, batches that `shrink` gets, held-out batches).
"""

from __future__ import annotations

import pathlib
import sysconfig
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

DATA, HELD_OUT = 128, 192
"""Batches that shrink gets, and that it never sees; of the digits, which are few, 60 and 60 of 10."""
FOLDS = {"digits CNN": 3}
"""Models that are trained so often with a seed, each time with other data held out, until all were."""
SIDE = 20
"""Of a drawn image."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class CharacterGPT(nn.Module):
    def __init__(self, vocabulary: int, width: int = 96, blocks: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Any) -> Any:
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class VisionTransformer(nn.Module):
    def __init__(self, classes: int, width: int = 64, blocks: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Parameter(torch.randn((SIDE // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Mix(nn.Module):
    """Mixes places, then channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across, self.back = nn.Linear(places, 4 * places), nn.Linear(4 * places, places)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.back(F.gelu(self.across(self.first(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Mixer(nn.Module):
    def __init__(self, classes: int, width: int = 64, blocks: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.blocks = nn.ModuleList(Mix((SIDE // patch) ** 2, width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class DigitsCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.hidden, self.head = nn.Linear(96 * 4, 64), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        return self.head(F.relu(self.hidden(self.layers(x))))


def class_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def gpt(seed: int) -> Any:
    """A GPT of characters, on the Python files of the standard library."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(errors="ignore") for path in sorted(folder.glob("*.py")))
    text = "".join(letter for letter in text if letter in "\n" or " " <= letter <= "~")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text[:3_000_000]])
    draw = torch.Generator().manual_seed(100 * seed + 1)

    def batches(low: int, high: int, count: int, rows: int) -> list[Any]:
        starts = torch.randint(low, high - 65, (count, rows), generator=draw)
        return [torch.stack([ids[start : start + 65] for start in row]) for row in starts]

    cut, more = int(len(ids) * 0.8), int(len(ids) * 0.9)
    data, held = batches(cut, more, DATA, 8), batches(more, len(ids), HELD_OUT, 8)
    return CharacterGPT(len(letters), width=64, blocks=2), token_loss, batches(0, cut, 700, 16), data, held


def cnn(seed: int, fold: int) -> Any:
    """A CNN on the digits of scikit-learn. A third of them is held out, another for each fold."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    answers = torch.tensor(digits.target)
    draw = torch.Generator().manual_seed(100 * seed + 2)
    order = torch.randperm(len(images), generator=draw)
    thirds = order.chunk(FOLDS["digits CNN"])
    held, data, training = (thirds[(fold + number) % len(thirds)] for number in range(3))
    picks = [training[torch.randperm(len(training), generator=draw)[:32]] for _ in range(600)]
    parts = picks, data.split(10), held.split(10)
    return DigitsCNN(), class_loss, *([(images[pick], answers[pick]) for pick in part] for part in parts)


def draw_shapes(seed: int) -> Any:
    """Circle, square, triangle, cross, ring, lines, at any place and size, in noise: batches to train on, of data, held out."""
    draw = torch.Generator().manual_seed(100 * seed + 4)
    y, x = torch.meshgrid(torch.arange(SIDE) - 0.0, torch.arange(SIDE) - 0.0, indexing="ij")

    def image(kind: int) -> Any:
        cx, cy, r = (torch.rand(3, generator=draw) * torch.tensor([8, 8, 4]) + torch.tensor([6, 6, 3])).tolist()
        dx, dy = x - cx, y - cy
        far = (dx**2 + dy**2).sqrt()
        drawn = [
            far < r, (dx.abs() < r) & (dy.abs() < r), (dy < r) & (dy > 2 * dx.abs() - r),
            ((dx.abs() < 1) | (dy.abs() < 1)) & (far < r), (far - r).abs() < 1, (dy.abs() % 3 < 1) & (dx.abs() < r),
            (dx.abs() % 3 < 1) & (dy.abs() < r), ((dx - dy).abs() < 1.5) & (far < r),
        ][kind]  # fmt: skip
        return drawn.float() * 0.8 + torch.randn(SIDE, SIDE, generator=draw) * 0.3

    def batches(count: int, rows: int) -> list[Any]:
        kinds = torch.randint(0, 8, (count, rows), generator=draw)
        return [(torch.stack([image(int(kind)) for kind in row])[:, None], row) for row in kinds]

    return [batches(700, 32), batches(DATA, 16), batches(HELD_OUT, 16)]


def vit(seed: int) -> Any:
    """A ViT on drawn shapes."""
    return VisionTransformer(8, blocks=2), class_loss, *draw_shapes(seed)


def mixer(seed: int) -> Any:
    """An MLP-mixer on drawn shapes."""
    return Mixer(8), class_loss, *draw_shapes(seed)


MODELS = {"character GPT": gpt, "digits CNN": cnn, "shapes ViT": vit, "shapes mixer": mixer}
RATES = {"character GPT": 3e-3, "digits CNN": 2e-3, "shapes ViT": 1.5e-3, "shapes mixer": 2e-3}


def train(model: Any, loss: Any, batches: list[Any], rate: float) -> Any:
    """One walk over the batches, with a learning rate that rises and falls."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(batches))
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        plan.step()
    return model.eval()
