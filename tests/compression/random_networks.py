"""Random small networks: convolutions in groups, skips, concatenations, splits, norms, shared and tied weights, attention."""

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F


class Pictures(nn.Module):
    """Steps on (batch, channels, height, width), each drawn with the channels that it finds."""

    def __init__(self, steps, flat):
        super().__init__()
        self.steps, self.flat = steps, flat
        self.parts = nn.ModuleDict()
        self.recipe = []
        channels = 3
        for number, (kind, size, groups) in enumerate(steps):
            name, channels = f"p{number}", self._add(f"p{number}", kind, size, groups, channels)
            self.recipe.append((kind, name))
        self.head = nn.Linear(channels * (16 if flat else 1), 5)

    def _add(self, name, kind, size, groups, channels):
        out = 4 * size
        groups = groups if channels % groups == 0 else 1
        if kind == "conv":
            self.parts[name] = nn.Conv2d(channels, out, 3, padding=1, groups=groups)
        elif kind == "transposed":
            self.parts[name] = nn.ConvTranspose2d(channels, out, 1, groups=groups)
        elif kind == "depthwise":
            self.parts[name] = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
            return channels
        elif kind == "batch":
            self.parts[name] = nn.BatchNorm2d(channels)
            with torch.no_grad():
                self.parts[name].running_mean.normal_()
            return channels
        elif kind == "group":
            self.parts[name] = nn.GroupNorm(groups, channels)
            return channels
        elif kind == "skip":
            self.parts[name] = nn.Sequential(
                nn.Conv2d(channels, out, 1), nn.SiLU(), nn.Conv2d(out, channels, 3, padding=1)
            )
            return channels
        elif kind == "dense":
            self.parts[name] = nn.Conv2d(channels, out, 1)
            return channels + out
        elif kind == "gate":
            self.parts[name] = nn.Conv2d(channels, 2 * out, 1)
        elif kind == "shared":
            self.parts[name] = nn.Conv2d(channels, channels, 1)
            return channels
        elif kind == "squeeze":
            self.parts[name] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, out, 1), nn.ReLU(),
                                             nn.Conv2d(out, channels, 1), nn.Sigmoid())  # fmt: skip
            return channels
        return out

    def forward(self, x):
        for kind, name in self.recipe:
            part = self.parts[name]
            if kind == "skip":
                x = F.relu(x + part(x))
            elif kind == "dense":
                x = torch.cat([x, F.relu(part(x))], 1)
            elif kind == "gate":
                a, b = part(x).chunk(2, 1)
                x = a * torch.sigmoid(b)
            elif kind == "shared":
                x = torch.tanh(part(torch.tanh(part(x))))
            elif kind == "squeeze":
                x = x * part(x)
            elif kind in ("batch", "group"):
                x = part(x)
            else:
                x = F.gelu(part(x))
        return self.head(x.flatten(1) if self.flat else x.mean((2, 3)))


class Attention(nn.Module):
    """Written by hand, in two ways, with keys and values of fewer heads."""

    def __init__(self, width, heads, shared, packed):
        super().__init__()
        self.heads, self.head_dim, self.shared, self.packed = heads, 4, heads if packed else shared, packed
        inner = heads * 4
        if packed:
            self.qkv = nn.Linear(width, 3 * inner)
        else:
            self.q, self.k, self.v = nn.Linear(width, inner), nn.Linear(width, shared * 4), nn.Linear(width, shared * 4)
        self.o = nn.Linear(inner, width)

    def forward(self, x):
        b, t, _ = x.shape
        if self.packed:
            q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        else:
            q = self.q(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
            k = self.k(x).view(b, t, self.shared, self.head_dim).transpose(1, 2)
            v = self.v(x).view(b, t, self.shared, self.head_dim).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.shared)
        return self.o(found.transpose(1, 2).reshape(b, t, self.heads * self.head_dim))


class Tokens(nn.Module):
    """Steps on (batch, time, width), with an embedding that may also be the head."""

    def __init__(self, steps, width, tied):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.position = nn.Parameter(torch.randn(1, 9, width))
        self.parts, self.recipe = nn.ModuleDict(), []
        for number, (kind, size, groups) in enumerate(steps):
            self.recipe.append((kind, f"p{number}"))
            self.parts[f"p{number}"] = self._make(kind, size, groups, width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    @staticmethod
    def _make(kind, size, groups, width):
        if kind == "norm":
            return nn.LayerNorm(width)
        if kind == "attention":
            return Attention(width, 4, 4 // groups, size > 2)
        if kind == "torch":
            return nn.MultiheadAttention(width, groups, batch_first=True)
        hidden = 4 * size * (2 if kind == "gate" else 1)
        return nn.ModuleList([nn.Linear(width, hidden), nn.Linear(4 * size, width)])

    def forward(self, x):
        x = self.embedding(x) + self.position[:, : x.shape[1]]
        for kind, name in self.recipe:
            part = self.parts[name]
            if kind == "norm":
                x = part(x)
            elif kind == "attention":
                x = x + part(x)
            elif kind == "torch":
                x = x + part(x, x, x, need_weights=False)[0]
            elif kind == "gate":
                a, b = part[0](x).split(part[1].in_features, dim=-1)
                x = x + part[1](a * F.silu(b))
            else:
                x = x + part[1](F.relu(part[0](x)))
        return self.head(x)


def _steps(kinds):
    return st.lists(
        st.tuples(st.sampled_from(kinds), st.integers(1, 4), st.sampled_from([1, 2, 4])), min_size=1, max_size=6
    )


PICTURES = ["conv", "transposed", "depthwise", "batch", "group", "skip", "dense", "gate", "shared", "squeeze"]
TOKENS = ["norm", "attention", "torch", "gate", "mlp"]


@st.composite
def networks(draw):
    """(model in evaluation mode, batch)."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        steps = [("conv", draw(st.integers(1, 4)), 1), *draw(_steps(PICTURES))]
        return Pictures(steps, draw(st.booleans())).eval(), (torch.randn(2, 3, 4, 4),)
    model = Tokens(draw(_steps(TOKENS)), draw(st.sampled_from([8, 12])), draw(st.booleans()))
    return model.eval(), (torch.randint(0, 11, (2, 5)),)
