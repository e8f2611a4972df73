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


class Applied(torch.nn.Module):
    """A function of a scaled input."""

    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.function(x * self.scale)


F = torch.nn.functional
LAST = torch.channels_last
LAYERS = {
    "depthwise, wide window, small maps": (lambda: torch.nn.Conv2d(320, 320, 7, padding=3, groups=320), (8, 320, 2, 2), LAST),
    "depthwise, wide window": (lambda: torch.nn.Conv2d(96, 96, 7, padding=3, groups=96), (8, 96, 14, 14), LAST),
    "depthwise, plain order": (lambda: torch.nn.Conv2d(320, 320, 7, padding=3, groups=320), (8, 320, 2, 2), None),
    "depthwise": (lambda: torch.nn.Conv2d(64, 64, 3, padding=1, groups=64), (8, 64, 14, 14), LAST),
    "groups": (lambda: torch.nn.Conv2d(64, 64, 3, padding=1, groups=32), (8, 64, 14, 14), LAST),
    "convolution": (lambda: torch.nn.Conv2d(64, 128, 3, padding=1), (8, 64, 14, 14), LAST),
    "convolution of pictures": (lambda: torch.nn.Conv2d(3, 64, 7, stride=2, padding=3), (8, 3, 56, 56), LAST),
    "transposed": (lambda: torch.nn.ConvTranspose2d(64, 32, 2, stride=2), (8, 64, 14, 14), LAST),
    "one small picture": (lambda: torch.nn.Conv2d(16, 16, 3, padding=1), (1, 16, 8, 8), None),
    "max pool": (lambda: Applied(lambda x: F.max_pool2d(x, 3, 2, 1)), (8, 32, 28, 28), LAST),
    "adaptive pool": (lambda: Applied(lambda x: F.adaptive_max_pool2d(x, 7)), (8, 32, 28, 28), None),
    "interpolation": (lambda: Applied(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")), (8, 32, 28, 28), LAST),
    "smooth interpolation": (
        lambda: Applied(lambda x: F.interpolate(x, size=(13, 13), mode="bicubic", antialias=True)), (8, 32, 28, 28), None,
    ),
    "Fourier": (lambda: Applied(lambda x: torch.fft.fft(x).abs()), (64, 1000), None),
    "Fourier in two dimensions": (lambda: Applied(lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2)), (8, 32, 28, 28), None),
    "sort": (lambda: Applied(lambda x: x.sort(0).values), (4000, 64), None),
    "top": (lambda: Applied(lambda x: x.topk(10).values), (64, 4000), None),
    "mixed dtypes": (lambda: Applied(lambda x: x * torch.ones(64, 4000, dtype=torch.float64)), (64, 4000), None),
    "bag of embeddings": (lambda: torch.nn.EmbeddingBag(5000, 64), (64, 100), None),
    "bag of the largest": (lambda: torch.nn.EmbeddingBag(5000, 64, mode="max"), (512, 20), None),
    "gated unit": (lambda: Applied(torch.nn.GRU(64, 128)), (20, 16, 64), None),
}  # fmt: skip

SMALL = 64 << 10
"""Bytes of what is as small as numbers and index lists."""


@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_takes_more_inside_than_the_bound(name):
    make, shape, layout = LAYERS[name]

    def build():
        model = make() if layout is None else make().to(memory_format=layout)
        if isinstance(model, torch.nn.EmbeddingBag):
            batch = torch.randint(0, 5000, shape)
        else:
            batch = torch.rand(shape).contiguous(memory_format=layout or torch.contiguous_format)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), batch

    def step(model, optimizer, x):
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    footprint, real = outsize.estimate(step, build=build, device="cpu"), real_peak(step, build)
    assert real - SMALL <= footprint.peak_requested.bound <= 1.4 * real + SMALL


def test_a_group_norm_leaves_channels_side_by_side_as_they_are():
    def build():
        return torch.nn.GroupNorm(8, 64), torch.rand(8, 64, 32, 32).contiguous(memory_format=LAST)

    def step(model, x):
        with torch.no_grad():
            return model(x)

    footprint, real = outsize.estimate(step, build=build, device="cpu"), real_peak(step, build)
    assert footprint.peak_requested.bytes == pytest.approx(real, rel=0.02)


def packed(model, x):
    """The model on sequences of falling lengths."""
    lengths = torch.arange(60, 28, -1)
    return model(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_packed_sequences_have_the_gates_of_all_steps_at_once(kind):
    def build():
        return kind(64, 128, 2, batch_first=True), torch.rand(32, 60, 64)

    def step(model, x):
        with torch.no_grad():
            packed(model, x)

    footprint, real = outsize.estimate(step, build=build, device="cpu"), real_peak(step, build)
    assert footprint.peak_requested.bytes == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (lambda: (torch.nn.LSTM(64, 128, batch_first=True), torch.rand(32, 60, 64)), packed),
        (
            lambda: (torch.nn.LSTM(64, 64).bfloat16(), torch.rand(9, 9, 64).bfloat16()),
            lambda model, x: model(x)[0].float(),
        ),
        (
            lambda: (torch.nn.GroupNorm(2, 8).double(), torch.rand(8, 8, 9, 9).double().contiguous(memory_format=LAST)),
            lambda model, x: model(x),
        ),
    ],
)
def test_what_is_not_known_of_a_kernel_is_a_guess(make, run):
    footprint = outsize.estimate(
        lambda model, x: run(model, x).sum().backward(), build=make, device="cpu", budget="8GiB"
    )
    assert any("is not known" in guess for guess in footprint.guesses) and footprint.fits is None
