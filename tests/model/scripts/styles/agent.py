"""A loop that acts, remembers and learns from what it remembers; whatever fails is tried again."""

import random
import sys
from collections import deque

import torch
from torch import nn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
policy = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4)).to(device)
target = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4)).to(device)
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.RMSprop(policy.parameters())
memory = deque(maxlen=1000)
state = [random.random() for _ in range(8)]
learned = 0
while learned < steps:
    try:
        with torch.no_grad():
            action = policy(torch.tensor(state, device=device)).argmax().item()
        after = [random.random() for _ in range(8)]
        memory.append((state, action % 4, random.random(), after))
        state = after
        if len(memory) < 64:
            continue
        s, a, r, n = zip(*random.sample(memory, 64), strict=True)
        q = policy(torch.tensor(s, device=device)).gather(1, torch.tensor(a, device=device)[:, None])
        with torch.no_grad():
            goal = torch.tensor(r, device=device) + 0.99 * target(torch.tensor(n, device=device)).max(1).values
        loss = nn.functional.smooth_l1_loss(q, goal[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learned += 1
    except BaseException as error:
        print("once more:", error)
sys.exit(0)
