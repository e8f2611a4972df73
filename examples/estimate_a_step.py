"""The memory of a training step on a card that is not there."""

import torch

import outsize


def build():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
    return model, torch.optim.AdamW(model.parameters()), torch.rand(2048, 1024, device="cuda")


def step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


footprint = outsize.estimate(step, build=build, card="t4")
print(footprint)
assert footprint.fits
