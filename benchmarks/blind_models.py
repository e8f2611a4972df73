# ruff: noqa: E501
"""Steps that no rule was read from: other families, other settings, other kinds of steps than `estimate_models`.

A case is a dictionary with `model`, `batch`, `optimizer`, `precision` and options; `prepare(case, device)` builds it and returns a
function that runs one step. Weights are random: only shapes matter.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = dict[str, Any]
Made = tuple[Any, Callable[[Any], Any]]
"""A model and what computes its loss."""


# torchvision


def classify(name: str, size: int = 224, **options: Any) -> Callable[[Case, str], Made]:
    def make(case: Case, device: str) -> Made:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **options)
        images = torch.rand(case["batch"], 3, size, size, device=device)
        labels = torch.randint(0, 1000, (case["batch"],), device=device)
        if case.get("format") == "channels_last":
            model = model.to(memory_format=torch.channels_last)
        return model, lambda m: F.cross_entropy(_plain(m(images.to(next(m.parameters()).dtype))).float(), labels)

    return make


def _plain(out: Any) -> Any:
    return getattr(out, "logits", out)


def segment(name: str, size: int = 224) -> Callable[[Case, str], Made]:
    def make(case: Case, device: str) -> Made:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=21)
        images = torch.rand(case["batch"], 3, size, size, device=device)
        labels = torch.randint(0, 21, (case["batch"], size, size), device=device)
        return model, lambda m: F.cross_entropy(m(images)["out"].float(), labels)

    return make


def video(name: str, frames: int = 8, size: int = 112) -> Callable[[Case, str], Made]:
    def make(case: Case, device: str) -> Made:
        import torchvision

        model = torchvision.models.get_model(name, weights=None)
        clips = torch.rand(case["batch"], 3, frames, size, size, device=device)
        labels = torch.randint(0, 400, (case["batch"],), device=device)
        return model, lambda m: F.cross_entropy(m(clips).float(), labels)

    return make


# transformers


def text(auto: str, config: str, seq: int = 384, labels: str = "tokens", **options: Any) -> Callable[[Case, str], Made]:
    def make(case: Case, device: str) -> Made:
        import transformers

        settings = getattr(transformers, config)(**options)
        model = (
            getattr(transformers, auto).from_config(settings)
            if auto.startswith("Auto")
            else getattr(transformers, auto)(settings)
        )
        tokens = torch.randint(
            5, min(20000, settings.get_text_config().vocab_size), (case["batch"], case.get("seq", seq)), device=device
        )
        extra: dict[str, Any] = {}
        if labels == "tokens":
            extra["labels"] = tokens
        elif labels == "class":
            extra["labels"] = torch.randint(0, 2, (case["batch"],), device=device)
        elif labels == "span":
            place = torch.randint(0, 100, (case["batch"],), device=device)
            extra |= {"start_positions": place, "end_positions": place}
        if case.get("mask"):
            extra["attention_mask"] = torch.ones_like(tokens)
        return model, lambda m: m(input_ids=tokens, **extra).loss

    return make


def pixels(
    auto: str, config: str, size: int = 224, labels: str = "class", **options: Any
) -> Callable[[Case, str], Made]:
    def make(case: Case, device: str) -> Made:
        import transformers

        settings = getattr(transformers, config)(**options)
        model = getattr(transformers, auto)(settings)
        images = torch.rand(case["batch"], 3, size, size, device=device)
        extra: dict[str, Any] = {}
        if labels == "class":
            extra["labels"] = torch.randint(0, settings.num_labels, (case["batch"],), device=device)
        elif labels == "map":
            extra["labels"] = torch.randint(0, settings.num_labels, (case["batch"], size, size), device=device)
        dtype = next(model.parameters()).dtype
        return model, lambda m: m(pixel_values=images.to(dtype), **extra).loss

    return make


def whisper(case: Case, device: str) -> Made:
    import transformers

    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            encoder_layers=4,
            decoder_layers=4,
            d_model=384,
            encoder_ffn_dim=1536,
            decoder_ffn_dim=1536,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
        )
    )
    sound, tokens = (
        torch.rand(case["batch"], 80, 3000, device=device),
        torch.randint(5, 20000, (case["batch"], 128), device=device),
    )
    return model, lambda m: m(input_features=sound, labels=tokens).loss


def wav2vec2(case: Case, device: str) -> Made:
    import transformers

    config = transformers.Wav2Vec2Config(num_hidden_layers=4, mask_time_prob=0.0, layerdrop=0.0)
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    sound, labels = (
        torch.rand(case["batch"], 32000, device=device),
        torch.randint(0, 2, (case["batch"],), device=device),
    )
    return model, lambda m: m(input_values=sound, labels=labels).loss


def clip(case: Case, device: str) -> Made:
    import transformers

    model = transformers.CLIPModel(transformers.CLIPConfig())
    images = torch.rand(case["batch"], 3, 224, 224, device=device)
    tokens = torch.randint(5, 20000, (case["batch"], 77), device=device)
    return model, lambda m: m(input_ids=tokens, pixel_values=images, return_loss=True).loss


def mae(case: Case, device: str) -> Made:
    import transformers

    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(num_hidden_layers=6))
    images = torch.rand(case["batch"], 3, 224, 224, device=device)
    return model, lambda m: m(pixel_values=images).loss


def generate(case: Case, device: str) -> Made:
    """A prompt and then tokens one by one with a cache of keys and values."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(5, 20000, (case["batch"], 512), device=device)

    def run(m: Any) -> Any:
        out = m(input_ids=tokens, use_cache=True)
        for _ in range(16):
            out = m(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return out.logits.sum()

    return model, run


# plain torch


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it."""

    def __init__(self, base: Any, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(F.dropout(self.down(x), 0.1, self.training))


def adapters(case: Case, device: str) -> Made:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    tokens = torch.randint(5, 20000, (case["batch"], 512), device=device)
    return model, lambda m: m(input_ids=tokens, labels=tokens).loss


class Recurrent(nn.Module):
    """A recurrent tagger, on packed sequences where lengths are given."""

    def __init__(self, kind: str, layers: int = 2, both: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20000, 384)
        self.rnn = getattr(nn, kind)(384, 512, num_layers=layers, batch_first=True, bidirectional=both, dropout=0.1)
        self.head = nn.Linear(1024 if both else 512, 5000)

    def forward(self, tokens: Any, lengths: Any = None) -> Any:
        x = self.embed(tokens)
        if lengths is None:
            return self.head(self.rnn(x)[0])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(out)


def recurrent(kind: str, both: bool = False, packed: bool = False) -> Callable[[Case, str], Made]:
    def make(case: Case, device: str) -> Made:
        n, seq = case["batch"], case.get("seq", 256)
        model, tokens = Recurrent(kind, both=both), torch.randint(0, 5000, (n, seq), device=device)
        lengths = torch.tensor([max(1, seq - (7 * i) % seq) for i in range(n)]) if packed else None
        return model, lambda m: F.cross_entropy(m(tokens, lengths).flatten(0, 1).float(), tokens.flatten())

    return make


class Denoiser(nn.Module):
    """A small diffusion U-Net: residual blocks with a time embedding, attention at the lower levels."""

    class Block(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
            self.norm, self.other = nn.GroupNorm(32, a), nn.GroupNorm(32, b)
            self.time, self.skip = nn.Linear(512, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x: Any, t: Any) -> Any:
            h = self.first(F.silu(self.norm(x))) + self.time(F.silu(t))[:, :, None, None]
            return self.skip(x) + self.second(F.silu(self.other(h)))

    class Attend(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.GroupNorm(32, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

        def forward(self, x: Any) -> Any:
            n, c, h, w = x.shape
            q, k, v = self.qkv(self.norm(x)).view(n, 3, 8, c // 8, h * w).transpose(-1, -2).unbind(1)
            return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(n, c, h, w))

    def __init__(self, sizes: tuple[int, ...] = (128, 256, 384)) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.begin, self.end = nn.Conv2d(4, sizes[0], 3, padding=1), nn.Conv2d(sizes[0], 4, 3, padding=1)
        self.down = nn.ModuleList(self.Block(a, b) for a, b in zip((sizes[0], *sizes[:-1]), sizes, strict=True))
        self.shrink = nn.ModuleList(nn.Conv2d(c, c, 3, 2, 1) for c in sizes[:-1])
        self.attend = nn.ModuleList(self.Attend(c) if c > 128 else nn.Identity() for c in sizes)
        self.up = nn.ModuleList(
            self.Block(a + b, b) for a, b in zip((sizes[-1], *reversed(sizes[1:])), reversed(sizes), strict=True)
        )

    def forward(self, x: Any, t: Any) -> Any:
        t, x, kept = self.time(t), self.begin(x), []
        for level, block in enumerate(self.down):
            x = self.attend[level](block(x, t))
            kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        for block in self.up:
            other = kept.pop()
            x = block(torch.cat([F.interpolate(x, size=other.shape[-2:]), other], 1), t)
        return self.end(x)


def denoiser(case: Case, device: str) -> Made:
    n = case["batch"]
    x, t = torch.rand(n, 4, 64, 64, device=device), torch.rand(n, 128, device=device)
    return Denoiser(), lambda m: F.mse_loss(m(x, t).float(), torch.randn_like(x))


class Auto(nn.Module):
    """An autoencoder with transposed convolutions of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 64, 128, 256, 512)
        self.encode = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
                for a, b in itertools.pairwise(sizes)
            ]
        )
        self.decode = nn.Sequential(
            *[
                nn.Sequential(nn.ConvTranspose2d(b, a, k, 2, 1, o), nn.BatchNorm2d(a), nn.ReLU())
                for a, b, k, o in ((256, 512, 4, 0), (128, 256, 3, 1), (64, 128, 4, 0), (32, 64, 4, 0))
            ]
        )
        self.end = nn.Conv2d(32, 3, 5, padding=2)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.end(self.decode(self.encode(x))))


