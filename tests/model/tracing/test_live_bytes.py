"""Random small networks: the live bytes of the trace are those of a real run on the CPU, allocation for allocation."""

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from outsize.model.tracing.tracer import Tracer  # noqa: E402


class Witness(TorchDispatchMode):
    """Writes down the live bytes whenever a real run makes a storage."""

    def __init__(self):
        super().__init__()
        self.live, self.course, self.refs = 0, [], {}

    def watch(self, value):
        if isinstance(value, list | tuple):
            for item in value:
                self.watch(item)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.refs and size:
                self.live += size
                self.course.append(self.live)
                self.refs[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key, size):
        self.live -= size
        self.refs.pop(key, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.watch(out)
        return out


class Net(torch.nn.Module):
    """Layers by name, all from (batch, 2, width) to the same shape."""

    def __init__(self, names, width):
        super().__init__()
        self.names, self.width = names, width
        make = torch.nn.ModuleList
        self.linear = make(torch.nn.Linear(width, width) for _ in names)
        self.norm = make(torch.nn.LayerNorm(width) for _ in names)
        self.batch_norm = make(torch.nn.BatchNorm1d(2) for _ in names)
        self.conv = make(torch.nn.Conv1d(2, 2, 3, padding=1) for _ in names)
        self.groups = make(torch.nn.GroupNorm(2, 2) for _ in names)
        self.embed = make(torch.nn.Embedding(7, width) for _ in names)

    def forward(self, x):
        for number, name in enumerate(self.names):
            x = LAYERS[name](self, number, x)
        return x


def attend(net, number, x):
    q = x.unflatten(-1, (2, net.width // 2)).transpose(1, 2)
    scores = (q @ q.transpose(-1, -2)).softmax(-1)
    return (scores @ q).transpose(1, 2).flatten(2)


def fused(net, number, x):
    q = x.unflatten(-1, (2, net.width // 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=number % 2 == 0).transpose(1, 2).flatten(2)


LAYERS = {
    "linear": lambda net, i, x: net.linear[i](x),
    "relu": lambda net, i, x: torch.relu(x),
    "gelu": lambda net, i, x: F.gelu(x),
    "silu": lambda net, i, x: F.silu(x),
    "norm": lambda net, i, x: net.norm[i](x),
    "batch norm": lambda net, i, x: net.batch_norm[i](x),
    "group norm": lambda net, i, x: net.groups[i](x),
    "conv": lambda net, i, x: net.conv[i](x),
    "residual": lambda net, i, x: x + net.linear[i](x),
    "in place": lambda net, i, x: net.linear[i](x).relu_(),
    "dropout": lambda net, i, x: F.dropout(x, 0.5),
    "softmax": lambda net, i, x: x.softmax(-1),
    "softplus": lambda net, i, x: F.softplus(x),
    "chunk": lambda net, i, x: torch.cat([x[..., net.width // 2 :], x[..., : net.width // 2]], -1),
    "double": lambda net, i, x: x.double().float(),
    "embed": lambda net, i, x: x + net.embed[i](torch.arange(2)),
    "gather": lambda net, i, x: x.gather(1, torch.ones_like(x, dtype=torch.int64)),
    "index": lambda net, i, x: x[:, torch.tensor([1, 0])],
    "pool": lambda net, i, x: F.max_pool1d(x, 2).repeat_interleave(2, -1),
    "einsum": lambda net, i, x: torch.einsum("bcw,vw->bcv", x, net.linear[i].weight),
    "attention": attend,
    "fused attention": fused,
    "where": lambda net, i, x: torch.where(torch.ones_like(x, dtype=torch.bool), x, x * 2),
    "checkpoint": lambda net, i, x: checkpoint(net.linear[i], x, use_reentrant=False),
    "detached": lambda net, i, x: x + net.linear[i](x).detach(),
}

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
}


def run(names, width, batch, optimizer, rounds, clip):
    model = Net(names, width)
    solver = OPTIMIZERS[optimizer](model.parameters())
    data = torch.rand(batch, 2, width)
    for _ in range(2):
        for _ in range(rounds):
            (model(data).sum() + sum(p.sum() for p in model.parameters())).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        solver.step()
        solver.zero_grad()


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=8),
    width=st.sampled_from([4, 8, 12]),
    batch=st.integers(2, 9),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    rounds=st.integers(1, 2),
    clip=st.booleans(),
)
def test_traced_live_bytes_equal_a_real_run_on_the_cpu(names, width, batch, optimizer, rounds, clip):
    arguments = (names, width, batch, optimizer, rounds, clip)
    witness = Witness()
    with witness:
        run(*arguments)
    tracer = Tracer("cpu")
    tracer.reuse = False  # the witness, too, is a mode in Python
    with tracer.running():
        run(*arguments)
    live, course = 0, []
    for alloc, held in tracer.ledger.events:
        if held.kind == "workspace" or not held.bytes:  # inside a kernel, where no mode looks
            continue
        live += held.bytes if alloc else -held.bytes
        if alloc:
            course.append(live)
    assert max(course) == max(witness.course)
    assert course == witness.course
