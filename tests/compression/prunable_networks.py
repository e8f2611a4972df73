"""Networks that show what pruning has to know: each gives (model, batch)."""

import torch
from torch import nn
from torch.nn import functional as F

CASES = {}


def case(make):
    CASES[make.__name__] = make
    return make


@case
def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), (
        torch.randn(3, 8),
    )


@case
def skip():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = nn.Conv2d(3, 16, 3, padding=1)
            s.n = nn.BatchNorm2d(16)
            s.b = nn.Conv2d(16, 16, 3, padding=1)
            s.m = nn.BatchNorm2d(16)
            s.h = nn.Linear(16, 4)

        def forward(s, x):
            x = F.relu(s.n(s.a(x)))
            x = F.relu(x + s.m(s.b(x)))
            return s.h(x.mean((2, 3)))

    return M(), (torch.randn(2, 3, 8, 8),)


@case
def grouped_conv():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = nn.Conv2d(3, 16, 3, padding=1)
            s.b = nn.Conv2d(16, 32, 3, padding=1, groups=4)
            s.c = nn.Conv2d(32, 8, 1)
            s.h = nn.Linear(8, 4)

        def forward(s, x):
            return s.h(s.c(F.relu(s.b(F.relu(s.a(x))))).mean((2, 3)))

    return M(), (torch.randn(2, 3, 8, 8),)


@case
def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 16, 1),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3, groups=16, padding=1),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ), (torch.randn(2, 3, 8, 8),)


@case
def shared_module():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 16)
            s.b = nn.Linear(16, 16)
            s.o = nn.Linear(16, 4)

        def forward(s, x):
            x = s.i(x)
            for _ in range(3):
                x = torch.tanh(s.b(x))
            return s.o(x)

    return M(), (torch.randn(3, 8),)


@case
def tied_embedding():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(32, 16)
            s.l = nn.Linear(16, 16)
            s.o = nn.Linear(16, 32, bias=False)
            s.o.weight = s.e.weight

        def forward(s, x):
            return s.o(torch.tanh(s.l(s.e(x))))

    return M(), (torch.randint(0, 32, (2, 5)),)


@case
def autoencoder_tied_transposed():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(8, 16)

        def forward(s, x):
            return F.linear(torch.relu(s.l(x)), s.l.weight.t())

    return M(), (torch.randn(3, 8),)


@case
def groupnorm():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 8, 3),
        nn.GroupNorm(8, 8),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    ), (torch.randn(2, 3, 8, 8),)


@case
def layernorm():
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 4)
    ), (torch.randn(3, 8),)


@case
def concat_split():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = nn.Conv2d(3, 8, 3, padding=1)
            s.b = nn.Conv2d(3, 16, 3, padding=1)
            s.c = nn.Conv2d(24, 16, 1)
            s.d = nn.Conv2d(8, 8, 1)
            s.h = nn.Linear(16, 4)

        def forward(s, x):
            y = s.c(torch.cat([s.a(x), s.b(x)], 1))
            u, v = y.chunk(2, 1)
            return s.h(torch.cat([s.d(u) * torch.sigmoid(v), v], 1).mean((2, 3)))

    return M(), (torch.randn(2, 3, 8, 8),)


@case
def densenet():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Conv2d(3, 8, 3, padding=1)
            s.ls = nn.ModuleList(
                [
                    nn.Sequential(nn.BatchNorm2d(8 + 4 * k), nn.ReLU(), nn.Conv2d(8 + 4 * k, 4, 3, padding=1))
                    for k in range(3)
                ]
            )
            s.h = nn.Linear(20, 4)

        def forward(s, x):
            x = s.i(x)
            for layer in s.ls:
                x = torch.cat([x, layer(x)], 1)
            return s.h(x.mean((2, 3)))

    return M(), (torch.randn(2, 3, 8, 8),)


@case
def flatten_conv_linear():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    ), (torch.randn(2, 1, 10, 10),)


