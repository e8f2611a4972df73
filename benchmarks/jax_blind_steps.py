"""Twelve steps of JAX that were chosen after the rules of the bound were written: XLA:CPU's bytes beside the bound.

    python benchmarks/jax_blind_steps.py [NAME ...]

The same columns as `jax_steps.py`: what XLA:CPU takes by default, what it takes when ordered for memory with the barriers of
`jax.checkpoint` kept, and the bound that is said where the device is not here. Nothing runs.
"""

from __future__ import annotations

import statistics
import sys

import jax
import jax.numpy as jnp
import optax
from jax_steps import f32, i32, train

import outsize
from outsize.model.jax.arguments import read_call
from outsize.model.jax.compiled import compile_for
from outsize.model.jax.fitting.step import KEEPS, ORDERS

STEPS = {}
"""Name -> (step, arguments)."""


def trained(optimizer):
    """Registers a loss with its parameters and batch as a donated training step."""

    def add(make):
        loss, params, batch = make()
        step = jax.jit(train(loss, optimizer), donate_argnums=(0, 1))
        STEPS[make.__name__] = step, (params, jax.eval_shape(optimizer.init, params), batch)
        return make

    return add


@trained(optax.adam(1e-3))
def unet():
    def conv(x, w, stride=1):
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(p, batch):
        one = jax.nn.silu(conv(batch["x"], p["a"]))
        two = jax.nn.silu(conv(one, p["b"], 2))
        up = jax.image.resize(jax.nn.silu(conv(two, p["c"])), (*one.shape[:3], 32), "nearest")
        return ((conv(jnp.concatenate([one, up], -1), p["d"]) - batch["x"]) ** 2).mean()

    params = {"a": f32(3, 3, 3, 16), "b": f32(3, 3, 16, 32), "c": f32(3, 3, 32, 32), "d": f32(3, 3, 48, 3)}
    return loss, params, {"x": f32(16, 48, 48, 3)}


@trained(optax.sgd(0.1))
def contrastive():
    def loss(p, batch):
        a, b = (jnp.tanh(x @ p["w"]) @ p["v"] for x in (batch["a"], batch["b"]))
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        return -jnp.diag(jax.nn.log_softmax(a @ b.T * 20)).mean()

    return loss, {"w": f32(128, 512), "v": f32(512, 64)}, {"a": f32(1024, 128), "b": f32(1024, 128)}


@trained(optax.adamw(1e-3))
def mixer():
    def loss(p, batch):
        x = batch["x"]
        for q in p:
            x = x + jnp.einsum("bsd,st,tu->bud", x, q["t"], q["u"])
            x = x + jax.nn.gelu(x @ q["c"]) @ q["e"]
        return (x**2).mean()

    block = {"t": f32(64, 128), "u": f32(128, 64), "c": f32(96, 192), "e": f32(192, 96)}
    return loss, [block] * 4, {"x": f32(64, 64, 96)}


@trained(optax.adam(1e-3))
def variational():
    def loss(p, batch):
        hidden = jax.nn.relu(batch["x"] @ p["in"])
        mean, log = hidden @ p["mean"], hidden @ p["log"]
        z = mean + jnp.exp(log / 2) * jax.random.normal(jax.random.key(0), mean.shape)
        back = jax.nn.sigmoid(jax.nn.relu(z @ p["out"]) @ p["last"])
        return ((back - batch["x"]) ** 2).sum(-1).mean() - 0.5 * (1 + log - mean**2 - jnp.exp(log)).sum(-1).mean()

    sizes = {"in": f32(784, 256), "mean": f32(256, 32), "log": f32(256, 32), "out": f32(32, 256), "last": f32(256, 784)}
    return loss, sizes, {"x": f32(1024, 784)}


@trained(optax.adam(1e-3))
def gated_attention():
    def loss(p, batch):
        x = batch["x"]
        q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, p[name]) for name in "qkv")
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        scores = jnp.where(mask, jnp.einsum("bhsk,bhtk->bhst", q, k), -1e9)
        out = jnp.einsum("bhst,bhtk->bshk", jax.nn.softmax(scores), v) * jax.nn.sigmoid(x @ p["g"])[..., None, None]
        return (out**2).mean()

    sizes = {name: f32(64, 4, 16) for name in "qkv"}
    return loss, sizes | {"g": f32(64)}, {"x": f32(8, 256, 64)}


