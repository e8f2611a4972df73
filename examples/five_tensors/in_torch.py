"""Five tensors that did not fit, in torch: `python in_torch.py NAME plain` fails as its readers' did, `... NAME ours` works.

data: 3075200 x 512 rows to train on. picture: activations of 1 x 256 x 1024 x 1021. update: a training step that ends at a small
tensor (384 x 192). shape: how large may the batch be? larger: a product with a matrix that no card holds.
"""

import sys

import torch
from limits import MANY, ROOM, SCALE, WIDE, limit, run, stored

import outsize

torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)  # its threads begin before the limit does


def model():
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(384, 384), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(384, 192))


def loss(net, batch):
    return torch.nn.functional.mse_loss(net(batch[0]), batch[1])


ROWS = 200_000 // SCALE
BATCH = torch.ones(ROWS, 384), torch.ones(ROWS, 192)


def step(net, optimizer, batch):
    loss(net, batch).backward()
    optimizer.step()
    return "one step"


def data_plain():
    limit()
    return torch.ones(MANY, 512).mean()


def data_ours():
    with stored(MANY, 512) as path:
        limit()
        for rows in outsize.DataSource(path, budget=ROOM // 8).to_torch(1024):
            last = torch.as_tensor(rows).mean()
        return last


def picture_plain():
    limit()
    x = torch.ones(WIDE)
    return ((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)).shape


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
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    limit()
    return step(net, optimizer, BATCH)


def update_ours():
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    fitted = outsize.fit(net, loss, optimizer, BATCH, budget=ROOM // 2)
    limit()
    return fitted.step(BATCH)


def shape_plain():
    net = model()
    limit()
    for rows in (1000 * 4**power for power in range(9)):
        loss(net, (torch.ones(rows, 384), torch.ones(rows, 192))).backward()
    return "every shape fits"


def build(rows):
    net = model()
    return net, torch.optim.Adam(net.parameters()), (torch.ones(rows, 384), torch.ones(rows, 192))


def shape_ours():
    return outsize.estimate(step, build=build, batch=1000, device="cpu", budget=ROOM).largest[0].largest


def larger_plain():
    limit()
    x = torch.ones(MANY // 2, 512)
    return (x.T @ x).shape


def larger_ours():
    with stored(MANY // 2, 512) as path:
        limit()
        total = torch.zeros(512, 512)
        for tile in outsize.open(path).tiles("cpu", budget=ROOM // 4, shape=(2048, 512)):
            total += tile.T @ tile
        return total.shape


CASES = {
    (name, way): globals()[f"{name}_{way}"]
    for name in ("data", "picture", "update", "shape", "larger")
    for way in ("plain", "ours")
}

if __name__ == "__main__":
    run(CASES, *sys.argv[1:3])
