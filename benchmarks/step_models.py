"""Steps of many kinds: the twelve of `twelve_steps.py`, and others that nothing was tuned on.

A case is a function that gives (model, loss, batch). Sizes are such that activations are most of what a plain step holds:
small ones for a CPU, and of the twelve with `big` real ones for a card, where the plain step holds 4 to 19 GiB.
Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = Callable[..., tuple[nn.Module, Callable[[Any, Any], Any], Any]]

AMP = ("BERT", "DeepSeek-V3 MoE", "Swin", "two towers")
"""Steps that run under autocast on a card."""


def _language(model: nn.Module, vocabulary: int, rows: int, length: int) -> tuple[Any, Any, Any]:
    tokens = torch.randint(0, vocabulary, (rows, length))
    return model, lambda m, b: m(input_ids=b["tokens"], labels=b["tokens"]).loss, {"tokens": tokens}


# the twelve


def bert(big: bool = False) -> Any:
    import transformers as tf

    if big:
        return _language(tf.BertForMaskedLM(tf.BertConfig()), 30522, 24, 512)
    config = tf.BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512
    )
    return _language(tf.BertForMaskedLM(config), 500, 8, 128)


def llama(big: bool = False) -> Any:
    import transformers as tf

    wide, layers, heads, inner, words = (1024, 18, 16, 2816, 32000) if big else (128, 6, 4, 384, 500)
    config = tf.LlamaConfig(
        vocab_size=words, hidden_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, use_cache=not big,
    )  # fmt: skip
    return _language(tf.LlamaForCausalLM(config), words, 16 if big else 8, 512 if big else 128)


def deepseek_moe(big: bool = False) -> Any:
    import transformers as tf

    shape: dict[str, Any] = {
        "vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "qk_nope_head_dim": 32,
    }  # fmt: skip
    if big:
        shape = {
            "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "moe_intermediate_size": 384,
            "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 12, "n_routed_experts": 16, "n_group": 4,
            "topk_group": 2, "num_experts_per_tok": 4, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_rope_head_dim": 32,
            "v_head_dim": 64, "qk_nope_head_dim": 64, "use_cache": False,
        }  # fmt: skip
    config = tf.DeepseekV3Config(**shape, n_shared_experts=1, first_k_dense_replace=1)
    return _language(tf.DeepseekV3ForCausalLM(config), shape["vocab_size"], 8, 512 if big else 96)


def swin(big: bool = False) -> Any:
    import transformers as tf

    loss = lambda m, b: F.cross_entropy(m(pixel_values=b["x"]).logits, b["y"])  # noqa: E731
    if big:
        batch = {"x": torch.randn(64, 3, 224, 224), "y": torch.randint(0, 1000, (64,))}
        return tf.SwinForImageClassification(tf.SwinConfig(num_labels=1000)), loss, batch
    config = tf.SwinConfig(
        image_size=64, patch_size=2, embed_dim=32, depths=[2, 2, 4], num_heads=[2, 4, 8], window_size=4, num_labels=10,
        drop_path_rate=0.1,
    )  # fmt: skip
    batch = {"x": torch.randn(8, 3, 64, 64), "y": torch.randint(0, 10, (8,))}
    return tf.SwinForImageClassification(config), loss, batch


class Tower(nn.Module):
    def __init__(self, wide: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        block = lambda: nn.TransformerEncoderLayer(wide, heads, 4 * wide, 0.0, batch_first=True)  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.out = nn.Linear(wide, 64)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.out(x.mean(1)), dim=-1)


def two_towers(big: bool = False) -> Any:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (Tower(768, 12, 12), Tower(512, 8, 8)) if big else (Tower(96, 4), Tower(128, 3))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, a: Any, b: Any) -> Any:
            return self.scale.exp() * self.left(a) @ self.right(b).T

    def loss(m: Any, b: Any) -> Any:
        logits = m(b["a"], b["b"])
        there = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, there) + F.cross_entropy(logits.T, there)) / 2

    shapes = ((96, 197, 768), (96, 77, 512)) if big else ((16, 48, 96), (16, 32, 128))
    return Both(), loss, {"a": torch.randn(shapes[0]), "b": torch.randn(shapes[1])}


def tcn(big: bool = False) -> Any:
    wide, levels, rows, long = (256, 8, 24, 4096) if big else (48, 6, 8, 1024)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = lambda i, o, d: nn.Sequential(  # noqa: E731
                nn.Conv1d(i, o, 3, padding=d, dilation=d), nn.BatchNorm1d(o), nn.ReLU(),
                nn.Conv1d(o, o, 3, padding=d, dilation=d), nn.BatchNorm1d(o), nn.ReLU(),
            )  # fmt: skip
            self.first = nn.Conv1d(8, wide, 1)
            self.levels = nn.ModuleList(part(wide, wide, 2**i) for i in range(levels))
            self.last = nn.Linear(wide, 10)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for level in self.levels:
                x = F.relu(x + level(x))
            return self.last(x.mean(-1))

    return Net(), _classify, {"x": torch.randn(rows, 8, long), "y": torch.randint(0, 10, (rows,))}


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


def unet3d(big: bool = False) -> Any:
    wide, side = (32, 80) if big else (8, 20)
    batch = {"x": torch.randn(4, 2, side, side, side), "y": torch.randint(0, 3, (4, side, side, side))}
    return UNet(3, wide, nn.InstanceNorm3d), _classify, batch


def qwen2(big: bool = False) -> Any:
    import transformers as tf

    wide, layers, heads, groups, inner, words = (896, 10, 14, 2, 4864, 32000) if big else (128, 6, 8, 2, 384, 500)
    config = tf.Qwen2Config(
        vocab_size=words, hidden_size=wide, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, use_cache=not big,
    )  # fmt: skip
    return _language(tf.Qwen2ForCausalLM(config), words, 4 if big else 8, 1024 if big else 128)


def densenet(big: bool = False) -> Any:
    wide_first, grown, depths, labels = (64, 32, (6, 12, 24, 16), 1000) if big else (24, 12, (6, 6), 10)

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
            wide = wide_first
            self.stem = nn.Conv2d(3, wide, 3, padding=1)
            if big:
                self.stem = nn.Sequential(
                    nn.Conv2d(3, wide, 7, 2, 3, bias=False), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
                )
            self.blocks, self.turns = nn.ModuleList(), nn.ModuleList()
            for depth in depths:
                self.blocks.append(nn.ModuleList(Layer(wide + grown * i, grown) for i in range(depth)))
                wide += grown * depth
                self.turns.append(
                    nn.Sequential(nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, wide // 2, 1), nn.AvgPool2d(2))
                )
                wide //= 2
            self.last = nn.Linear(wide, labels)

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            for block, turn in zip(self.blocks, self.turns, strict=True):
                features = [x]
                for layer in block:  # type: ignore[attr-defined]
                    features.append(layer(features))
                x = turn(torch.cat(features, 1))
            return self.last(x.mean((2, 3)))

    rows, side = (64, 224) if big else (8, 32)
    return Net(), _classify, {"x": torch.randn(rows, 3, side, side), "y": torch.randint(0, labels, (rows,))}


def seq2seq(big: bool = False) -> Any:
    known, wide, rows, long = (32000, 512, 128, 64) if big else (300, 96, 24, 32)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(known, wide)
            self.encoder = nn.LSTM(wide, wide, 2, batch_first=True)
            self.cell = nn.GRUCell(2 * wide, wide)
            self.out = nn.Linear(2 * wide, known)

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

    return Net(), loss, {name: torch.randint(0, known, (rows, long)) for name in ("source", "target")}


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


def vae(big: bool = False) -> Any:
    one, two, three, rows, side = (64, 128, 96, 64, 128) if big else (24, 48, 32, 16, 48)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, one, 3, padding=1), nn.Conv2d(one, two, 3, 2, 1)
            self.mean, self.spread = nn.Conv2d(two, one, 3, padding=1), nn.Conv2d(two, one, 3, padding=1)
            self.third, self.fourth = nn.ConvTranspose2d(one, three, 4, 2, 1), nn.Conv2d(three, 3, 3, padding=1)

    def loss(m: Any, b: Any) -> Any:
        x = b["x"]
        h = Rounded.apply(m.second(F.silu(m.first(x)) * 1.1 + 0.1))
        mean, spread = m.mean(h), m.spread(h).clamp(-4, 4)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        out = torch.sigmoid(m.fourth(Rounded.apply(m.third(z))))
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.mse_loss(out, x.sigmoid()) + 0.01 * kl

    return Net(), loss, {"x": torch.randn(rows, 3, side, side)}


def graph(big: bool = False) -> Any:
    nodes, links, wide, layers = (200_000, 600_000, 128, 6) if big else (2000, 8000, 64, 4)

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
            self.first = nn.Linear(16, wide)
            self.layers = nn.ModuleList(Layer(wide) for _ in range(layers))
            self.last = nn.Linear(wide, 7)

        def forward(self, x: Any, edges: Any) -> Any:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, edges)
            return self.last(x)

    def loss(m: Any, b: Any) -> Any:
        return F.cross_entropy(m(b["x"], b["edges"]), b["y"])

    edges = torch.randint(0, nodes, (2, links))
    return Net(), loss, {"x": torch.randn(nodes, 16), "edges": edges, "y": torch.randint(0, 7, (nodes,))}


TWELVE: dict[str, Case] = {
    "BERT": bert, "Llama": llama, "DeepSeek-V3 MoE": deepseek_moe, "Swin": swin, "two towers": two_towers, "TCN": tcn,
    "3-D U-Net": unet3d, "Qwen2 GQA": qwen2, "DenseNet": densenet, "seq2seq": seq2seq, "VAE": vae, "graph network": graph,
}  # fmt: skip


# a dozen others, and more


def convnext() -> Any:
    import transformers as tf

    config = tf.ConvNextConfig(
        hidden_sizes=[24, 48], depths=[3, 3], num_stages=2, patch_size=2, num_labels=10, image_size=48
    )
    batch = {"x": torch.randn(8, 3, 48, 48), "y": torch.randint(0, 10, (8,))}
    model = tf.ConvNextForImageClassification(config)
    return model, lambda m, b: F.cross_entropy(m(pixel_values=b["x"]).logits, b["y"]), batch


def t5() -> Any:
    import transformers as tf

    config = tf.T5Config(
        vocab_size=400, d_model=96, d_kv=24, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    words = torch.randint(1, 400, (8, 64))
    return (
        tf.T5ForConditionalGeneration(config),
        lambda m, b: m(input_ids=b["x"], labels=b["y"]).loss,
        {"x": words, "y": words},
    )


def scan() -> Any:
    """A selective state space, one step after the other."""

    class Layer(nn.Module):
        def __init__(self, wide: int, state: int) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(wide, 2 * wide), nn.Linear(wide, wide)
            self.delta, self.b, self.c = nn.Linear(wide, wide), nn.Linear(wide, state), nn.Linear(wide, state)
            self.a = nn.Parameter(torch.rand(wide, state))

        def forward(self, x: Any) -> Any:
            u, gate = self.into(F.layer_norm(x, x.shape[-1:])).chunk(2, -1)
            delta, b, c = F.softplus(self.delta(u)), self.b(u), self.c(u)
            h, outs = torch.zeros(len(x), *self.a.shape), []
            for t in range(x.shape[1]):
                h = torch.exp(-delta[:, t, :, None] * self.a) * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
                outs.append((h * c[:, t, None]).sum(-1))
            return x + self.out(torch.stack(outs, 1) * F.silu(gate))

    model = nn.Sequential(nn.Linear(12, 48), Layer(48, 8), Layer(48, 8), nn.Linear(48, 12))
    return model, lambda m, b: F.mse_loss(m(b)[:, :-1], b[:, 1:]), torch.randn(8, 48, 12)


def capsules() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 24, 5), nn.Conv2d(24, 32, 5, 2)
            self.weight = nn.Parameter(torch.randn(10, 4 * 16 * 4, 8, 8) * 0.1)

        def forward(self, x: Any) -> Any:
            squash = lambda s: s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))  # noqa: E731
            u = squash(self.second(F.relu(self.first(x))).reshape(len(x), -1, 8))
            votes = torch.einsum("cnij,bnj->bcni", self.weight, u)
            logits = torch.zeros(votes.shape[:3])
            for _ in range(3):
                out = squash((logits.softmax(1)[..., None] * votes).sum(2))
                logits = logits + (votes * out[:, :, None]).sum(-1)
            return out.norm(dim=-1)

    return (
        Net(),
        lambda m, b: F.multi_margin_loss(m(b["x"]), b["y"]),
        {"x": torch.randn(16, 1, 24, 24), "y": torch.randint(0, 10, (16,))},
    )


def unet2d() -> Any:
    return (
        UNet(2, 12, nn.BatchNorm2d),
        _classify,
        {"x": torch.randn(8, 2, 64, 64), "y": torch.randint(0, 3, (8, 64, 64))},
    )


def simclr() -> Any:
    """Two noisy views of each sample; all others of the batch are its negatives."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.Conv2d(32, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU(True),
        nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 32),
    )  # fmt: skip

    def loss(m: Any, b: Any) -> Any:
        z = F.normalize(m(torch.cat([b + 0.1 * torch.randn_like(b), b.flip(-1) * (torch.rand_like(b) > 0.1)])), dim=-1)
        alike = (z @ z.T / 0.2).fill_diagonal_(-1e9)
        n = len(b)
        return F.cross_entropy(alike, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))

    return model, loss, torch.randn(8, 3, 32, 32)