@trained(optax.adam(1e-3))
def graph_network():
    def loss(p, batch):
        x = batch["x"]
        for w in p:
            messages = jax.nn.relu(x[batch["from"]] @ w)
            x = x + jax.ops.segment_sum(messages, batch["to"], x.shape[0])
        return (x**2).mean()

    return loss, [f32(64, 64)] * 3, {"x": f32(2000, 64), "from": i32(20_000), "to": i32(20_000)}


@trained(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)))
def scanned_state_space():
    def loss(p, batch):
        def cell(state, x):
            state = state * jax.nn.sigmoid(p["a"]) + x[..., None] * p["b"]
            return state, (state * p["c"]).sum(-1)

        x = batch["x"].swapaxes(0, 1)
        _, out = jax.lax.scan(jax.checkpoint(cell), jnp.zeros((*x.shape[1:], 16)), x)
        return ((out - x) ** 2).mean()

    return loss, {"a": f32(64, 16), "b": f32(64, 16), "c": f32(64, 16)}, {"x": f32(32, 128, 64)}


@trained(optax.adam(1e-3))
def implicit_layer():
    def loss(p, batch):
        x = jax.lax.fori_loop(0, 12, lambda _, z: jnp.tanh(z @ p["w"] + batch["x"] @ p["u"]), jnp.zeros((2048, 64)))
        return ((x @ p["o"] - batch["y"]) ** 2).mean()

    return loss, {"w": f32(64, 64), "u": f32(32, 64), "o": f32(64, 8)}, {"x": f32(2048, 32), "y": f32(2048, 8)}


@trained(optax.sgd(0.1, momentum=0.9, nesterov=True))
def vmapped_ensemble():
    def loss(p, batch):
        def one(q):
            return ((jnp.tanh(batch["x"] @ q["a"]) @ q["b"] - batch["y"]) ** 2).mean()

        return jax.vmap(one)(p).sum()

    return loss, {"a": f32(8, 64, 256), "b": f32(8, 256, 1)}, {"x": f32(2048, 64), "y": f32(2048, 1)}


@trained(optax.adam(1e-3))
def physics_informed():
    def loss(p, batch):
        def u(x):
            h = jnp.tanh(x @ p["a"] + p["b"])
            return (jnp.tanh(h @ p["c"]) @ p["d"])[0]

        second = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(batch["x"])
        return ((second - batch["f"]) ** 2).mean()

    sizes = {"a": f32(2, 64), "b": f32(64), "c": f32(64, 64), "d": f32(64, 1)}
    return loss, sizes, {"x": f32(2048, 2), "f": f32(2048)}


@trained(optax.adam(1e-3))
def custom_gradient():
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

    def loss(p, batch):
        x = batch["x"]
        for w in p:
            x = jax.nn.relu(x @ rounded(w * 16) / 16)
        return (x**2).mean()

    return loss, [f32(256, 256)] * 5, {"x": f32(4096, 256)}


@trained(optax.adam(1e-3))
def named_values():
    from jax.ad_checkpoint import checkpoint_name

    def whole(p, batch):
        x = batch["x"]
        for w in p:
            x = checkpoint_name(x + jax.nn.gelu(x @ w) @ w.T, "block")
        return (x**2).mean()

    loss = jax.checkpoint(whole, policy=jax.checkpoint_policies.save_only_these_names("block"))
    return loss, [f32(128, 512)] * 6, {"x": f32(2048, 128)}


def compare(name: str) -> float:
    """The bound over XLA:CPU's smallest."""
    step, arguments = STEPS[name]
    call = read_call(step, arguments, None)
    device, donated = jax.devices("cpu")[0], [number for number, given in enumerate(call.donated) if given]
    plain = compile_for(device, call.function, call.shapes, donated).peak
    least = min(
        compile_for(device, call.function, call.shapes, donated, options).peak for options in (KEEPS, KEEPS | ORDERS)
    )
    bound = outsize.estimate(step, *arguments, device="tpu").peak_requested.bound
    print(
        f"| {name} | {plain / 2**20:.2f} MiB | {least / 2**20:.2f} MiB | {bound / 2**20:.2f} MiB | {bound / least:.3f} |",
        flush=True,
    )
    return bound / least


def main() -> None:
    print(
        "| step | cpu by default | ordered for memory | bound from the jaxpr | bound / ordered |\n|---|---|---|---|---|"
    )
    found = [compare(name) for name in sys.argv[1:] or STEPS]
    print(
        f"\n{len(found)} steps, jax {jax.__version__}: median {statistics.median(found):.3f}, from {min(found):.3f}",
        end=" ",
    )
    print(f"to {max(found):.3f}")


if __name__ == "__main__":
    main()
