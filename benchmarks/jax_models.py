"""Ten kinds of training step of JAX at the sizes of a card: some GiB each, most of it activations.

    KINDS[name]() -> Kind(loss, params, batch, optimizer, donate), parameters and batch as shapes

Pieces of the models are those of `jax_steps.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax_steps import (
    block,
    block_params,
    cnn_loss,
    cnn_params,
    cross_entropy,
    dense,
    f32,
    gpt_loss,
    i32,
    mlp,
    mlp_loss,
    train,
    vit_loss,
)

KINDS = {}
"""Name -> a function that makes the kind."""
MOMENTUM = optax.sgd(0.01, momentum=0.9)
"""Its state after one step is the gradient, so gradients of steps can be compared."""


class Kind(NamedTuple):
    """A training step in parts."""

    loss: Any
    params: Any
    batch: Any
    optimizer: Any = optax.adam(1e-3)
    donate: tuple[int, ...] = (0, 1)

    @property
    def step(self) -> Any:
        return jax.jit(train(self.loss, self.optimizer), donate_argnums=self.donate)

    @property
    def arguments(self) -> Any:
        return self.params, jax.eval_shape(self.optimizer.init, self.params), self.batch


def kind(make):
    KINDS[make.__name__] = make
    return make


def gpt_sizes(layers=8, d=768, vocab=8192, rows=64, length=256):
    params = {"emb": f32(vocab, d), "pos": f32(length, d), "blocks": [block_params(d)] * layers}
    return params, {"tokens": i32(rows, length), "targets": i32(rows, length)}


@kind
def mlp_wide():
    return Kind(mlp_loss, dense([1024, *[2048] * 8, 1000]), {"x": f32(65_536, 1024), "y": i32(65_536)}, MOMENTUM)


@kind
def cnn():
    return Kind(cnn_loss, cnn_params([3, 64, 128, 256, 256]), {"x": f32(256, 128, 128, 3), "y": i32(256)})


@kind
def gpt():
    return Kind(gpt_loss, *gpt_sizes(), MOMENTUM)


@kind
def vit():
    d = 512
    blocks = [block_params(d)] * 8
    params = {"patch": f32(4, 4, 3, d), "pos": f32(256, d), "blocks": blocks, "head": f32(d, 1000)}
    return Kind(vit_loss, params, {"x": f32(128, 64, 64, 3), "y": i32(128)}, MOMENTUM)


@kind
def scan_rnn():
    def loss(params, batch):
        def cell(h, x):
            h = jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])
            return h, h

        first = jnp.zeros((batch["x"].shape[0], params["u"].shape[0]))
        _, hs = jax.lax.scan(cell, first, batch["x"].swapaxes(0, 1))
        return ((hs.swapaxes(0, 1) @ params["out"] - batch["y"]) ** 2).mean()

    params = {"w": f32(256, 1024), "u": f32(1024, 1024), "b": f32(1024), "out": f32(1024, 64)}
    return Kind(loss, params, {"x": f32(512, 512, 256), "y": f32(512, 512, 64)})


@kind
def moe():
    experts, d, inner, rows = 8, 1024, 4096, 16_384
    capacity = rows // experts * 2

    def layer(p, x):
        best, index = jax.lax.top_k(jax.nn.softmax(x @ p["gate"]), 1)
        hot = jax.nn.one_hot(index[:, 0], experts)
        place = ((jnp.cumsum(hot, 0) - 1) * hot).sum(-1).astype(int)
        where = index[:, 0] * capacity + jnp.minimum(place, capacity - 1)
        inputs = jnp.zeros((experts * capacity, d)).at[where].add(x).reshape(experts, capacity, d)
        out = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, p["up"])), p["down"])
        return x + best * out.reshape(experts * capacity, d)[where]

    def loss(params, batch):
        x = batch["x"]
        for p in params:
            x = layer(p, x)
        return ((x - batch["y"]) ** 2).mean()

    params = [{"gate": f32(d, experts), "up": f32(experts, d, inner), "down": f32(experts, inner, d)}] * 3
    return Kind(loss, params, {"x": f32(rows, d), "y": f32(rows, d)})


@kind
def gpt_remat():
    def loss(params, batch):
        return gpt_loss(params, batch, jax.checkpoint(block))

    return Kind(loss, *gpt_sizes())


@kind
def gpt_scan_remat():
    def loss(params, batch):
        x = params["emb"][batch["tokens"]] + params["pos"]
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(p, x), None), x, params["blocks"])
        return cross_entropy(x @ params["emb"].T, batch["targets"])

    params, batch = gpt_sizes()
    stacked = jax.tree.map(lambda *leaves: f32(len(leaves), *leaves[0].shape), *params["blocks"])
    return Kind(loss, params | {"blocks": stacked}, batch)


@kind
def mlp_adafactor():
    def loss(params, batch):
        return jnp.mean((mlp(params, batch["x"], jax.nn.gelu) - batch["y"]) ** 2)

    params, batch = dense([1024, *[4096] * 4, 1024]), {"x": f32(16_384, 1024), "y": f32(16_384, 1024)}
    return Kind(loss, params, batch, optax.adafactor(1e-3))


@kind
def residual_adamw_kept():
    def loss(params, batch):
        x = batch["x"]
        for w1, w2 in params:
            x = x + jax.nn.relu(x @ w1) @ w2
        return (x**2).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return Kind(loss, [(f32(2048, 8192), f32(8192, 2048))] * 4, {"x": f32(8192, 2048)}, optimizer, ())
