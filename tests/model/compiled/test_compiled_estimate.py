"""A compiled step is followed as compiled: the buffers that it will have are known before it runs, with and without a card."""

import pytest

torch = pytest.importorskip("torch")

from effort import long  # noqa: E402

import outsize  # noqa: E402
from outsize.model.torch_port.dispatch import profiled_bytes  # noqa: E402
from outsize.model.torch_port.parts import is_older_than  # noqa: E402

pytestmark = pytest.mark.skipif(is_older_than("2.9"), reason="the compiler of this torch is not followed")


@pytest.fixture(autouse=True)
def nothing_compiled():
    yield
    torch._dynamo.reset()


class Mixed(torch.nn.Module):
    """Wide pointwise chains that a compiler fuses, norms, a product with itself, statistics that are written."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm, self.batch = torch.nn.LayerNorm(width), torch.nn.BatchNorm1d(width)

    def forward(self, x):
        x = x + self.down(torch.sin(self.up(self.norm(x))).exp().tanh() * 2)
        return self.batch(x).softmax(-1).float()


class Broken(Mixed):
    """The same with a graph break inside."""

    def forward(self, x):
        x = x + self.down(torch.sin(self.up(self.norm(x))))
        torch._dynamo.graph_break()
        return self.batch(x.exp().tanh() * 2)


def train(model, optimizer, data):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(kind=Mixed, backend="aot_eager", own=False, device="cpu"):
    def build():
        model = kind().to(device)
        optimizer = torch.optim.Adam(model.parameters())
        if own:
            model.compile(backend=backend)
        elif backend is not None:
            model = torch.compile(model, backend=backend)
        return model, optimizer, torch.rand(128, 64, device=device)

    return build


def measured(build):
    """The peak of a third step, by the account of torch's allocator."""
    model, optimizer, data = build()
    for _ in range(2):
        train(model, optimizer, data)
    state = [value for values in optimizer.state.values() for value in values.values()]
    held = peak = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *state, data))
    for change in profiled_bytes(lambda: train(model, optimizer, data))[0]:
        held += change
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("kind, own", [(Mixed, False), (Broken, True)])
def test_a_compiled_step_on_the_cpu_is_known_to_the_kilobyte(kind, own):
    build = make(kind, own=own)
    footprint = outsize.estimate(train, build=build, device="cpu")
    real = measured(build)
    assert abs(footprint.peak_requested.bytes - real) < 4096
    assert real <= footprint.peak_requested.bound


def test_a_compiled_model_that_is_given_is_followed_and_left_as_it_is():
    model, optimizer, data = make()()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = outsize.estimate(train, model, optimizer, data, device="cpu")
    built = outsize.estimate(train, build=make(), device="cpu")
    assert abs(given.peak_requested.bytes - built.peak_requested.bytes) < 4096
    assert not given.notes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_inductor_writes_its_program_for_a_card_that_is_not_there():
    plain = outsize.estimate(train, build=make(backend=None, device="cuda"))
    compiled = outsize.estimate(train, build=make(backend="inductor", device="cuda"))
    assert any("Inductor of torch" in note for note in compiled.notes), compiled.notes
    activations = [sum(p.bytes for p in f.parts if p.name in ("activations", "temporaries")) for f in (plain, compiled)]
    assert 0 < activations[1] < activations[0]
    assert compiled.peak_requested.bytes < plain.peak_requested.bytes
    assert compiled.peak_reserved.bound > compiled.peak_reserved.bytes


def test_a_backend_of_somebody_else_is_traced_uncompiled_and_says_so():
    def mine(graph, inputs):
        return graph.forward

    plain = outsize.estimate(train, build=make(backend=None), device="cpu")
    other = outsize.estimate(train, build=make(backend=mine), device="cpu")
    assert other.peak_requested.bytes == plain.peak_requested.bytes
    assert any("the backend mine of torch.compile is not followed" in note for note in other.notes)


@pytest.mark.skipif(not long(), reason="compiles C++: the long run")
@pytest.mark.parametrize("kind", [Mixed, Broken])
def test_inductors_buffers_on_the_cpu_are_known_to_the_kilobyte(kind):
    build = make(kind, backend="inductor")
    footprint = outsize.estimate(train, build=build, device="cpu")
    real = measured(build)
    assert abs(footprint.peak_requested.bytes - real) < 4096
    assert real <= footprint.peak_requested.bound
