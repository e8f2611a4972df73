"""Five tensors that did not fit, in JAX: `python in_jax.py NAME plain` fails as its readers' did, `... NAME ours` works.

data: 3075200 x 512 rows to train on. picture: activations of 1 x 256 x 1024 x 1021. update: a training step that ends at a small
tensor (384 x 192). shape: how large may the batch be? larger: a product with a matrix that no card holds.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from limits import MANY, ROOM, SCALE, WIDE, limit, run, stored

import outsize

ROWS = 200_000 // SCALE
OPTIMIZER = optax.adam(1e-3)


def loss(params, batch):
    x, y = batch
    for weights in params:
        x = jax.nn.relu(x @ weights)
    return ((x - y) ** 2).mean()


@jax.jit
def step(params, state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    changes, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, changes), state, value


def build(rows):
    params = [jax.random.normal(jax.random.key(layer), (384, 384 if layer < 6 else 192)) / 20 for layer in range(7)]
    return params, OPTIMIZER.init(params), (jnp.ones((rows, 384)), jnp.ones((rows, 192)))


def data_plain():
    limit()
    return jnp.ones((MANY, 512)).mean()


def data_ours():
    with stored(MANY, 512) as path:
        limit()
        for rows in outsize.DataSource(path, budget=ROOM // 8).to_jax(1024):
            last = rows.mean()
        return last


def picture_plain():
    limit()
    x = jnp.ones(WIDE)
    centred = x - x.mean(1, keepdims=True)
    return (centred / x.std(1, keepdims=True)).block_until_ready().shape


def picture_ours():
    with stored(*WIDE) as path:
        limit()
        x = outsize.open(path)
        return (
            ((x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True))
            .save(path + ".z.npy", budget=ROOM // 8)
            .shape
        )


def update_plain():
    params, state, batch = build(ROWS)
    run = step.lower(params, state, batch).compile()
    limit()
    return run(params, state, batch)[2]


def update_ours():
    params, _, batch = build(ROWS)
    fitted = outsize.fit(params, loss, OPTIMIZER, batch, budget=ROOM)
    state = fitted.init(params)
    fitted.step(*jax.tree.map(jnp.copy, (params, state)), batch)  # compiled here
    limit()
    return fitted.step(params, state, batch)[2]


def shape_plain():
    limit(3 * ROOM)  # the compiler's own memory too
    for rows in (1000 * 4**power for power in range(9)):
        step(*build(rows))
    return "every shape fits"


def shape_ours():
    return outsize.estimate(step, build=build, batch=1000, device="cpu", budget=ROOM).largest[0].largest


def larger_plain():
    limit()
    x = jnp.ones((MANY // 2, 512))
    return (x.T @ x).block_until_ready().shape


def larger_ours():
    with stored(MANY // 2, 512) as path:
        add = jax.jit(lambda total, tile: total + tile.T @ tile, donate_argnums=0)
        total = add(jnp.zeros((512, 512)), jnp.ones((2048, 512)))
        limit()
        for tile in outsize.DataSource(path, budget=ROOM // 4).to_jax(2048):
            total = add(total, tile)
        return total.shape


CASES = {
    (name, way): globals()[f"{name}_{way}"]
    for name in ("data", "picture", "update", "shape", "larger")
    for way in ("plain", "ours")
}

if __name__ == "__main__":
    jnp.ones(4).sum().block_until_ready()  # its threads begin before the limit does
    run(CASES, *sys.argv[1:3])
