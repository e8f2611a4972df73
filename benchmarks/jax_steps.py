"""JAX steps of many kinds: what `outsize.estimate` says of each beside what XLA compiles for this backend.

    python benchmarks/jax_steps.py [--out results.json] [NAME ...]

For each step: the bound from the jaxpr (what is said without the device), the bytes of XLA's own buffer assignment for this
backend, and their ratio. XLA:CPU orders operators for parallel work and takes away the barriers of `jax.checkpoint`; a
card's XLA does neither. So the bound is compared with the better of XLA:CPU's two orders, barriers kept; what it does by
default is beside it. On a card the step also runs once, and `peak_bytes_in_use` is read: set
XLA_PYTHON_CLIENT_PREALLOCATE=false and run one NAME per process, as that peak is never reset.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics

import jax
import jax.numpy as jnp
import optax

import outsize
from outsize.model.jax.fitting.step import KEEPS, ORDERS

STEPS = {}
"""Name -> a function that gives (step, arguments as a pytree of shapes, positions of donated arguments)."""


def step(make):
    STEPS[make.__name__] = make
    return make


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def train(loss, optimizer):
    def update(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    return update


def training(loss, params, batch, optimizer=None, donate=(0, 1)):
    optimizer = optimizer or optax.adam(1e-3)
    return train(loss, optimizer), (params, jax.eval_shape(optimizer.init, params), batch), donate


def dense(sizes):
    return [(f32(a, b), f32(b)) for a, b in itertools.pairwise(sizes)]


def mlp(params, x, act=jax.nn.relu):
    for w, b in params[:-1]:
        x = act(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def cross_entropy(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def mlp_loss(params, batch):
    return cross_entropy(mlp(params, batch["x"]), batch["y"])


@step
def mlp_adam():
    return training(mlp_loss, dense([256, 1024, 1024, 1024, 10]), {"x": f32(2048, 256), "y": i32(2048)})


@step
def mlp_sgd_not_donated():
    params = dense([256, 1024, 1024, 10])
    return training(mlp_loss, params, {"x": f32(512, 256), "y": i32(512)}, optax.sgd(0.1, momentum=0.9), ())


@step
def mlp_gelu_adafactor():
    def loss(params, batch):
        return jnp.mean((mlp(params, batch["x"], jax.nn.gelu) - batch["y"]) ** 2)

    params = dense([512, 2048, 2048, 512])
    return training(loss, params, {"x": f32(1024, 512), "y": f32(1024, 512)}, optax.adafactor(1e-3))


def conv(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x, scale, shift):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + shift


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def cnn_params(widths, classes=10):
    layers = [(f32(3, 3, a, b), f32(b), f32(b)) for a, b in itertools.pairwise(widths)]
    return {"layers": layers, "head": f32(widths[-1], classes)}


def cnn_loss(params, batch):
    x = batch["x"]
    for w, scale, shift in params["layers"]:
        x = pool(jax.nn.relu(batch_norm(conv(x, w), scale, shift)))
    return cross_entropy(x.mean((1, 2)) @ params["head"], batch["y"])


@step
def cnn_batch_norm():
    return training(cnn_loss, cnn_params([3, 32, 64, 128]), {"x": f32(32, 32, 32, 3), "y": i32(32)})


def resnet_loss(params, batch):
    x = conv(batch["x"], params["stem"])
    for w1, s1, b1, w2, s2, b2 in params["blocks"]:
        y = jax.nn.relu(batch_norm(conv(x, w1), s1, b1))
        x = jax.nn.relu(x + batch_norm(conv(y, w2), s2, b2))
    return cross_entropy(x.mean((1, 2)) @ params["head"], batch["y"])


@step
def resnet():
    block = (f32(3, 3, 32, 32), f32(32), f32(32)) * 2
    params = {"stem": f32(3, 3, 3, 32), "blocks": [block] * 4, "head": f32(32, 10)}
    return training(resnet_loss, params, {"x": f32(32, 32, 32, 3), "y": i32(32)}, optax.sgd(0.1, momentum=0.9))


def block_params(d):
    return {
        "qkv": f32(d, 3 * d), "out": f32(d, d), "up": f32(d, 4 * d), "down": f32(4 * d, d),
        "n1": f32(d), "n2": f32(d),
    }  # fmt: skip


def norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def attention(q, k, v, causal):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    if causal:
        t = q.shape[1]
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def block(p, x, heads=4, causal=True):
    b, t, d = x.shape
    q, k, v = jnp.split(norm(x, p["n1"]) @ p["qkv"], 3, -1)
    shape = (b, t, heads, d // heads)
    y = attention(q.reshape(shape), k.reshape(shape), v.reshape(shape), causal)
    x = x + y.reshape(b, t, d) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["n2"]) @ p["up"]) @ p["down"]


def gpt_params(d=128, layers=4, vocab=1024, length=128):
    return {"emb": f32(vocab, d), "pos": f32(length, d), "blocks": [block_params(d)] * layers}


def gpt_loss(params, batch, run=block):
    x = params["emb"][batch["tokens"]] + params["pos"]
    for p in params["blocks"]:
        x = run(p, x)
    return cross_entropy(x @ params["emb"].T, batch["targets"])


def tokens(b=8, t=128):
    return {"tokens": i32(b, t), "targets": i32(b, t)}


@step
def gpt():
    return training(gpt_loss, gpt_params(), tokens())


@step
def gpt_remat_blocks():
    def loss(params, batch):
        return gpt_loss(params, batch, jax.checkpoint(block))

    return training(loss, gpt_params(), tokens())


@step
def gpt_remat_dots_saved():
    def loss(params, batch):
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return gpt_loss(params, batch, jax.checkpoint(block, policy=policy))

    return training(loss, gpt_params(), tokens())


def scanned(layers):
    return jax.tree.map(lambda leaf: f32(layers, *leaf.shape), block_params(128))


@step
def gpt_scan_layers_remat():
    def loss(params, batch):
        x = params["emb"][batch["tokens"]] + params["pos"]
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(p, x), None), x, params["blocks"])
        return cross_entropy(x @ params["emb"].T, batch["targets"])

    return training(loss, gpt_params() | {"blocks": scanned(6)}, tokens())


@step
def gpt_scan_layers():
    def loss(params, batch):
        x = params["emb"][batch["tokens"]] + params["pos"]
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
        return cross_entropy(x @ params["emb"].T, batch["targets"])

    return training(loss, gpt_params() | {"blocks": scanned(6)}, tokens())


@step
def gpt_inference():
    def logits(params, batch):
        x = params["emb"][batch["tokens"]] + params["pos"]
        for p in params["blocks"]:
            x = block(p, x)
        return x @ params["emb"].T

    return logits, (gpt_params(), tokens()), ()


def vit_loss(params, batch):
    x = conv(batch["x"], params["patch"], 4)
    x = x.reshape(x.shape[0], -1, x.shape[-1]) + params["pos"]
    for p in params["blocks"]:
        x = block(p, x, causal=False)
    return cross_entropy(x.mean(1) @ params["head"], batch["y"])


@step
def vit():
    params = {
        "patch": f32(4, 4, 3, 128), "pos": f32(64, 128), "blocks": [block_params(128)] * 4, "head": f32(128, 10)
    }  # fmt: skip
    return training(vit_loss, params, {"x": f32(32, 32, 32, 3), "y": i32(32)}, optax.adamw(1e-3))


@step
def scan_rnn():
    def loss(params, batch):
        def cell(h, x):
            h = jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((64, 256)), batch["x"])
        return ((hs @ params["out"] - batch["y"]) ** 2).mean()

    params = {"w": f32(64, 256), "u": f32(256, 256), "b": f32(256), "out": f32(256, 8)}
    return training(loss, params, {"x": f32(100, 64, 64), "y": f32(100, 64, 8)})


@step
def lstm():
    def loss(params, batch):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ params["w"] + h @ params["u"] + params["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((32, 128))
        _, hs = jax.lax.scan(cell, (zero, zero), batch["x"])
        return ((hs @ params["out"] - batch["y"]) ** 2).mean()

    params = {"w": f32(64, 512), "u": f32(128, 512), "b": f32(512), "out": f32(128, 8)}
    return training(loss, params, {"x": f32(64, 32, 64), "y": f32(64, 32, 8)})


@step
def moe_one_hot():
    def loss(params, batch):
        x = batch["x"]
        gates = jax.nn.softmax(x @ params["gate"])
        best, index = jax.lax.top_k(gates, 1)
        hot = jax.nn.one_hot(index[:, 0], 8)
        place = (jnp.cumsum(hot, 0) - 1) * hot
        dispatch = hot[..., None] * jax.nn.one_hot(place.sum(-1).astype(int), 128)[:, None, :]
        inputs = jnp.einsum("nec,nd->ecd", dispatch, x)
        inner = jax.nn.relu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        out = jnp.einsum("ecf,efd->ecd", inner, params["down"])
        y = jnp.einsum("nec,ecd->nd", dispatch * best[..., None], out)
        return ((y - batch["y"]) ** 2).mean()

    params = {"gate": f32(128, 8), "up": f32(8, 128, 512), "down": f32(8, 512, 128)}
    return training(loss, params, {"x": f32(512, 128), "y": f32(512, 128)})


@step
def per_example_gradients():
    def norms(params, batch):
        grads = jax.vmap(jax.grad(mlp_loss), (None, 0))(params, batch)
        return sum(jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads))

    return norms, (dense([64, 256, 10]), {"x": f32(64, 64), "y": i32(64)}), ()


@step
def large_attention_scores():
    def loss(q, k, v):
        return (attention(q, k, v, True) ** 2).sum()

    shape = f32(2, 512, 4, 32)
    return jax.value_and_grad(loss, (0, 1, 2)), (shape, shape, shape), ()


@step
def embedding_gather_scatter():
    def loss(params, batch):
        x = params["emb"][batch["ids"]].mean(1)
        return ((x @ params["out"] - batch["y"]) ** 2).mean()

    params = {"emb": f32(20_000, 64), "out": f32(64, 16)}
    return training(loss, params, {"ids": i32(256, 50), "y": f32(256, 16)})


@step
def sorting():
    def ranks(x):
        order = jnp.argsort(x, axis=-1)
        return jnp.take_along_axis(x, order, -1).cumsum(-1), jnp.median(x, axis=0)

    return ranks, (f32(512, 2048),), ()


@step
def fourier_filter():
    def apply(x, kernel):
        return jnp.fft.irfft2(jnp.fft.rfft2(x) * kernel).astype(jnp.float32)

    return apply, (f32(16, 256, 256), jax.ShapeDtypeStruct((256, 129), jnp.complex64)), ()


@step
def complex_gradient():
    def loss(z, w):
        return jnp.abs(jnp.exp(1j * z.real) * w @ w.conj().T).sum()

    c = jax.ShapeDtypeStruct((512, 512), jnp.complex64)
    return jax.grad(loss), (c, c), ()


@step
def mixed_precision():
    def loss(params, batch):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return cross_entropy(mlp(low, batch["x"].astype(jnp.bfloat16)).astype(jnp.float32), batch["y"])

    return training(loss, dense([256, 1024, 1024, 10]), {"x": f32(1024, 256), "y": i32(1024)})


@step
def while_power_iteration():
    def power(a, x):
        def more(state):
            i, _, change = state
            return (i < 100) & (change > 1e-6)

        def body(state):
            i, x, _ = state
            y = a @ x
            y = y / jnp.linalg.norm(y, axis=0)
            return i + 1, y, jnp.abs(y - x).max()

        return jax.lax.while_loop(more, body, (0, x, jnp.inf))[1]

    return power, (f32(1024, 1024), f32(1024, 256)), ()


@step
def cond_branches():
    def choose(flag, x, w):
        return jax.lax.cond(flag, lambda: jnp.tanh(x @ w) @ w.T, lambda: x * 2.0)

    return choose, (jax.ShapeDtypeStruct((), bool), f32(1024, 256), f32(256, 2048)), ()


@step
def cumulative():
    def run(x):
        return jnp.cumsum(jnp.exp(x), axis=0) / jnp.cumsum(jnp.ones_like(x), axis=0)

    return run, (f32(4096, 128),), ()


@step
def deep_residual_relu():
    def loss(params, batch):
        x = batch["x"]
        for w1, w2 in params:
            x = x + jax.nn.relu(x @ w1) @ w2
        return (x**2).mean()

    return training(loss, [(f32(128, 512), f32(512, 128))] * 8, {"x": f32(1024, 128)}, optax.adamw(1e-3))


@step
def autoencoder():
    def loss(params, batch):
        x = batch["x"]
        return ((mlp(params, x, jnp.tanh) - x) ** 2).mean()

    return training(loss, dense([784, 512, 64, 512, 784]), {"x": f32(1024, 784)}, optax.rmsprop(1e-3))


@step
def dropout():
    def loss(params, batch):
        x = batch["x"]
        for number, (w, b) in enumerate(params):
            x = jax.nn.relu(x @ w + b)
            keep = jax.random.bernoulli(jax.random.fold_in(batch["key"], number), 0.9, x.shape)
            x = jnp.where(keep, x / 0.9, 0.0)
        return (x**2).mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    return training(loss, dense([256, 512, 512, 64]), {"x": f32(512, 256), "key": key})


def compiled_bytes(made):
    found = made.memory_analysis()
    return (
        found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    )


def least(lowered):
    """Bytes in the better of XLA:CPU's orders, with barriers; elsewhere what XLA does by itself."""
    if jax.default_backend() != "cpu":
        return compiled_bytes(lowered.compile())
    return min(compiled_bytes(lowered.compile(compiler_options=options)) for options in (KEEPS, KEEPS | ORDERS))


