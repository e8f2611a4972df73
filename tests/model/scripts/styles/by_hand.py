"""A recurrent network whose weights are changed without an optimizer, with a hidden state that goes from step to step."""

import sys

import torch
from torch import nn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(32, 64, 2), nn.Linear(64, 100)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.head(out), hidden


model = Net().to(device)
hidden = tuple(torch.zeros(2, 20, 64, device=device) for _ in range(2))
for _ in range(steps):
    hidden = tuple(h.detach() for h in hidden)
    out, hidden = model(torch.rand(35, 20, 32, device=device), hidden)
    model.zero_grad()
    out.square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