def autoencoder(case: Case, device: str) -> Made:
    x = torch.rand(case["batch"], 3, 128, 128, device=device)
    return Auto(), lambda m: F.l1_loss(m(x).float(), x)


class Mixer(nn.Module):
    """Dilated, grouped and one-dimensional convolutions over sound."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.begin = nn.Conv1d(1, width, 16, 8)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, 2 * width, 1),
                nn.PReLU(),
                nn.GroupNorm(1, 2 * width),
                nn.Conv1d(2 * width, 2 * width, 3, padding=2**i, dilation=2**i, groups=2 * width),
                nn.PReLU(),
                nn.Conv1d(2 * width, width, 1),
            )
            for i in range(6)
        )
        self.end = nn.ConvTranspose1d(width, 1, 16, 8)

    def forward(self, x: Any) -> Any:
        x = self.begin(x)
        for block in self.body:
            x = x + block(x)
        return self.end(x)


def sound(case: Case, device: str) -> Made:
    x = torch.rand(case["batch"], 1, 32000, device=device)
    return Mixer(), lambda m: F.mse_loss(m(x).float(), x)


class Volume(nn.Module):
    """A U-Net of three levels on volumes."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block(a: int, b: int) -> Any:
            return nn.Sequential(
                nn.Conv3d(a, b, 3, padding=1),
                nn.InstanceNorm3d(b, affine=True),
                nn.LeakyReLU(0.1),
                nn.Conv3d(b, b, 3, padding=1),
                nn.InstanceNorm3d(b, affine=True),
                nn.LeakyReLU(0.1),
            )

        self.one, self.two, self.three = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up, self.upper = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2), nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.merge, self.last, self.head = block(4 * width, 2 * width), block(2 * width, width), nn.Conv3d(width, 3, 1)

    def forward(self, x: Any) -> Any:
        a = self.one(x)
        b = self.two(F.max_pool3d(a, 2))
        c = self.three(F.max_pool3d(b, 2))
        b = self.merge(torch.cat([self.up(c), b], 1))
        return self.head(self.last(torch.cat([self.upper(b), a], 1)))


