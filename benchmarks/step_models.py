"""Small steps of many kinds for the CPU: the twelve of `twelve_steps.py`, and others that nothing was tuned on.

A case is a function that gives (model, loss, batch). Sizes are such that activations are most of what a plain step holds.
Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = Callable[[], tuple[nn.Module, Callable[[Any, Any], Any], Any]]


def _language(model: nn.Module, vocabulary: int, rows: int, length: int) -> tuple[Any, Any, Any]:
    tokens = torch.randint(0, vocabulary, (rows, length))
    return model, lambda m, b: m(input_ids=b["tokens"], labels=b["tokens"]).loss, {"tokens": tokens}


# the twelve


def bert() -> Any:
    import transformers as tf

    config = tf.BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512
    )
    return _language(tf.BertForMaskedLM(config), 500, 8, 128)


def llama() -> Any:
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=384
    )
    return _language(tf.LlamaForCausalLM(config), 500, 8, 128)


def deepseek_moe() -> Any:
    import transformers as tf

    config = tf.DeepseekV3Config(
        vocab_size=500, hidden_size=128, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=32,
        qk_nope_head_dim=32,
    )  # fmt: skip
    return _language(tf.DeepseekV3ForCausalLM(config), 500, 8, 96)


def swin() -> Any:
    import transformers as tf

    config = tf.SwinConfig(
        image_size=64, patch_size=2, embed_dim=32, depths=[2, 2, 4], num_heads=[2, 4, 8], window_size=4, num_labels=10,
        drop_path_rate=0.1,
    )  # fmt: skip
    batch = {"x": torch.randn(8, 3, 64, 64), "y": torch.randint(0, 10, (8,))}
    model = tf.SwinForImageClassification(config)
    return model, lambda m, b: F.cross_entropy(m(pixel_values=b["x"]).logits, b["y"]), batch


class Tower(nn.Module):
    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        block = lambda: nn.TransformerEncoderLayer(wide, 4, 4 * wide, 0.0, batch_first=True)  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.out = nn.Linear(wide, 64)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.out(x.mean(1)), dim=-1)


def two_towers() -> Any:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Tower(96, 4), Tower(128, 3)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, a: Any, b: Any) -> Any:
            return self.scale.exp() * self.left(a) @ self.right(b).T

    def loss(m: Any, b: Any) -> Any:
        logits = m(b["a"], b["b"])
        there = torch.arange(len(logits))
        return (F.cross_entropy(logits, there) + F.cross_entropy(logits.T, there)) / 2

    return Both(), loss, {"a": torch.randn(16, 48, 96), "b": torch.randn(16, 32, 128)}


def tcn() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = lambda i, o, d: nn.Sequential(  # noqa: E731
                nn.Conv1d(i, o, 3, padding=d, dilation=d), nn.BatchNorm1d(o), nn.ReLU(),
                nn.Conv1d(o, o, 3, padding=d, dilation=d), nn.BatchNorm1d(o), nn.ReLU(),
            )  # fmt: skip
            self.first = nn.Conv1d(8, 48, 1)
            self.levels = nn.ModuleList(part(48, 48, 2**i) for i in range(6))
            self.last = nn.Linear(48, 10)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for level in self.levels:
                x = F.relu(x + level(x))
            return self.last(x.mean(-1))

    return Net(), _classify, {"x": torch.randn(8, 8, 1024), "y": torch.randint(0, 10, (8,))}


def _classify(m: Any, b: Any) -> Any:
    return F.cross_entropy(m(b["x"]), b["y"])


class UNet(nn.Module):
    """With skips joined by concatenation, in two or three dimensions."""

    def __init__(self, dims: int, wide: int, norm: type[nn.Module]) -> None:
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.mode = "nearest"
        part = lambda i, o: nn.Sequential(  # noqa: E731
            conv(i, o, 3, padding=1), norm(o), nn.LeakyReLU(0.1), conv(o, o, 3, padding=1), norm(o), nn.LeakyReLU(0.1)
        )
        self.down = nn.ModuleList([part(2, wide), part(wide, 2 * wide), part(2 * wide, 4 * wide)])
        self.up = nn.ModuleList([part(6 * wide, 2 * wide), part(3 * wide, wide)])
        self.out = conv(wide, 3, 1)
        self.pool = {2: F.max_pool2d, 3: F.max_pool3d}[dims]

    def forward(self, x: Any) -> Any:
        skips = []
        for number, part in enumerate(self.down):
            x = part(x if number == 0 else self.pool(x, 2))
            skips.append(x)
        for number, part in enumerate(self.up):
            x = part(torch.cat([F.interpolate(x, scale_factor=2, mode=self.mode), skips[1 - number]], 1))
        return self.out(x)


def unet3d() -> Any:
    batch = {"x": torch.randn(4, 2, 20, 20, 20), "y": torch.randint(0, 3, (4, 20, 20, 20))}
    return UNet(3, 8, nn.InstanceNorm3d), _classify, batch


def qwen2() -> Any:
    import transformers as tf

    config = tf.Qwen2Config(
        vocab_size=500, hidden_size=128, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, intermediate_size=384
    )  # fmt: skip
    return _language(tf.Qwen2ForCausalLM(config), 500, 8, 128)


def densenet() -> Any:
    class Layer(nn.Module):
        def __init__(self, taken: int, grown: int) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.BatchNorm2d(taken), nn.Conv2d(taken, 4 * grown, 1, bias=False)
            self.norm2, self.conv2 = nn.BatchNorm2d(4 * grown), nn.Conv2d(4 * grown, grown, 3, padding=1, bias=False)

        def forward(self, features: list[Any]) -> Any:
            x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
            return self.conv2(F.relu(self.norm2(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            wide = 24
            self.stem = nn.Conv2d(3, wide, 3, padding=1)
            self.blocks, self.turns = nn.ModuleList(), nn.ModuleList()
            for _ in range(2):
                self.blocks.append(nn.ModuleList(Layer(wide + 12 * i, 12) for i in range(6)))
                wide += 72
                self.turns.append(
                    nn.Sequential(nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, wide // 2, 1), nn.AvgPool2d(2))
                )
                wide //= 2
            self.last = nn.Linear(wide, 10)

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            for block, turn in zip(self.blocks, self.turns, strict=True):
                features = [x]
                for layer in block:  # type: ignore[attr-defined]
                    features.append(layer(features))
                x = turn(torch.cat(features, 1))
            return self.last(x.mean((2, 3)))

    return Net(), _classify, {"x": torch.randn(8, 3, 32, 32), "y": torch.randint(0, 10, (8,))}


def seq2seq() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 96)
            self.encoder = nn.LSTM(96, 96, 2, batch_first=True)
            self.cell = nn.GRUCell(192, 96)
            self.out = nn.Linear(192, 300)

        def forward(self, source: Any, target: Any) -> Any:
            memory, (state, _) = self.encoder(self.embed(source))
            hidden, outs = state[-1], []
            for word in self.embed(target).unbind(1):
                weights = torch.softmax(torch.einsum("bd,btd->bt", hidden, memory) / 10, -1)
                context = torch.einsum("bt,btd->bd", weights, memory)
                hidden = self.cell(torch.cat([word, context], -1), hidden)
                outs.append(torch.cat([hidden, torch.tanh(context)], -1))
            return self.out(torch.stack(outs, 1))

    def loss(m: Any, b: Any) -> Any:
        return F.cross_entropy(m(b["source"], b["target"]).flatten(0, 1), b["target"].flatten())

    words = lambda n: torch.randint(0, 300, (24, n))  # noqa: E731
    return Net(), loss, {"source": words(32), "target": words(32)}


class Rounded(torch.autograd.Function):
    """Saves its input and its output, and gives a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        out = torch.tanh(x) + 0.1 * torch.sin(4 * x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, out = ctx.saved_tensors
        return gradient * (1 / (1 + x.square())) * (1 + 0.01 * out)


def vae() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 48, 3, 2, 1)
            self.mean, self.spread = nn.Conv2d(48, 24, 3, padding=1), nn.Conv2d(48, 24, 3, padding=1)
            self.third, self.fourth = nn.ConvTranspose2d(24, 32, 4, 2, 1), nn.Conv2d(32, 3, 3, padding=1)

    def loss(m: Any, b: Any) -> Any:
        x = b["x"]
        h = Rounded.apply(m.second(F.silu(m.first(x)) * 1.1 + 0.1))
        mean, spread = m.mean(h), m.spread(h).clamp(-4, 4)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        out = torch.sigmoid(m.fourth(Rounded.apply(m.third(z))))
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.mse_loss(out, x.sigmoid()) + 0.01 * kl

    return Net(), loss, {"x": torch.randn(16, 3, 48, 48)}


