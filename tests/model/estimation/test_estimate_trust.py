"""What a step reaches follows it to its device, host values are computed for real, and what is not known is said."""

import dataclasses
import functools
import threading

import pytest

torch = pytest.importorskip("torch")

import outsize  # noqa: E402
from outsize.core.cards import find_card  # noqa: E402
from outsize.model.torch_port.flops import flop_rule  # noqa: E402

functional = torch.nn.functional


def train(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


class Grouped(torch.nn.Module):
    """Attention in which two heads share keys and values."""

    def __init__(self, heads=4, shared=2, width=64, whole=False):
        super().__init__()
        self.heads, self.shared, self.whole = heads, shared, whole
        self.q = torch.nn.Linear(width, width)
        self.kv = torch.nn.Linear(width, 2 * width // heads * shared)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.shared, -1)).transpose(1, 2).chunk(2, 1)
        if self.whole:
            k, v = (t.repeat_interleave(self.heads // self.shared, 1) for t in (k, v))
            return functional.scaled_dot_product_attention(q, k, v)
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_grouped_attention_is_counted_like_torch_counts_whole_heads():
    q, k = torch.empty(2, 8, 16, 32, device="meta"), torch.empty(2, 2, 16, 32, device="meta")
    for name, given in (
        ("_scaled_dot_product_cudnn_attention", []),
        ("_scaled_dot_product_cudnn_attention_backward", [q]),
    ):
        operator = getattr(torch.ops.aten, name).default
        from torch.utils.flop_counter import flop_registry

        theirs = flop_registry[operator.overloadpacket](*given, q, q, q, out_val=None)
        rule = flop_rule(operator)
        assert rule(*given, q, q, q, out_val=None) == rule(*given, q, k, k, out_val=None) == theirs


def test_grouped_attention_on_the_cpu_takes_no_more_than_whole_heads():
    def peak(**how):
        model = Grouped(**how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = outsize.estimate(train, model, optimizer, torch.rand(4, 256, 64), device="cpu")
        return found.peak_requested.bytes

    assert peak() <= peak(whole=True)


def test_an_optimizer_that_has_stepped_is_taken_as_it_is():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, torch.rand(2, 8))
    assert outsize.estimate(train, model, optimizer, torch.rand(2, 8)).peak_allocated.bytes > 0


def test_a_captured_tensor_goes_along_with_to():
    weight = torch.rand(16)

    def build():
        return torch.nn.Linear(16, 4).cuda(), torch.rand(8, 16, device="cuda")

    def step(model, batch):
        model(batch * weight.to(batch.device)).mean().backward()

    assert outsize.estimate(step, build=build).peak_allocated.bytes > 0
    model = torch.nn.Linear(16, 4)
    fitted = outsize.fit(
        model, lambda m, b: m(b * weight.to(b.device)).mean(), torch.optim.SGD(model.parameters(), lr=0.1),
        torch.rand(8, 16), budget="1MiB",
    )  # fmt: skip
    assert fitted.plan.fits


@dataclasses.dataclass
class Graph:
    """As a graph library keeps one: tensors in attributes."""

    features: torch.Tensor
    store: dict


class Plain:
    def __init__(self, tensor):
        self.graph = Graph(tensor, {"mask": torch.ones(4)})
        self.lock = threading.Lock()


SIZE = 4 << 20


@pytest.mark.parametrize("kind", ["dataclass", "object", "closure", "partial"])
def test_tensors_behind_objects_follow_the_step_to_its_device(kind):
    x = torch.rand(1 << 20)
    model = torch.nn.Linear(1, 1)
    graph, plain = Graph(x, {"more": [torch.rand(2)]}), Plain(x)

    def through_closure():
        return x

    steps = {
        "dataclass": lambda m: m(graph.features[:, None]).mean().backward(),
        "object": lambda m: m(plain.graph.features[:, None]).mean().backward(),
        "closure": lambda m: m(through_closure()[:, None]).mean().backward(),
        "partial": functools.partial(lambda m, g: m(g.features[:, None]).mean().backward(), g=graph),
    }
    found = outsize.estimate(steps[kind], model)
    direct = outsize.estimate(lambda m, x: m(x[:, None]).mean().backward(), model, x)
    assert SIZE <= direct.peak_allocated.bytes <= found.peak_allocated.bytes <= direct.peak_allocated.bytes + 4096
    assert graph.features is x and plain.graph.features is x and x.device.type == "cpu"


def test_a_batch_drawn_on_the_host_has_its_real_shape(tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.arange(5000, dtype=numpy.uint16).tofile(tmp_path / "train.bin")
    data = numpy.memmap(tmp_path / "train.bin", dtype=numpy.uint16, mode="r")
    shapes = []

    def get_batch(size=4, block=256):
        ix = torch.randint(len(data) - block, (size,))
        x = torch.stack([torch.from_numpy((data[i : i + block]).astype(numpy.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block]).astype(numpy.int64)) for i in ix])
        shapes.append(x.shape)
        return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

    def build():
        model = torch.nn.Sequential(torch.nn.Embedding(5000, 8), torch.nn.Linear(8, 5000)).cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer):
        x, y = get_batch()
        functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = outsize.estimate(step, build=build, budget="8GiB")
    assert set(shapes) == {(4, 256)} and found.fits and not found.notes
    assert torch.equal(torch.get_rng_state(), before)


def cut(steps):
    """A step whose size hangs on a number that only a card would know."""

    def build():
        return torch.nn.Linear(8, 8).cuda(), torch.rand(64, 8, device="cuda")

    def step(model, batch):
        count = int(torch.randint(1, 64, (1,), device="cuda"))
        model(batch[:count]).mean().backward()

    return outsize.estimate(step, build=build, budget="8GiB", steps=steps)


def test_what_hangs_on_a_guess_may_fit():
    found = cut(3)
    assert found.fits is None and any("test_estimate_trust.py" in guess for guess in found.guesses)
    assert "may fit" in str(found)


def test_steps_whose_drawn_sizes_differ_may_fit():
    torch.manual_seed(0)

    def step(model, batch):
        model(batch[: int(torch.randint(1, 64, (1,)))]).mean().backward()

    def build():
        return torch.nn.Linear(8, 8).cuda(), torch.rand(64, 8, device="cuda")

    assert outsize.estimate(step, build=build, budget="8GiB").fits is None


def test_a_piece_cut_by_an_unknown_number_is_refused_where_nothing_is_left():
    def step(model, batch):
        count = int(torch.randint(1, 64, (1,), device="cuda"))
        model(batch[count + 100 :]).mean().backward()

    def build():
        return torch.nn.Linear(8, 8).cuda(), torch.rand(64, 8, device="cuda")

    with pytest.raises(outsize.InputError, match=r"test_estimate_trust\.py"):
        outsize.estimate(step, build=build)


def test_a_step_without_tensors_of_torch_is_refused():
    with pytest.raises(outsize.InputError, match=r"no tensor of PyTorch"):
        outsize.estimate(lambda: sum(range(10)))


def test_weights_on_the_card_and_data_on_the_host_name_the_line():
    def step(model):
        model(torch.rand(4, 8)).mean().backward()

    with pytest.raises(outsize.InputError, match=r"host and on cuda:0 at .*test_estimate_trust\.py"):
        outsize.estimate(step, build=lambda: torch.nn.Linear(8, 8).cuda())
    given = outsize.estimate(step, torch.nn.Linear(8, 8))
    assert any("as if it had been moved" in note for note in given.notes)


def build_for(batch):
    return torch.nn.Linear(256, 256).cuda(), torch.rand(batch, 256, device="cuda")


def even_only(model, batch):
    assert len(batch) % 2 == 0, "even batches only"
    model(batch).square().mean().backward()


def test_a_batch_that_the_step_rejects_is_skipped():
    found = outsize.estimate(even_only, build=build_for, batch=6, budget="100MiB").largest[0]
    assert found.largest > 6 and found.largest % 2 == 0
    assert outsize.estimate(even_only, build=lambda: build_for(found.largest), budget="100MiB").fits is not False
    assert not outsize.estimate(even_only, build=lambda: build_for(found.largest + 64), budget="100MiB").fits


def test_a_batch_above_the_data_is_not_promised():
    def step(model, batch):
        assert len(batch) <= 96, "there are 96 samples"
        model(batch).square().mean().backward()

    assert outsize.estimate(step, build=build_for, batch=64, budget="8GiB").largest[0].largest == 96


def test_the_largest_batch_is_bounded_and_each_card_has_one_row():
    def step(model, batch):
        model(batch[:1]).square().mean().backward()

    def build(batch):
        return torch.nn.Linear(8, 8).cuda(), torch.rand(1, 8, device="cuda")

    found = outsize.estimate(step, build=build, batch=4, card="rtx4090").largest
    assert len({row.place for row in found}) == len(found)
    assert max(row.largest for row in found) <= 2**20


def test_a_card_of_several_sizes_is_the_common_one_or_is_asked_for():
    assert find_card("h100").name == "H100 80GB"
    with pytest.raises(outsize.InputError, match="A100 40GB or A100 80GB"):
        find_card("a100")


def test_known_values_are_the_same_in_numpy():
    import numpy as np

    seen = []

    def step():
        x = torch.arange(5) + 1
        seen.extend([x.numpy().tolist(), np.asarray(x).tolist(), np.asarray(x, dtype="float32").tolist()])

    outsize.estimate(step, build=lambda: (), steps=1)
    assert seen[0] == seen[1] == seen[2] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", [{"args": (0,)}, {"device": "cuda"}, {"device": torch.device("cuda", 0)}])
def test_a_module_moves_to_a_card_however_it_is_named(how):
    given = dict(how)

    def build():
        return torch.nn.Linear(64, 64).to(*given.pop("args", ()), **given)

    found = outsize.estimate(lambda model: model(torch.rand(8, 64, device="cuda")), build=build, steps=1)
    assert next(part.bytes for part in found.parts if part.name == "weights") == 4 * 64 * 65
    assert not found.notes


def test_data_parallel_on_one_card_is_its_module():
    def build():
        return torch.nn.DataParallel(torch.nn.Linear(64, 64)).cuda(), torch.rand(8, 64)

    found = outsize.estimate(lambda model, x: model(x).sum().backward(), build=build)
    assert next(part.bytes for part in found.parts if part.name == "weights") == 4 * 64 * 65


@pytest.mark.parametrize("tries", [True, False])
def test_kernels_that_are_tried_out_for_a_convolution_are_not_known(monkeypatch, tries):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tries)
    footprint = outsize.estimate(
        lambda model, x: model(x).sum().backward(),
        build=lambda: (torch.nn.Conv2d(3, 8, 3).cuda(), torch.zeros(2, 3, 16, 16, device="cuda")),
        device="cuda",
    )
    assert any("cudnn.benchmark" in guess for guess in footprint.guesses) == tries


def test_a_tensor_made_of_values_of_other_tensors_is_made():
    model = torch.nn.Linear(64, 64)
    made = []

    def step():
        values = model(torch.ones(8, 64)).sum(1)
        wanted = torch.stack([torch.tensor([float(value), value]) for value in values.detach()])
        made.append(tuple(wanted.shape))
        (values - wanted[:, 0]).square().sum().backward()

    assert outsize.estimate(step).peak_requested.bytes > 2 * 64 * 64 * 4
    assert set(made) == {(8, 2)}


@pytest.mark.parametrize(("batch", "said"), [(1000, True), (0, False)])
def test_scratch_that_was_not_measured_is_said_where_it_matters(batch, said):
    def build():
        return torch.nn.Sequential(torch.nn.Conv2d(1, 32, 3), torch.nn.Conv2d(32, 64, 3)).cuda(), torch.nn.Linear(
            64, 64
        ).cuda()

    def step(pictures, plain):
        if batch:
            pictures(torch.rand(batch, 1, 28, 28, device="cuda"))
        plain(torch.rand(64, 64, device="cuda")).sum().backward()

    found = outsize.estimate(step, build=build, card="h200")
    assert any("not measured in these sizes" in note for note in found.notes) == said
    assert found.fits and not found.guesses


IN_USE = torch.nn.Linear(64, 64)
NOT_IN_USE = torch.zeros(1 << 20)


def train_what_is_there(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_builder_that_hands_out_what_is_there_already_is_followed_like_the_objects_themselves(device):
    optimizer, x = torch.optim.AdamW(IN_USE.parameters()), torch.randn(8, 64)
    given = outsize.estimate(train_what_is_there, IN_USE, optimizer, x, device=device)
    built = outsize.estimate(train_what_is_there, build=lambda: (IN_USE, optimizer, x), device=device)
    assert built.peak_allocated.bytes == given.peak_allocated.bytes
    assert IN_USE.weight.device.type == "cpu" and IN_USE.weight.grad is None and not optimizer.state


def test_globals_that_a_step_does_not_use_are_no_part_of_it():
    found = outsize.estimate(
        train_what_is_there, IN_USE, torch.optim.SGD(IN_USE.parameters()), torch.ones(8, 64), device="cpu"
    )
    assert found.peak_allocated.bytes < NOT_IN_USE.nbytes