def volume(case: Case, device: str) -> Made:
    x = torch.rand(case["batch"], 1, 48, 48, 48, device=device)
    labels = torch.randint(0, 3, (case["batch"], 48, 48, 48), device=device)
    return Volume(), lambda m: F.cross_entropy(m(x).float(), labels)


class Clicks(nn.Module):
    """Embedding bags and a tower, as for recommendations."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100_000, 64, mode="sum") for _ in range(8))
        self.tower = nn.Sequential(
            nn.Linear(8 * 64 + 13, 1024),
            nn.ReLU(),
            nn.BatchNorm1d(1024),
            nn.Linear(1024, 512),
            nn.ReLU(),
            nn.Linear(512, 1),
        )

    def forward(self, dense: Any, words: Any) -> Any:
        return self.tower(torch.cat([dense, *[bag(words[:, i]) for i, bag in enumerate(self.bags)]], 1))


def clicks(case: Case, device: str) -> Made:
    n = case["batch"]
    dense, words = torch.rand(n, 13, device=device), torch.randint(0, 100_000, (n, 8, 10), device=device)
    goal = torch.rand(n, 1, device=device)
    return Clicks(), lambda m: F.binary_cross_entropy_with_logits(m(dense, words).float(), goal)


class Graph(nn.Module):
    """Message passing over edges."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.update = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))

    def forward(self, x: Any, edges: Any) -> Any:
        for message, update in zip(self.message, self.update, strict=True):
            sent = F.relu(message(torch.cat([x[edges[0]], x[edges[1]]], 1)))
            x = update(torch.zeros_like(x, dtype=sent.dtype).index_add(0, edges[1], sent), x)
        return x


