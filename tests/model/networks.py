"""Small networks for the tests of fit, one per thing that can go wrong."""

import torch
from torch import nn
from torch.nn import functional

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.runner import Work


class Block(nn.Module):
    def __init__(self, width, dropout=0.0, norm="layer"):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.mix(self.norm(x)).chunk(3, -1))
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + functional.dropout(self.down(functional.gelu(self.up(x))), self.dropout, self.training)


class Language(nn.Module):
    """A causal language model: attention, tied weights, optional dropout, optionally one block used twice."""

    def __init__(self, blocks=3, width=32, words=101, dropout=0.0, shared=False):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.shared = shared

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.shared:
            x = self.blocks[0](x)
        return self.head(x)


def language_loss(model, tokens):
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.second(functional.relu(self.norm(self.first(x))))


class Vision(nn.Module):
    """A convolutional net with batch or group norm."""

    def __init__(self, blocks=3, width=8, norm="group"):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.Sequential(*(Residual(width, norm) for _ in range(blocks)))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def vision_loss(model, batch):
    return functional.cross_entropy(model(batch["image"]), batch["label"])


class Patches(nn.Module):
    """A vision transformer in small."""

    def __init__(self, blocks=3, width=32):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def make_tokens(rows=6, length=24, words=101):
    return torch.randint(0, words, (rows, length))


def make_images(rows=6, size=16):
    return {"image": torch.randn(rows, 3, size, size), "label": torch.randint(0, 5, (rows,))}


def plain_step(model, loss, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return value.detach()


def plain_peak(model, loss, batch, optimizer, **more):
    """What the plain step holds at its highest moment, as a plan has it, without the search for one."""
    work = Work(model=model, loss=loss, optimizer=optimizer, **more)
    return Stage(work, batch).project(Choice()).peak


def worst_difference(a, b):
    """Largest relative difference of two lists of tensors, relative to the larger ones among them."""
    a, b = ([t.detach() for t in side] for side in (a, b))
    floor = 1e-4 * max(float(t.norm()) for t in b)
    return max(float((x - y).norm()) / max(float(y.norm()), floor) for x, y in zip(a, b, strict=True))
