"""Two networks with an optimizer each, in the old style of tensors by type; the second steps every second time."""

import os
import sys

import numpy as np
import torch
from torch import nn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
generator = nn.Sequential(nn.Linear(100, 256), nn.LeakyReLU(0.2), nn.Linear(256, 784), nn.Tanh())
critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
if cuda:
    generator.cuda()
    critic.cuda()
opt_g = torch.optim.Adam(generator.parameters(), lr=0.0002, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=0.0002, betas=(0.5, 0.999))
os.makedirs("images", exist_ok=True)
real = np.random.default_rng(0).normal(0, 1, (64, 784)).astype("float32")

for step in range(steps):
    pictures = torch.from_numpy(real).type(Tensor)
    z = Tensor(np.random.normal(0, 1, (64, 100)))
    opt_d.zero_grad()
    fake = generator(z)
    alpha = Tensor(np.random.random((64, 1)))
    between = (alpha * pictures + (1 - alpha) * fake.detach()).requires_grad_(True)
    slopes = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    loss_d = critic(fake.detach()).mean() - critic(pictures).mean() + 10 * ((slopes.norm(2, dim=1) - 1) ** 2).mean()
    loss_d.backward()
    opt_d.step()
    if step % 2 == 0:
        opt_g.zero_grad()
        loss_g = -critic(generator(z)).mean()
        loss_g.backward()
        opt_g.step()
        print(f"[D loss: {loss_d.item():f}] [G loss: {loss_g.item():f}]")
        np.save(f"images/{step}.npy", fake.data.cpu().numpy())