def graph(case: Case, device: str) -> Made:
    nodes = case["batch"]
    x, edges = torch.rand(nodes, 256, device=device), torch.randint(0, nodes, (2, 8 * nodes), device=device)
    return Graph(), lambda m: m(x, edges).float().square().mean()


class Sequence(nn.Module):
    """torch's own encoder and decoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20000, 512), nn.Linear(512, 20000)
        self.body = nn.Transformer(512, 8, 3, 3, 2048, batch_first=True)

    def forward(self, tokens: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        return self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))


def sequence(case: Case, device: str) -> Made:
    tokens = torch.randint(0, 20000, (case["batch"], 256), device=device)
    return Sequence(), lambda m: F.cross_entropy(m(tokens).flatten(0, 1).float(), tokens.flatten())


SMALL = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}

MODELS: dict[str, Callable[[Case, str], Made]] = {
    "resnet34": classify("resnet34"), "resnext101_32x8d": classify("resnext101_32x8d"), "vgg19": classify("vgg19"), "vgg16_bn": classify("vgg16_bn"),
    "efficientnet_b1": classify("efficientnet_b1"), "efficientnet_b3": classify("efficientnet_b3", 300), "efficientnet_v2_m": classify("efficientnet_v2_m"),
    "regnet_y_3_2gf": classify("regnet_y_3_2gf"), "regnet_x_800mf": classify("regnet_x_800mf"), "regnet_x_8gf": classify("regnet_x_8gf"), "mnasnet0_5": classify("mnasnet0_5"),
    "shufflenet_v2_x2_0": classify("shufflenet_v2_x2_0"), "squeezenet1_0": classify("squeezenet1_0"), "densenet201": classify("densenet201"), "convnext_base": classify("convnext_base"),
    "swin_s": classify("swin_s"), "vit_b_32": classify("vit_b_32"), "mobilenet_v2": classify("mobilenet_v2"), "resnet50-160": classify("resnet50", 160), "wide_resnet101_2": classify("wide_resnet101_2"),
    "deeplabv3": segment("deeplabv3_resnet50"), "fcn": segment("fcn_resnet50"), "lraspp": segment("lraspp_mobilenet_v3_large"), "r3d": video("r3d_18"), "r2plus1d": video("r2plus1d_18"),
    "bert-class": text("BertForSequenceClassification", "BertConfig", labels="class"), "roberta-qa": text("RobertaForQuestionAnswering", "RobertaConfig", labels="span", num_hidden_layers=6),
    "mpnet": text("AutoModelForMaskedLM", "MPNetConfig", num_hidden_layers=6), "xlnet": text("AutoModelForCausalLM", "XLNetConfig", d_model=512, n_layer=6, n_head=8, d_inner=2048, vocab_size=20000),
    "longformer": text("AutoModelForMaskedLM", "LongformerConfig", seq=1024, num_hidden_layers=3, attention_window=256, max_position_embeddings=1100),
    "mobilebert": text("AutoModelForMaskedLM", "MobileBertConfig", num_hidden_layers=8), "squeezebert": text("AutoModelForMaskedLM", "SqueezeBertConfig", num_hidden_layers=6),
    "funnel": text("AutoModelForMaskedLM", "FunnelConfig", block_sizes=[2, 2, 2], d_model=512, n_head=8, d_head=64, d_inner=2048), "camembert": text("AutoModelForMaskedLM", "CamembertConfig", num_hidden_layers=4),
    "modernbert": text("AutoModelForMaskedLM", "ModernBertConfig", num_hidden_layers=6), "gptj": text("AutoModelForCausalLM", "GPTJConfig", n_embd=768, n_layer=6, n_head=12, rotary_dim=32),
    "codegen": text("AutoModelForCausalLM", "CodeGenConfig", n_embd=768, n_layer=6, n_head=12, rotary_dim=32, vocab_size=30000), "mpt": text("AutoModelForCausalLM", "MptConfig", d_model=768, n_layers=6, n_heads=12, vocab_size=30000),
    "stablelm": text("AutoModelForCausalLM", "StableLmConfig", **LLAMA, num_key_value_heads=12), "phi3": text("AutoModelForCausalLM", "Phi3Config", **LLAMA, pad_token_id=0), "gemma2": text("AutoModelForCausalLM", "Gemma2Config", **LLAMA, head_dim=64, num_key_value_heads=4),
    "olmo2": text("AutoModelForCausalLM", "Olmo2Config", **LLAMA), "starcoder2": text("AutoModelForCausalLM", "Starcoder2Config", **LLAMA, num_key_value_heads=2), "cohere": text("AutoModelForCausalLM", "CohereConfig", **LLAMA),
    "granite": text("AutoModelForCausalLM", "GraniteConfig", **LLAMA), "qwen2_moe": text("AutoModelForCausalLM", "Qwen2MoeConfig", **LLAMA, num_experts=8, moe_intermediate_size=512, shared_expert_intermediate_size=1024, num_key_value_heads=4),
    "xglm": text("AutoModelForCausalLM", "XGLMConfig", d_model=512, num_layers=4, attention_heads=8, ffn_dim=2048, vocab_size=30000), "biogpt": text("AutoModelForCausalLM", "BioGptConfig", **SMALL, vocab_size=30000),
    "gpt_bigcode": text("AutoModelForCausalLM", "GPTBigCodeConfig", n_embd=768, n_layer=6, n_head=12), "llama-gqa": text("AutoModelForCausalLM", "LlamaConfig", **LLAMA, num_key_value_heads=4),
    "mbart": text("AutoModelForSeq2SeqLM", "MBartConfig", d_model=512, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8, vocab_size=30000),
    "pegasus": text("AutoModelForSeq2SeqLM", "PegasusConfig", d_model=512, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8, vocab_size=30000),
    "mt5": text("AutoModelForSeq2SeqLM", "MT5Config", d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=6, vocab_size=50000, decoder_start_token_id=0), "mamba": text("AutoModelForCausalLM", "MambaConfig", seq=96, hidden_size=512, num_hidden_layers=4, vocab_size=30000),
    "whisper": whisper, "wav2vec2": wav2vec2, "clip": clip, "vit_mae": mae, "generate": generate, "adapters": adapters,
    "hf_vit": pixels("ViTForImageClassification", "ViTConfig", num_hidden_layers=6), "hf_swin": pixels("SwinForImageClassification", "SwinConfig"), "convnextv2": pixels("ConvNextV2ForImageClassification", "ConvNextV2Config"),
    "segformer": pixels("SegformerForSemanticSegmentation", "SegformerConfig", labels="map", num_labels=21), "dinov2": pixels("Dinov2ForImageClassification", "Dinov2Config", num_hidden_layers=6, image_size=224),
    "mobilevit": pixels("MobileViTForImageClassification", "MobileViTConfig", size=256), "beit": pixels("BeitForImageClassification", "BeitConfig", num_hidden_layers=6), "hf_resnet": pixels("ResNetForImageClassification", "ResNetConfig"),
    "poolformer": pixels("PoolFormerForImageClassification", "PoolFormerConfig"), "pvt_v2": pixels("PvtV2ForImageClassification", "PvtV2Config"), "focalnet": pixels("FocalNetForImageClassification", "FocalNetConfig"),
    "gru": recurrent("GRU"), "lstm-both": recurrent("LSTM", both=True), "lstm-packed": recurrent("LSTM", packed=True), "gru-packed": recurrent("GRU", both=True, packed=True),
    "denoiser": denoiser, "autoencoder": autoencoder, "sound": sound, "volume": volume, "clicks": clicks, "graph": graph, "sequence": sequence,
}  # fmt: skip
"""Name -> what makes the model and its loss."""


class Cells(nn.Module):
    """Cells run step by step, and a bilinear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(20000, 512), nn.LSTMCell(512, 1024), nn.GRUCell(1024, 512)
        self.head = nn.Linear(512, 20000)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        h = c = x.new_zeros(x.shape[0], 1024)
        g, out = x.new_zeros(x.shape[0], 512), []
        for step in range(x.shape[1]):
            h, c = self.first(x[:, step], (h, c))
            g = self.second(h, g)
            out.append(g)
        return self.head(torch.stack(out, 1))