@case
def transposed_conv():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 16, 2, 2), nn.ReLU(), nn.Conv2d(16, 3, 1)
    ), (torch.randn(2, 3, 8, 8),)


@case
def pixel_shuffle():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(4, 3, 1)), (
        torch.randn(2, 3, 8, 8),
    )


@case
def mha():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 32)
            s.a = nn.MultiheadAttention(32, 4, batch_first=True)
            s.n = nn.LayerNorm(32)
            s.o = nn.Linear(32, 4)

        def forward(s, x):
            x = s.i(x)
            return s.o(s.n(x + s.a(x, x, x, need_weights=False)[0]))

    return M(), (torch.randn(2, 5, 8),)


@case
def encoder_layer():
    return nn.Sequential(
        nn.Linear(8, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), nn.Linear(32, 4)
    ), (torch.randn(2, 5, 8),)


@case
def own_attention():
    class A(nn.Module):
        def __init__(s, d=32, h=4):
            super().__init__()
            s.h = h
            s.d = d
            s.qkv = nn.Linear(d, 3 * d)
            s.o = nn.Linear(d, d)

        def forward(s, x):
            b, t, _ = x.shape
            q, k, v = s.qkv(x).reshape(b, t, 3, s.h, s.d // s.h).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v)
            return s.o(y.transpose(1, 2).reshape(b, t, s.d))

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 32)
            s.a = A()
            s.n = nn.LayerNorm(32)
            s.o = nn.Linear(32, 4)

        def forward(s, x):
            x = s.i(x)
            return s.o(s.n(x + s.a(x)))

    return M(), (torch.randn(2, 5, 8),)


@case
def einsum_attention():
    class A(nn.Module):
        def __init__(s, d=32, h=4):
            super().__init__()
            s.h = h
            s.q = nn.Linear(d, d)
            s.k = nn.Linear(d, d)
            s.v = nn.Linear(d, d)
            s.o = nn.Linear(d, d)

        def forward(s, x):
            q, k, v = (m(x).unflatten(-1, (s.h, -1)) for m in (s.q, s.k, s.v))
            w = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
            return s.o(torch.einsum("bhij,bjhd->bihd", w, v).flatten(2))

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 32)
            s.a = A()
            s.o = nn.Linear(32, 4)

        def forward(s, x):
            x = s.i(x)
            return s.o(x + s.a(x))

    return M(), (torch.randn(2, 5, 8),)


@case
def raw_parameter():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.p = nn.Parameter(torch.randn(1, 5, 16))
            s.cls = nn.Parameter(torch.randn(1, 1, 16))
            s.i = nn.Linear(8, 16)
            s.g = nn.Parameter(torch.ones(16))
            s.o = nn.Linear(16, 4)

        def forward(s, x):
            x = s.i(x) + s.p
            x = torch.cat([s.cls.expand(x.shape[0], -1, -1), x], 1)
            return s.o(torch.relu(x * s.g)[:, 0])

    return M(), (torch.randn(2, 5, 8),)


@case
def custom_function():
    class Sw(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return g * (s + x * s * (1 - s))

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 16)
            s.o = nn.Linear(16, 4)

        def forward(s, x):
            return s.o(Sw.apply(s.i(x)))

    return M(), (torch.randn(2, 5, 8),)


@case
def lstm():
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.i = nn.Linear(8, 16)
            s.r = nn.LSTM(16, 16, num_layers=2, batch_first=True)
            s.o = nn.Linear(16, 4)

        def forward(s, x):
            return s.o(s.r(s.i(x))[0])

    return M(), (torch.randn(2, 5, 8),)


@case
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)), (
        torch.randint(0, 64, (2, 7)),
    )


@case
def llama_gqa():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    ), (torch.randint(0, 64, (2, 7)),)


@case
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
    ), (torch.randn(2, 3, 16, 16),)


@case
def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    ), (torch.randint(0, 64, (2, 7)),)
