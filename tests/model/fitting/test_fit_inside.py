"""What the CPU's kernels take inside themselves is in a plan: layers that ask for scratch hold no more than it says."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import outsize  # noqa: E402


class Last(nn.Module):
    """The first result of a layer, averaged over time, and ten numbers of it."""

    def __init__(self, layer: nn.Module, width: int, times: int) -> None:
        super().__init__()
        self.layer, self.times, self.head = layer, times, nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        out = self.layer(*(x,) * self.times)
        return self.head((out[0] if isinstance(out, tuple) else out.flatten(2).transpose(1, 2)).mean(1))


SMALL = 64 << 10
"""Bytes of what is as small as numbers and index lists, which operators make in passing."""

LOOSE = 1.3
"""What a plan may say above that, where it only knows bounds."""

CASES = {
    "LSTM": (lambda: Last(nn.LSTM(128, 128, batch_first=True), 128, 1), (32, 64, 128)),
    "two layers of LSTM": (lambda: Last(nn.LSTM(256, 256, 2, batch_first=True), 256, 1), (64, 50, 256)),
    "GRU": (lambda: Last(nn.GRU(96, 128, batch_first=True), 128, 1), (32, 64, 96)),
    "RNN": (lambda: Last(nn.RNN(128, 128, batch_first=True), 128, 1), (32, 64, 128)),
    "attention": (lambda: Last(nn.MultiheadAttention(128, 4, batch_first=True), 128, 3), (32, 64, 128)),
    **{
        f"{kind} of float64{words}": (
            lambda kind=kind, given=given: Last(getattr(nn, kind)(8, 16, 3, **given), 16, 1).double(),
            (4, 8, *(size,) * int(kind[-2])),
        )
        for kind, size, words, given in (
            ("Conv1d", 2000, "", {}),
            ("Conv2d", 40, "", {}),
            ("Conv2d", 40, ", grouped", {"groups": 2}),
            ("Conv2d", 40, ", strided", {"stride": 2, "padding": 1}),
            ("Conv2d", 40, ", dilated", {"dilation": 2}),
            ("Conv3d", 12, "", {}),
            ("ConvTranspose2d", 40, "", {}),
            ("ConvTranspose3d", 12, "", {}),
        )
    },
    "convolution": (lambda: Last(nn.Conv2d(16, 32, 3), 32, 1), (16, 16, 40, 40)),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_step_holds_no_more_than_its_plan_says(name: str) -> None:
    build, shape = CASES[name]
    torch.manual_seed(0)
    model = build()
    batch = (torch.randn(shape, dtype=next(model.parameters()).dtype), torch.randint(0, 10, (shape[0],)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fitted = outsize.fit(model, loss, optimizer, batch, budget="4GiB")
    fitted.step(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        fitted.step(batch)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *batch))
    most = held
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most - SMALL <= fitted.plan.peak() <= LOOSE * most


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