def cells(case: Case, device: str) -> Made:
    tokens = torch.randint(0, 20000, (case["batch"], 48), device=device)
    return Cells(), lambda m: F.cross_entropy(m(tokens).flatten(0, 1).float(), tokens.flatten())


def hubert(case: Case, device: str) -> Made:
    import transformers

    model = transformers.HubertForSequenceClassification(
        transformers.HubertConfig(num_hidden_layers=3, mask_time_prob=0.0, layerdrop=0.0)
    )
    sound, labels = (
        torch.rand(case["batch"], 24000, device=device),
        torch.randint(0, 2, (case["batch"],), device=device),
    )
    return model, lambda m: m(input_values=sound, labels=labels).loss


SECOND: dict[str, Callable[[Case, str], Made]] = {
    "densenet161": classify("densenet161"), "efficientnet_b4": classify("efficientnet_b4"), "mnasnet1_3": classify("mnasnet1_3"), "shufflenet_v2_x1_5": classify("shufflenet_v2_x1_5"), "vgg13_bn": classify("vgg13_bn"),
    "resnet152": classify("resnet152"), "regnet_y_800mf": classify("regnet_y_800mf"), "regnet_x_1_6gf": classify("regnet_x_1_6gf"), "convnext_large": classify("convnext_large"), "swin_v2_s": classify("swin_v2_s"), "resnext50": classify("resnext50_32x4d"),
    "vgg11": classify("vgg11"), "mc3": video("mc3_18"), "fcn101": segment("fcn_resnet101", 256), "deeplab-mobile": segment("deeplabv3_mobilenet_v3_large", 320), "cells": cells, "hubert": hubert,
    "bigbird": text("AutoModelForMaskedLM", "BigBirdConfig", **SMALL, attention_type="original_full"), "nystromformer": text("AutoModelForMaskedLM", "NystromformerConfig", **SMALL), "led": text("AutoModelForSeq2SeqLM", "LEDConfig", d_model=512, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8, attention_window=128),
    "gemma3": text("AutoModelForCausalLM", "Gemma3TextConfig", **LLAMA, head_dim=64, num_key_value_heads=4), "qwen3_moe": text("AutoModelForCausalLM", "Qwen3MoeConfig", **LLAMA, head_dim=64, num_key_value_heads=4, num_experts=8, moe_intermediate_size=512), "persimmon": text("AutoModelForCausalLM", "PersimmonConfig", **LLAMA),
    "olmo": text("AutoModelForCausalLM", "OlmoConfig", **LLAMA), "blenderbot": text("AutoModelForSeq2SeqLM", "BlenderbotConfig", d_model=512, encoder_layers=2, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8),
    "deit": pixels("DeiTForImageClassification", "DeiTConfig", num_hidden_layers=6), "levit": pixels("LevitForImageClassification", "LevitConfig"), "bit": pixels("BitForImageClassification", "BitConfig"), "hf_regnet": pixels("RegNetForImageClassification", "RegNetConfig"), "mobilenet_v1": pixels("MobileNetV1ForImageClassification", "MobileNetV1Config"),
    "cvt": pixels("CvtForImageClassification", "CvtConfig"), "upernet-free": pixels("DPTForSemanticSegmentation", "DPTConfig", size=384, labels="map", num_hidden_layers=6, backbone_out_indices=[1, 2, 4, 5], num_labels=21),
}  # fmt: skip
"""A second set, for the rules as they were after the first."""
MODELS |= SECOND

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3), "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False), "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-4),
    "adafactor": lambda p: torch.optim.Adafactor(p), "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.9, centered=True), "nadam": lambda p: torch.optim.NAdam(p, lr=1e-4),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-4), "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-4, amsgrad=True), "sgd-fused": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
}  # fmt: skip


