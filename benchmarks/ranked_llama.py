"""Llama 3.1 8B in plain torch, sharded as torchtitan does it: for the figures that torchtitan publishes.

`build(checkpointing)` calls `fully_shard` on every layer and on the model, with bfloat16 weights and float32 reductions;
`selective` keeps what every other product, and attention, gives, as torchtitan's selective checkpointing by operators does.
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, LAYERS, HEADS, GROUPS, INNER, WORDS = 4096, 32, 32, 8, 14336, 128256
BATCH, TOKENS = 2, 8192
KEPT = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, GROUPS * head, bias=False) for _ in range(2))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q = turned(self.wq(x).view(batch, tokens, HEADS, -1)).transpose(1, 2)
        k, v = (w(x).view(batch, tokens, GROUPS, -1) for w in (self.wk, self.wv))
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=2).transpose(1, 2) for t in (turned(k), v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


def turned(x):
    """Rotary positions, in float32 as complex numbers are."""
    angles = torch.ones(x.shape[1], x.shape[-1] // 2, device=x.device)
    first, second = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2).type_as(x)


class Layer(nn.Module):
    def __init__(self, checkpointing):
        super().__init__()
        self.attention, self.norm, self.inner_norm = Attention(), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.checkpointing = checkpointing

    def run(self, x):
        x = x + self.attention(self.norm(x))
        y = self.inner_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))

    def forward(self, x):
        if self.checkpointing == "none":
            return self.run(x)
        if self.checkpointing == "full":
            return checkpoint(self.run, x, use_reentrant=False)
        contexts = functools.partial(create_selective_checkpoint_contexts, every_other_product())
        return checkpoint(self.run, x, use_reentrant=False, context_fn=contexts)


def every_other_product():
    seen = {True: 0, False: 0}

    def policy(context, operator, *args, **kwargs):
        if operator is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            return (
                CheckpointPolicy.PREFER_RECOMPUTE if seen[context.is_recompute] % 2 == 0 else CheckpointPolicy.MUST_SAVE
            )
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Llama(nn.Module):
    def __init__(self, make_layer):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([make_layer() for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(checkpointing):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("cuda"):  # one layer is whole at a time
        model = Llama(lambda: fully_shard(Layer(checkpointing), mp_policy=policy))
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="cuda")
    return model, optimizer, tokens


def step(model, optimizer, tokens):
    out = model(tokens)
    nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten(0, 1)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