def ctc() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn = (
                nn.Conv1d(20, 64, 5, padding=2),
                nn.GRU(64, 64, 2, bidirectional=True, batch_first=True),
            )
            self.out = nn.Linear(128, 30)

        def forward(self, x: Any) -> Any:
            h = F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return F.log_softmax(self.out(F.dropout(self.rnn(h)[0], 0.1, self.training)), -1)

    def loss(m: Any, b: Any) -> Any:
        out = m(b["x"]).transpose(0, 1)
        n = out.shape[1]
        return F.ctc_loss(out, b["y"], torch.full((n,), out.shape[0]), torch.full((n,), b["y"].shape[1]))

    return Net(), loss, {"x": torch.randn(8, 120, 20), "y": torch.randint(1, 30, (8, 20))}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        part = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.LeakyReLU(0.2))  # noqa: E731
        self.body = nn.Sequential(part(3, 32), part(32, 48), part(48, 64), nn.Flatten(), nn.Linear(64 * 16, 1))

    def forward(self, x: Any) -> Any:
        return self.body(x)


def generator() -> Any:
    """The loss of a generator: a critic that is not trained looks at its pictures."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            up = lambda i, o: nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
            self.first, self.body = (
                nn.Linear(32, 64 * 16),
                nn.Sequential(up(64, 48), up(48, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1)),
            )
            self.critic = Critic().requires_grad_(False)

    def loss(m: Any, b: Any) -> Any:
        return F.softplus(-m.critic(torch.tanh(m.body(m.first(b).view(-1, 64, 4, 4))))).mean()

    return Net(), loss, torch.randn(24, 32)


def penalty() -> Any:
    """A critic of a Wasserstein GAN with its gradient penalty: backward through a backward pass."""

    def loss(m: Any, b: Any) -> Any:
        real, fake = b["real"], b["fake"]
        part = torch.rand(len(real), 1, 1, 1)
        between = (part * real + (1 - part) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(m(between).sum(), between, create_graph=True)
        return (m(fake) - m(real)).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return Critic(), loss, {"real": torch.randn(12, 3, 32, 32), "fake": torch.randn(12, 3, 32, 32)}


def sage() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.near = (nn.ModuleList(nn.Linear(i, 64) for i in (24, 64, 64)) for _ in range(2))
            self.last = nn.Linear(64, 5)

        def forward(self, x: Any, edges: Any) -> Any:
            for own, near in zip(self.own, self.near, strict=True):
                count = torch.zeros(len(x)).index_add_(0, edges[1], torch.ones(edges.shape[1])).clamp_(min=1)
                mean = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]) / count[:, None]
                x = F.dropout(F.normalize(F.relu(own(x) + near(mean))), 0.1, self.training)
            return self.last(x)

    def loss(m: Any, b: Any) -> Any:
        return F.cross_entropy(m(b["x"], b["edges"]), b["y"])

    return (
        Net(),
        loss,
        {"x": torch.randn(3000, 24), "edges": torch.randint(0, 3000, (2, 12000)), "y": torch.randint(0, 5, (3000,))},
    )


def perceiver() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(24, 96) * 0.1)
            self.into = nn.Linear(12, 96)
            self.cross = nn.ModuleList(nn.MultiheadAttention(96, 4, batch_first=True) for _ in range(3))
            self.inner = nn.ModuleList(nn.TransformerEncoderLayer(96, 4, 256, 0.0, batch_first=True) for _ in range(3))
            self.last = nn.Linear(96, 10)

        def forward(self, x: Any) -> Any:
            x, z = self.into(x), self.latents.expand(len(x), -1, -1)
            for cross, inner in zip(self.cross, self.inner, strict=True):
                z = inner(z + cross(z, x, x, need_weights=False)[0])
            return self.last(z.mean(1))

    return Net(), _classify, {"x": torch.randn(8, 256, 12), "y": torch.randint(0, 10, (8,))}


def nerf() -> Any:
    """Points along rays, coded by sines, weighed by what is before them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(63, 96), *(nn.Linear(96, 96) for _ in range(4))])
            self.out = nn.Linear(96, 4)

    def loss(m: Any, b: Any) -> Any:
        depth = torch.linspace(0.1, 2, 32) + 0.02 * torch.rand(len(b["rays"]), 32)
        points = b["rays"][:, None, :3] + depth[..., None] * b["rays"][:, None, 3:]
        waves = [points] + [wave(2.0**i * points) for i in range(10) for wave in (torch.sin, torch.cos)]
        h = torch.cat(waves, -1)
        for layer in m.layers:
            h = F.relu(layer(h))
        out = m.out(h)
        clear = torch.exp(-F.softplus(out[..., 0]) * 0.06)
        seen = torch.cumprod(torch.cat([torch.ones_like(clear[:, :1]), clear[:, :-1]], 1), 1) * (1 - clear)
        return F.mse_loss((seen[..., None] * out[..., 1:].sigmoid()).sum(1), b["colours"])

    return Net(), loss, {"rays": torch.randn(128, 6), "colours": torch.rand(128, 3)}


