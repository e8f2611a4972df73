"""What kernels take inside on the CPU: the estimate's peak beside what torch's profiler sees a real run allocate."""

import pytest

torch = pytest.importorskip("torch")

from torch._C._profiler import _EventType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import outsize  # noqa: E402


def real_peak(step, build):
    """The most bytes that torch's allocator for the CPU had given out in three steps."""

    def run():
        args = build()
        for _ in range(3):
            step(*args)

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    changes, left = [], list(seen.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak


class Attention(torch.nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Lstm(torch.nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def linear():
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))


MODELS = {
    "attention": lambda: Attention(256, 4, batch_first=True),
    "lstm": lambda: Lstm(256, 256, batch_first=True),
    "lstm that evaluates": lambda: Lstm(256, 256).eval(),
    "linear": linear,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["train", "no gradients"])
def test_the_peak_has_what_kernels_take_inside(name, how):
    def build():
        model = MODELS[name]()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(64, 60, 256)

    def step(model, optimizer, x):
        with torch.set_grad_enabled(how == "train"):
            y = model(x)
        if how == "train":
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    footprint, real = outsize.estimate(step, build=build, device="cpu"), real_peak(step, build)
    assert footprint.peak_requested.bytes == pytest.approx(real, rel=0.03)
    assert real <= footprint.peak_allocated.bound
    assert footprint.peak_requested.known == "estimate"


@pytest.mark.parametrize("name", ["attention", "linear"])
def test_the_hosts_autocast_is_followed(name):
    def build():
        model = MODELS[name]()
        return model, torch.optim.AdamW(model.parameters()), torch.rand(64, 60, 256)

    def step(model, optimizer, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    footprint, real = outsize.estimate(step, build=build, device="cpu"), real_peak(step, build)
    assert footprint.peak_requested.bytes == pytest.approx(real, rel=0.03)
