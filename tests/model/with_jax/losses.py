"""Small losses of JAX, and what a plain step makes of them."""

import jax
import jax.numpy as jnp
import optax


def tanh_params(widths=(8, 32, 32, 32, 4), seed=0):
    keys = jax.random.split(jax.random.key(seed), len(widths))
    sizes = zip(keys, widths, widths[1:], strict=False)
    return [(jax.random.normal(key, (a, b)) * a**-0.5, jnp.zeros(b)) for key, a, b in sizes]


def batch_of(rows=256, seed=1):
    one, other = jax.random.split(jax.random.key(seed))
    return {"x": jax.random.normal(one, (rows, 8)), "y": jax.random.normal(other, (rows, 4))}


def outputs(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def mean_loss(params, batch):
    return ((outputs(params, batch["x"]) - batch["y"]) ** 2).mean()


def sum_loss(params, batch):
    return ((outputs(params, batch["x"]) - batch["y"]) ** 2).sum()


def pair_loss(params, batch):
    """A mean over chosen samples, as (total, count)."""
    chosen = batch["y"][:, 0] > 0
    return (chosen * ((outputs(params, batch["x"]) - batch["y"]) ** 2).sum(-1)).sum(), chosen.sum()


def masked_loss(params, batch):
    total, count = pair_loss(params, batch)
    return total / count


def batch_norm_loss(params, batch):
    x = outputs(params, batch["x"])
    return (((x - x.mean(0)) / (x.std(0) + 1e-3) - batch["y"]) ** 2).mean()


def scan_loss(params, batch):
    """Layers of equal size as one scan."""
    first, *layers = params
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x, _ = jax.lax.scan(
        lambda x, layer: (jnp.tanh(x @ layer[0] + layer[1]), None), outputs([first], batch["x"]), stacked
    )
    return (x**2).mean()


@jax.jit
def inside_jit(params, batch):
    return mean_loss(params, batch)


def plain_step(loss, optimizer):
    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    return step


def copy(tree):
    return jax.tree.map(jnp.array, tree)


def farthest(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