def measured(made, args):
    """The card's own count after one step; None on a backend that does not count."""
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return None
    real = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), args)
    jax.block_until_ready(made(*real))
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    chosen = parser.parse_args()
    rows = []
    print(
        f"| step | {jax.default_backend()} by default | ordered for memory | bound from the jaxpr | bound / ordered | measured |"
    )
    print("|---|---|---|---|---|---|")
    for name in chosen.names or STEPS:
        function, args, donate = STEPS[name]()
        jitted = jax.jit(function, donate_argnums=donate)
        lowered = jitted.lower(*args)
        made, truth = lowered.compile(), least(lowered)
        absent = "cuda" if jax.default_backend() == "cpu" else "tpu"  # not "cpu": beside a card that one is there too
        bound = outsize.estimate(jitted, *args, device=absent).peak_requested.bound
        row = {
            "step": name,
            "default": compiled_bytes(made),
            "ordered": truth,
            "bound": bound,
            "measured": measured(made, args),
        }
        rows.append(row)
        mib = [
            f"{row[key] / 2**20:.2f} MiB" if row[key] else "-" for key in ("default", "ordered", "bound", "measured")
        ]
        print(f"| {name} | {mib[0]} | {mib[1]} | {mib[2]} | {bound / truth:.3f} | {mib[3]} |", flush=True)
    ratios = sorted(row["bound"] / row["ordered"] for row in rows)
    print(f"\n{len(rows)} steps, median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    if chosen.out:
        with open(chosen.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