def graph() -> Any:
    class Layer(nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(2 * wide, wide), nn.Linear(2 * wide, wide)

        def forward(self, x: Any, edges: Any) -> Any:
            sent = F.silu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            got = torch.zeros_like(x).index_add(0, edges[1], sent)
            return x + F.layer_norm(F.relu(self.update(torch.cat([x, got], -1))), x.shape[-1:])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 64)
            self.layers = nn.ModuleList(Layer(64) for _ in range(4))
            self.last = nn.Linear(64, 7)

        def forward(self, x: Any, edges: Any) -> Any:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, edges)
            return self.last(x)

    def loss(m: Any, b: Any) -> Any:
        return F.cross_entropy(m(b["x"], b["edges"]), b["y"])

    return (
        Net(),
        loss,
        {"x": torch.randn(2000, 16), "edges": torch.randint(0, 2000, (2, 8000)), "y": torch.randint(0, 7, (2000,))},
    )


TWELVE: dict[str, Case] = {
    "BERT": bert, "Llama": llama, "DeepSeek-V3 MoE": deepseek_moe, "Swin": swin, "two towers": two_towers, "TCN": tcn,
    "3-D U-Net": unet3d, "Qwen2 GQA": qwen2, "DenseNet": densenet, "seq2seq": seq2seq, "VAE": vae, "graph network": graph,
}  # fmt: skip