def lstm() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(400, 96),
                nn.LSTM(96, 128, 2, dropout=0.1),
                nn.Linear(128, 400),
            )

    def loss(m: Any, b: Any) -> Any:
        words = b.T
        h = F.dropout(m.rnn(F.dropout(m.embed(words[:-1]), 0.1))[0], 0.1)
        return F.cross_entropy(m.out(h).flatten(0, 1), words[1:].flatten())

    return Net(), loss, torch.randint(0, 400, (16, 65))


def diffusion() -> Any:
    """Noise of a time that is drawn for each sample, taken away by a U-Net."""
    noise = lambda b: torch.randn_like(b)  # noqa: E731

    def loss(m: Any, b: Any) -> Any:
        t, e = torch.rand(len(b), 1, 1, 1), noise(b)
        x = torch.cos(1.5 * t) * b + torch.sin(1.5 * t) * e
        return F.mse_loss(m(torch.cat([x, t.expand_as(x[:, :1])], 1))[:, :1], e)

    return UNet(2, 12, nn.InstanceNorm2d), loss, torch.randn(8, 1, 48, 48)


BLIND: dict[str, Case] = {
    "ConvNeXt": convnext, "T5": t5, "selective scan": scan, "capsules": capsules, "2-D U-Net": unet2d, "SimCLR": simclr,
    "CTC": ctc, "GAN generator": generator, "WGAN penalty": penalty, "GraphSAGE": sage, "Perceiver": perceiver, "NeRF": nerf,
    "LSTM language": lstm, "diffusion": diffusion,
}  # fmt: skip
