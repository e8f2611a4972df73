"""Training code in the styles of well-known repositories, fitted at 60 % and 35 % of what its plain step really holds.

python benchmarks/clients_fit.py [names]

In: a dozen clients, each a model, a loss and a batch, written as those repositories write them, and small. Out: a table with, for
each client and budget, whether three steps stayed inside it by torch's own allocator events (not by anything of ours), by which
remedies, or the refusal with its way out, and the largest relative difference of a gradient from the plain one.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

import outsize
from outsize.model.fitting.plan.remedies import describe

Made = tuple[nn.Module, Callable[[Any, Any], Any], Any]
"""Model, loss, batch."""

PARTS = (0.60, 0.35)


def draw_tokens(*shape: int, words: int = 512) -> Any:
    return torch.randint(0, words, shape)


def entropy(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


# language


class CausalAttention(nn.Module):
    """nanoGPT's: one product for queries, keys and values, fused attention."""

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(256, 256)).view(1, 1, 256, 256))

    def forward(self, x: Any) -> Any:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # minGPT writes it out
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width)))


class GPT(nn.Module):
    def __init__(self, fused: bool, dropout: float, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(512, width), nn.Embedding(256, width), nn.Dropout(dropout)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width), "attn": CausalAttention(width, 4, dropout, fused),
                    "ln_2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(
                        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
                    ),
                }
            )
            for _ in range(layers)
        )  # fmt: skip
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 512, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(
            logits.view(-1, 512), targets.view(-1), ignore_index=-1
        )


def nanogpt() -> Made:
    return GPT(True, 0.0), lambda m, b: m(*b)[1], (draw_tokens(12, 96), draw_tokens(12, 96))


def mingpt() -> Made:
    return GPT(False, 0.1), lambda m, b: m(*b)[1], (draw_tokens(12, 96), draw_tokens(12, 96))


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
    )
    return LlamaForCausalLM(config)


def llama_gqa() -> Made:
    tokens = draw_tokens(12, 96)
    return make_llama(), lambda m, b: m(**b).loss, {"input_ids": tokens, "labels": tokens.clone()}


class LowRank(nn.Module):
    """A linear layer with a low-rank addition, as peft wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(0.05)
        self.a, self.b = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Any) -> Any:
        return self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))


def lora() -> Made:
    model, loss, batch = llama_gqa()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            LowRank(layer.self_attn.q_proj),
            LowRank(layer.self_attn.v_proj),
        )
    return model, loss, batch


def trainer() -> Made:
    """What transformers' Trainer computes: a collated batch with padding, and label smoothing."""
    from transformers.trainer_pt_utils import LabelSmoother

    model, _, batch = llama_gqa()
    lengths = torch.randint(40, 97, (12,))
    padding = torch.arange(96)[None] >= lengths[:, None]
    batch["attention_mask"] = (~padding).long()
    batch["labels"] = batch["labels"].masked_fill(padding, -100)
    smoother = LabelSmoother(0.1)
    return model, lambda m, b: smoother(m(**b), b["labels"], shift_labels=True), batch


class WordLanguageModel(nn.Module):
    """pytorch/examples: time first, states handed in and detached, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(512, 128)
        self.rnn, self.decoder = nn.LSTM(128, 128, 2, dropout=0.2), nn.Linear(128, 512)

    def forward(self, tokens: Any, hidden: Any) -> Any:
        out, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return F.log_softmax(self.decoder(self.drop(out)).view(-1, 512), dim=1), hidden


def lstm() -> Made:
    hidden = (torch.zeros(2, 20, 128), torch.zeros(2, 20, 128))
    batch = (draw_tokens(35, 20), draw_tokens(35 * 20).view(35, 20), hidden)
    return WordLanguageModel(), lambda m, b: F.nll_loss(m(b[0], b[2])[0], b[1].reshape(-1)), batch


class RotaryBlock(nn.Module):
    """x-transformers': pre-norm with gated GELU, rotary positions, two residual streams in one module list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(width),
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width),
        )
        self.gate, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any, turn: Any) -> Any:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (
            part * turn.cos() + torch.cat((-part.chunk(2, -1)[1], part.chunk(2, -1)[0]), -1) * turn.sin()
            for part in (q, k)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        value, gate = self.gate(x).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))


class XTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(512, 128), nn.ModuleList(RotaryBlock(128) for _ in range(4))
        self.out = nn.Linear(128, 512)

    def forward(self, tokens: Any) -> Any:
        angles = torch.arange(tokens.shape[1])[:, None] / 10000 ** (torch.arange(16) / 16)
        turn, x = torch.cat((angles, angles), -1), self.embed(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return self.out(x)


def x_transformers() -> Made:
    return XTransformer(), lambda m, b: entropy(m(b[:, :-1]), b[:, 1:]), draw_tokens(12, 97)


# pictures


class BasicBlock(nn.Module):
    """torchvision's: in-place activations."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Any) -> Any:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        widths = (32, 32, 64, 64, 128, 128)
        self.layers = nn.Sequential(*(BasicBlock(a, b, 1 + (a != b)) for a, b in itertools.pairwise((32, *widths))))
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1), 1))


def make_pictures(rows: int, size: int, classes: int = 10) -> tuple[Any, Any]:
    return torch.randn(rows, 3, size, size), torch.randint(0, classes, (rows,))


def classify(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def resnet() -> Made:
    return ResNet(), classify, make_pictures(16, 48)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, 128, 4, 4), nn.Parameter(torch.zeros(1, 1, 128))
        self.positions = nn.Parameter(torch.randn(1, 65, 128) * 0.02)
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def vit() -> Made:
    return ViT(), classify, make_pictures(16, 32)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Any) -> Any:
        hidden = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(logvar) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae_loss(model: Any, x: Any) -> Any:
    out, mu, logvar = model(x)
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return F.binary_cross_entropy(out, x.view(-1, 784), reduction="sum") + divergence


def vae() -> Made:
    return VAE(), vae_loss, torch.rand(1024, 1, 28, 28)


class Digits(nn.Module):
    """pytorch/examples/mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        x = self.dropout1(F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def mnist() -> Made:
    batch = (torch.rand(64, 1, 28, 28), torch.randint(0, 10, (64,)))
    return Digits(), lambda m, b: F.nll_loss(m(b[0]), b[1]), batch


def double_conv(before: int, width: int, norm: type[nn.Module] | None = nn.BatchNorm2d) -> nn.Sequential:
    def layers(a: int) -> list[nn.Module]:
        made = norm(width) if norm is not None else nn.GroupNorm(4, width)
        return [nn.Conv2d(a, width, 3, padding=1, bias=False), made, nn.ReLU(inplace=True)]

    return nn.Sequential(*layers(before), *layers(width))


class UNet(nn.Module):
    def __init__(self, norm: type[nn.Module] | None, out: int) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = (double_conv(a, b, norm) for a, b in ((3, 16), (16, 32), (32, 64)))
        self.up1, self.up2 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.conv1, self.conv2, self.out = double_conv(64, 32, norm), double_conv(32, 16, norm), nn.Conv2d(16, out, 1)

    def forward(self, x: Any) -> Any:
        first = self.inc(x)
        second = self.down1(F.max_pool2d(first, 2))
        third = self.down2(F.max_pool2d(second, 2))
        x = self.conv1(torch.cat([second, self.up1(third)], 1))
        return self.out(self.conv2(torch.cat([first, self.up2(x)], 1)))


def unet_loss(model: Any, batch: Any) -> Any:
    """Pytorch-UNet's: cross entropy and dice."""
    masks = model(batch["image"])
    parts = F.softmax(masks, 1) * F.one_hot(batch["mask"], 2).permute(0, 3, 1, 2)
    return F.cross_entropy(masks, batch["mask"]) + 1 - 2 * parts.sum() / (masks.numel() // 2 + 1e-6)


def unet() -> Made:
    return (
        UNet(nn.BatchNorm2d, 2),
        unet_loss,
        {"image": torch.randn(6, 3, 64, 64), "mask": torch.randint(0, 2, (6, 64, 64))},
    )


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.times = UNet(None, 3), nn.Embedding(1000, 3)

    def forward(self, x: Any, times: Any) -> Any:
        return self.net(x + self.times(times)[:, :, None, None])


def diffusion_loss(model: Any, x: Any) -> Any:
    """denoising-diffusion-pytorch: times and noise are drawn in the loss."""
    keep = torch.linspace(1, 0.01, 1000)
    times = torch.randint(0, 1000, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    part = keep[times][:, None, None, None]
    loss = F.mse_loss(model(part.sqrt() * x + (1 - part).sqrt() * noise, times), noise, reduction="none")
    return loss.flatten(1).mean(1).mean()


def diffusion() -> Made:
    return Denoiser(), diffusion_loss, torch.randn(12, 3, 48, 48)


class MBConv(nn.Module):
    """timm's EfficientNet: depthwise convolution, squeeze and excitation, skipped paths in training."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        wide = 4 * width
        self.conv_pw, self.bn1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.conv_dw, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.reduce, self.expand = nn.Conv2d(wide, width // 2, 1), nn.Conv2d(width // 2, wide, 1)
        self.conv_pwl, self.bn3, self.drop = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width), drop

    def forward(self, x: Any) -> Any:
        out = F.silu(self.bn2(self.conv_dw(F.silu(self.bn1(self.conv_pw(x))))))
        out = out * self.expand(F.silu(self.reduce(out.mean((2, 3), keepdim=True)))).sigmoid()
        out = self.bn3(self.conv_pwl(out))
        keep = x.new_empty(len(x), 1, 1, 1).bernoulli_(1 - self.drop) / (1 - self.drop)
        return x + out * keep


def efficientnet() -> Made:
    stem, head = nn.Conv2d(3, 24, 3, 2, 1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return nn.Sequential(stem, *(MBConv(24, 0.1) for _ in range(4)), *head), classify, make_pictures(12, 64)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Any) -> Any:
        out = self.norm(self.conv_dw(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.fc2(F.gelu(self.fc1(out)))).permute(0, 3, 1, 2)


def convnext() -> Made:
    stem, head = nn.Conv2d(3, 64, 4, 4), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(stem, *(ConvNeXtBlock(64) for _ in range(5)), *head), classify, make_pictures(16, 64)


class DenseLayer(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, 4 * width, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * width), nn.Conv2d(4 * width, width, 3, padding=1, bias=False)

    def forward(self, found: Any) -> Any:
        out = self.conv1(F.relu(self.norm1(torch.cat(found, 1))))
        return self.conv2(F.relu(self.norm2(out)))


class DenseBlock(nn.ModuleDict):
    def __init__(self, layers: int, before: int, width: int) -> None:
        super().__init__()
        for number in range(layers):
            self.add_module(f"denselayer{number + 1}", DenseLayer(before + number * width, width))

    def forward(self, x: Any) -> Any:
        found = [x]
        for layer in self.values():
            found.append(layer(found))
        return torch.cat(found, 1)


def densenet() -> Made:
    body = (
        nn.Conv2d(3, 16, 3, padding=1),
        DenseBlock(6, 16, 8),
        nn.Conv2d(64, 32, 1),
        nn.AvgPool2d(2),
        DenseBlock(6, 32, 8),
    )
    head = (nn.BatchNorm2d(80), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10))
    return nn.Sequential(*body, *head), classify, make_pictures(12, 32)


# graphs


class GraphLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any, edges: Any) -> Any:
        sent = self.others(x)[edges[0]]
        return x + F.relu(self.own(x) + torch.zeros_like(x).index_add(0, edges[1], sent))


class GraphNet(nn.Module):
    """A graph classifier in the style of torch_geometric's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.layers = nn.Linear(16, 64), nn.ModuleList(GraphLayer(64) for _ in range(5))
        self.head = nn.Linear(64, 4)

    def forward(self, x: Any, edges: Any, batch: Any, graphs: int) -> Any:
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x))


class Graphs:
    """Many graphs as one, with the attributes of torch_geometric's `Batch`."""

    def __init__(self, graphs: int) -> None:
        sizes = torch.randint(10, 40, (graphs,))
        self.ptr = torch.cat((torch.zeros(1, dtype=torch.long), sizes.cumsum(0)))
        self.batch = torch.repeat_interleave(torch.arange(graphs), sizes)
        self.x, self.y = torch.randn(int(sizes.sum()), 16), torch.randint(0, 4, (graphs,))
        ends = [start + torch.randint(0, int(n), (2, 3 * int(n))) for start, n in zip(self.ptr, sizes, strict=False)]
        self.edge_index = torch.cat(ends, 1)


def graph_loss(model: Any, data: Any) -> Any:
    return F.cross_entropy(model(data.x, data.edge_index, data.batch, len(data.y)), data.y)


def graph_net() -> Made:
    return GraphNet(), graph_loss, Graphs(48)


def pyg() -> Made:
    from torch_geometric.data import Batch, Data

    own = Graphs(48)
    graphs = []
    for number, (start, stop) in enumerate(itertools.pairwise(own.ptr.tolist())):
        inside = (own.edge_index[0] >= start) & (own.edge_index[0] < stop)
        graphs.append(
            Data(x=own.x[start:stop], edge_index=own.edge_index[:, inside] - start, y=own.y[number : number + 1])
        )
    return GraphNet(), graph_loss, Batch.from_data_list(graphs)


CLIENTS: dict[str, Callable[[], Made]] = {
    "nanoGPT": nanogpt, "minGPT": mingpt, "Llama GQA": llama_gqa, "LoRA": lora, "Trainer": trainer, "LSTM": lstm,
    "x-transformers": x_transformers, "resnet": resnet, "ViT": vit, "VAE": vae, "MNIST": mnist, "U-Net": unet,
    "diffusion": diffusion, "EfficientNet": efficientnet, "ConvNeXt": convnext, "DenseNet": densenet, "graphs": graph_net,
    "PyG Batch": pyg,
}  # fmt: skip


# measuring


def measure(prepare: Callable[[], Any], *runs: Callable[[], Any]) -> int:
    """Most bytes that `runs` hold, by the CPU allocator's own events, above what `prepare` says is held before each of them.

    The allocator is watched from before `prepare` on: it reports the end only of what it saw begin.
    """
    before = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        count = prepare()
        for number, run in enumerate(runs):
            before.append(count())
            with record_function(f"measured {number}"):
                run()
    events = seen.profiler.kineto_results.events()
    spans = {
        event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name().startswith("measured")
    }
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = 0
    for number, start in enumerate(before):
        first, last = spans[f"measured {number}"]
        most = max(most, *itertools.accumulate((size for at, size in memory if first <= at <= last), initial=start))
    return most


def held(model: nn.Module, optimizer: Any, batch: Any) -> int:
    """Bytes of weights, buffers, gradients, optimizer state and batch."""
    from outsize.model.fitting.batch import tensors_of

    state = [
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [*model.parameters(), *model.buffers(), *grads, *state, *tensors_of(batch).values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def plain_step(model: nn.Module, loss: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def worst_difference(model: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> float:
    """Largest difference of a weight's change over the largest change: with plain SGD that is the gradient's."""
    largest = max(float((after[name] - before[name]).norm()) for name in after) or 1.0
    return max(float((p.detach() - after[name]).norm()) for name, p in model.named_parameters()) / largest


def try_client(name: str, make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    try:
        model, loss, batch = make()
    except ImportError as error:
        print(f"| {name} | not installed: {error.name} | | | | |")
        return
    first = copy.deepcopy(model.state_dict())
    loss(model, batch).backward()
    rate = 0.01 / max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    model.load_state_dict(first)

    def restart() -> Any:
        """The model as it was, in memory that is watched, and a new optimizer."""
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
        model.load_state_dict(first)
        model.zero_grad()
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)

    optimizer = restart()
    torch.manual_seed(1)
    real = measure(lambda: lambda: held(model, optimizer, batch), lambda: plain_step(model, loss, optimizer, batch))
    plain = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for part in PARTS:
        try_budget(name, part, real, (model, loss, batch), restart, first, plain)


def try_budget(name: str, part: float, real: int, made: Made, restart: Any, first: Any, plain: Any) -> None:
    model, loss, batch = made
    budget, began = int(part * real), time.perf_counter()
    kept: dict[str, Any] = {}

    def prepare() -> Callable[[], int]:
        optimizer = restart()
        kept["fitted"] = outsize.fit(model, loss, optimizer, batch, budget=budget)
        torch.manual_seed(1)
        return lambda: held(model, optimizer, batch)

    def compared() -> None:
        kept["fitted"].step(batch)
        kept["difference"] = worst_difference(model, first, plain)

    try:
        most = measure(prepare, lambda: kept["fitted"].step(batch), lambda: kept["fitted"].step(batch))
        kept["fitted"].undo()
        measure(prepare, compared)
    except outsize.OutsizeError as error:
        print(f"| {name} | {real / 2**20:.1f} | {part:.0%} | refused: {error} | | |", flush=True)
        return
    fitted = kept["fitted"]
    said = f"{fitted.plan.peak() / 2**20:.2f} planned, {most / 2**20:.2f} real of {budget / 2**20:.2f}"
    verdict = "inside" if most <= budget else f"OVER by {(most - budget) / 2**10:.0f} KiB"
    took = f"{time.perf_counter() - began:.0f} s"
    ways = f"{describe(fitted.choice)} | {kept['difference']:.0e}"
    row = f"| {name} | {real / 2**20:.1f} | {part:.0%} | {verdict}: {said} | {ways} |"
    print(row, took, flush=True)
    fitted.undo()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| client | plain MiB | budget | by allocator events, MiB | remedies | gradients differ by |")
    print("|---|---|---|---|---|---|")
    for client in sys.argv[1:] or CLIENTS:
        try_client(client, CLIENTS[client])
