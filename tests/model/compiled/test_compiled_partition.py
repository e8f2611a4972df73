"""Graphs that compute parts of their forward pass again give the same gradients to the bit, and hold less."""

import contextlib
import functools

import pytest

torch = pytest.importorskip("torch")

from effort import examples  # noqa: E402
from hypothesis import HealthCheck, given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import outsize  # noqa: E402
from outsize.model.compiled.partition import choose_saved  # noqa: E402
from outsize.model.torch_port.compiler import saving  # noqa: E402
from outsize.model.torch_port.parts import is_older_than  # noqa: E402

pytestmark = pytest.mark.skipif(is_older_than("2.9"), reason="the compiler of this torch is not followed")

WIDTH = 16


def mixed(net, x):
    return torch.cat([x.sin(), x.exp().tanh()], -1).chunk(2, -1)[1] * x


def in_place(net, x):
    return torch.relu_(x * 2) + 1


def attended(net, x):
    q = x.unflatten(-1, (2, -1)).transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(0, 1).flatten(1)


OPERATIONS = {
    "linear": lambda net, x: net.linears[0](x),
    "another": lambda net, x: torch.nn.functional.gelu(net.linears[1](x)),
    "residual": lambda net, x: x + net.linears[2](x.tanh()),
    "norm": lambda net, x: net.norm(x),
    "dropout": lambda net, x: torch.nn.functional.dropout(x, 0.3),
    "softmax": lambda net, x: x.softmax(-1) * x,
    "view": lambda net, x: x.view(2, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH),
    "mixed": mixed,
    "in_place": in_place,
    "attended": attended,
    "batch_norm": lambda net, x: net.batch(x),
}


class Program(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names
        self.linears = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.batch = torch.nn.LayerNorm(WIDTH), torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.linears[1](x)
        for name in self.names:
            x = OPERATIONS[name](self, x)
        return x.square().mean()


def gradients(names, part):
    """Loss, gradients and statistics of a compiled program that computes a part of its graph again; None: uncompiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Program(names)
    data = torch.rand(8, WIDTH)
    again = saving(functools.partial(choose_saved, part=part), part) if part is not None else contextlib.nullcontext()
    with again:
        run = model if part is None else torch.compile(model, backend="aot_eager")
        torch.manual_seed(1)
        loss = run(data)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@examples(16, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=9), st.floats(0.05, 1.0))
def test_whatever_is_computed_again_the_gradients_have_the_same_bits(names, part):
    plain, usual, again = (gradients(names, chosen) for chosen in (None, 0.0, part))
    assert len(plain) == len(usual) == len(again)
    for expected, found in zip(usual, again, strict=True):
        assert torch.equal(expected, found), names
    for expected, found in zip(plain, again, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Blocks(torch.nn.Module):
    def __init__(self, count=6, width=32):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Tanh(),
                                torch.nn.Linear(4 * width, width))
            for _ in range(count)
        )  # fmt: skip

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def loss(model, batch):
    return model(batch).square().mean()


def held(part):
    def build():
        model = Blocks()
        return torch.compile(model, backend="aot_eager"), torch.rand(256, 32)

    with saving(functools.partial(choose_saved, part=part), part):
        footprint = outsize.estimate(
            lambda model, batch: loss(model, batch).backward(), build=build, device="cpu", steps=1
        )
    return footprint.peak_requested.bytes


def test_the_more_is_computed_again_the_less_is_held():
    peaks = [held(part) for part in (0.0, 0.6, 1.0)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.55 * peaks[0]
