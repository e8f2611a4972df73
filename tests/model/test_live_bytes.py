"""Random small networks: the live bytes of the trace are those of a real run on the CPU, operator for operator."""

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from outsize.model.trace import Tracer  # noqa: E402

LAYERS = st.lists(
    st.sampled_from(["linear", "relu", "gelu", "norm", "residual", "dropout", "softmax", "softplus", "chunk", "double"]),
    min_size=1, max_size=7,
)  # fmt: skip


class Witness(TorchDispatchMode):
    """Counts the bytes of every storage that a real run makes."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.refs = 0, 0, {}

    def watch(self, value):
        if isinstance(value, list | tuple):
            for item in value:
                self.watch(item)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.refs:
                self.live += size
                self.peak = max(self.peak, self.live)
                self.refs[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key, size):
        self.live -= size
        self.refs.pop(key, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.watch(out)
        return out


def network(names, width):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in names)
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in names)

        def forward(self, x):
            for name, layer, norm in zip(names, self.layers, self.norms, strict=True):
                x = apply(name, layer, norm, x)
            return x

    def apply(name, layer, norm, x):
        table = {
            "linear": lambda: layer(x), "relu": lambda: torch.relu(x), "gelu": lambda: torch.nn.functional.gelu(x),
            "norm": lambda: norm(x), "residual": lambda: x + layer(x), "dropout": lambda: torch.nn.functional.dropout(x, 0.5),
            "softmax": lambda: x.softmax(-1), "softplus": lambda: torch.nn.functional.softplus(x),
            "chunk": lambda: torch.cat([x[:, width // 2 :], x[:, : width // 2]], 1), "double": lambda: x.double().float(),
        }  # fmt: skip
        return table[name]()

    return Net()


def run(names, width, batch, optimizer):
    model = network(names, width)
    solver = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    data = torch.rand(batch, width)
    for _ in range(2):
        (model(data).sum() + sum(p.sum() for p in model.parameters())).backward()
        solver.step()
        solver.zero_grad()


@settings(max_examples=25, deadline=None)
@given(
    names=LAYERS,
    width=st.sampled_from([4, 6, 16]),
    batch=st.integers(1, 9),
    optimizer=st.sampled_from(["SGD", "Adam", "Adagrad"]),
)
def test_traced_live_bytes_equal_a_real_run_on_the_cpu(names, width, batch, optimizer):
    witness = Witness()
    with witness:
        run(names, width, batch, optimizer)
    tracer = Tracer("cpu")
    tracer.reuse = False  # the witness, too, is a mode in Python
    with tracer.running():
        run(names, width, batch, optimizer)
    live = peak = 0
    for alloc, held in tracer.ledger.events:
        live += held.bytes if alloc else -held.bytes
        peak = max(peak, live)
    assert peak == witness.peak