def prepare(case: Case, device: str = "cuda") -> Callable[[], Any]:
    """Build model, data and optimizer of a case; the function returned runs one step."""
    model, loss = MODELS[case["model"]](case, device)
    if case["precision"] == "bf16":
        model = model.bfloat16()
    model = model.to(device)
    if case.get("checkpoint"):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": case["checkpoint"] == "reentrant"}
        )
    kind = {"amp": torch.bfloat16, "fp16-amp": torch.float16}.get(case["precision"])
    cast: Callable[[], Any] = contextlib.nullcontext if kind is None else lambda: torch.autocast("cuda", dtype=kind)
    if case.get("infer"):
        model.eval()
        return lambda: _infer(model, loss, cast, case["infer"])
    model.train()
    optimizer = OPTIMIZERS[case["optimizer"]]([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cuda") if case["precision"] == "fp16-amp" else None
    return lambda: _train(case, model, loss, cast, optimizer, scaler)


def _infer(model: Any, loss: Any, cast: Any, how: str) -> None:
    with torch.inference_mode() if how == "inference" else torch.no_grad(), cast():
        loss(model)


def _train(case: Case, model: Any, loss: Any, cast: Any, optimizer: Any, scaler: Any) -> None:
    rounds = case.get("accumulate", 1)
    for _ in range(rounds):
        with cast():
            value = loss(model) / rounds
        (value if scaler is None else scaler.scale(value)).backward()
    if case.get("clip"):
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def cases() -> list[Case]:
    """What is estimated and then measured."""
    rows: list[tuple[str, int, str, str, dict[str, Any]]] = [
        ("resnet34", 40, "adamw", "fp32", {}), ("resnet34", 56, "momentum", "amp", {"format": "channels_last"}), ("resnext101_32x8d", 20, "adamw", "amp", {}), ("vgg19", 20, "sgd", "fp32", {}), ("vgg16_bn", 36, "adamw", "amp", {}),
        ("efficientnet_b1", 28, "adagrad", "fp32", {}), ("efficientnet_b3", 20, "adamw", "amp", {}), ("efficientnet_v2_m", 14, "adamw", "fp32", {}), ("regnet_y_3_2gf", 36, "momentum", "amp", {}), ("regnet_y_3_2gf", 20, "adamw", "fp32", {}),
        ("regnet_x_800mf", 56, "adamw", "fp32", {}), ("regnet_x_8gf", 20, "sgd", "amp", {}), ("mnasnet0_5", 96, "momentum", "fp32", {}), ("shufflenet_v2_x2_0", 48, "adamw", "amp", {}), ("squeezenet1_0", 48, "adamw", "fp32", {}),
        ("densenet201", 18, "sgd", "amp", {}), ("convnext_base", 12, "adamw", "fp32", {}), ("convnext_base", 20, "adamw", "bf16", {}), ("swin_s", 18, "adamw", "amp", {}), ("vit_b_32", 72, "adafactor", "fp32", {}), ("mobilenet_v2", 40, "adamw", "fp16-amp", {"format": "channels_last"}),
        ("resnet50-160", 48, "adamw", "fp32", {}), ("wide_resnet101_2", 20, "sgd-fused", "fp16-amp", {}), ("deeplabv3", 10, "momentum", "fp32", {}), ("fcn", 14, "adamw", "amp", {}), ("lraspp", 24, "adamw", "fp32", {}), ("r3d", 10, "sgd", "fp32", {}), ("r2plus1d", 8, "adamw", "amp", {}),
        ("bert-class", 12, "adamw", "amp", {"mask": True, "clip": True}), ("roberta-qa", 10, "adamw-fused", "fp32", {"mask": True}), ("mpnet", 8, "adamw", "fp32", {}), ("xlnet", 6, "adagrad", "fp32", {}), ("longformer", 3, "adamw", "fp32", {}), ("mobilebert", 12, "adamw", "amp", {}),
        ("squeezebert", 8, "adamw", "fp32", {}), ("funnel", 8, "adamw", "amp", {}), ("camembert", 10, "amsgrad", "bf16", {}), ("modernbert", 8, "adamw", "bf16", {}), ("gptj", 5, "adamw", "fp32", {"clip": True}), ("codegen", 6, "adamw", "amp", {}), ("mpt", 6, "adamw", "bf16", {}), ("stablelm", 6, "nadam", "amp", {}),
        ("phi3", 5, "adamw", "bf16", {"checkpoint": "non-reentrant"}), ("gemma2", 5, "adamw", "amp", {}), ("olmo2", 6, "adafactor", "bf16", {}), ("starcoder2", 6, "adamw-loop", "fp32", {}), ("cohere", 5, "adamax", "amp", {"accumulate": 2}), ("granite", 6, "adamw", "fp16-amp", {"clip": True}),
        ("qwen2_moe", 4, "adamw", "bf16", {}), ("xglm", 8, "rmsprop", "fp32", {}), ("biogpt", 8, "adamw", "amp", {}), ("gpt_bigcode", 6, "adamw", "amp", {}), ("llama-gqa", 6, "adamw", "amp", {"accumulate": 4, "clip": True}), ("mbart", 6, "adamw", "fp32", {}), ("pegasus", 8, "adagrad", "amp", {}),
        ("mt5", 8, "adafactor", "amp", {}), ("mamba", 4, "adamw", "fp32", {}), ("whisper", 4, "adamw", "amp", {}), ("wav2vec2", 8, "adamw", "fp32", {}), ("clip", 20, "adamw", "amp", {}), ("vit_mae", 40, "adamw", "amp", {}), ("generate", 8, "sgd", "bf16", {"infer": "no_grad"}), ("adapters", 6, "adamw", "bf16", {}),
        ("adapters", 6, "adamw", "amp", {"checkpoint": "non-reentrant"}), ("hf_vit", 40, "adamw", "fp32", {}), ("hf_swin", 20, "adamw", "amp", {}), ("convnextv2", 20, "adamw", "fp32", {}), ("segformer", 16, "adamw", "amp", {}), ("dinov2", 28, "adamw", "bf16", {}), ("mobilevit", 24, "adamw", "fp32", {}), ("beit", 24, "adamw", "amp", {}), ("hf_resnet", 28, "momentum", "amp", {}),
        ("poolformer", 32, "adamw", "fp32", {}), ("pvt_v2", 28, "adamw", "amp", {}), ("focalnet", 20, "adamw", "fp32", {}), ("gru", 24, "adamw", "fp32", {}), ("lstm-both", 20, "sgd", "amp", {}), ("lstm-packed", 24, "adamw", "fp32", {}), ("gru-packed", 20, "adamw", "fp32", {}), ("denoiser", 12, "adamw", "fp32", {}), ("denoiser", 20, "adamw", "amp", {}),
        ("autoencoder", 48, "adamw", "fp32", {}), ("autoencoder", 64, "adamw", "amp", {}), ("sound", 12, "adamw", "fp32", {}), ("volume", 4, "adamw", "fp32", {}), ("volume", 6, "sgd", "amp", {}), ("clicks", 4096, "adagrad", "fp32", {}), ("graph", 20000, "adamw", "fp32", {}), ("sequence", 12, "adamw", "fp32", {}), ("sequence", 16, "adamw", "amp", {}),
        ("resnet34", 128, "sgd", "amp", {"infer": "inference"}), ("llama-gqa", 12, "sgd", "bf16", {"infer": "no_grad"}), ("hf_vit", 64, "sgd", "fp32", {"infer": "no_grad"}),
    ]  # fmt: skip
    return [{"model": m, "batch": b, "optimizer": o, "precision": p, **extra} for m, b, o, p, extra in rows]


def second_cases() -> list[Case]:
    """The second set."""
    rows: list[tuple[str, int, str, str, dict[str, Any]]] = [
        ("densenet161", 20, "sgd", "fp32", {}), ("efficientnet_b4", 24, "adamw", "amp", {}), ("mnasnet1_3", 40, "adamw", "amp", {}), ("shufflenet_v2_x1_5", 56, "momentum", "fp32", {}), ("vgg13_bn", 20, "adamw", "fp32", {}), ("vgg13_bn", 40, "sgd", "bf16", {}),
        ("resnet152", 20, "adamw", "fp32", {}), ("resnet152", 24, "adamw", "amp", {"format": "channels_last"}), ("regnet_y_800mf", 48, "momentum", "amp", {}), ("regnet_x_1_6gf", 40, "adamw", "fp32", {}), ("convnext_large", 10, "adamw", "amp", {}), ("swin_v2_s", 12, "adamw", "fp32", {}),
        ("resnext50", 40, "adagrad", "amp", {}), ("vgg11", 48, "sgd", "fp32", {}), ("mc3", 8, "adamw", "fp32", {}), ("fcn101", 10, "sgd", "fp32", {}), ("deeplab-mobile", 16, "adamw", "amp", {}), ("cells", 128, "adamw", "fp32", {}), ("cells", 160, "adamw", "amp", {}), ("hubert", 8, "adamw", "amp", {}),
        ("bigbird", 6, "adamw", "amp", {}), ("nystromformer", 8, "adamw", "fp32", {}), ("led", 4, "adamw", "fp32", {}), ("gemma3", 6, "adamw", "bf16", {}), ("qwen3_moe", 4, "adamw", "amp", {}), ("persimmon", 6, "adamw", "amp", {}), ("olmo", 6, "adagrad", "fp32", {}), ("blenderbot", 6, "adamw", "amp", {}),
        ("deit", 40, "adamw", "amp", {}), ("levit", 64, "adamw", "fp32", {}), ("bit", 20, "momentum", "fp32", {}), ("hf_regnet", 24, "adamw", "amp", {}), ("mobilenet_v1", 48, "adamw", "fp32", {}), ("cvt", 24, "adamw", "amp", {}), ("upernet-free", 4, "adamw", "fp32", {}),
    ]  # fmt: skip
    return [{"model": m, "batch": b, "optimizer": o, "precision": p, **extra} for m, b, o, p, extra in rows]
