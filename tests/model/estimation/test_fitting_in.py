"""Whether a step fits, how it grows, and what feeds it: under pressure, with the sequence, and on the host."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

import outsize  # noqa: E402
from outsize.core.errors import InputError  # noqa: E402
from outsize.core.footprint import Growth  # noqa: E402
from outsize.core.units import MiB  # noqa: E402
from outsize.model.estimation import loaders as loading  # noqa: E402
from outsize.model.estimation.pressure import gets_through  # noqa: E402
from outsize.model.tracing.records.ledger import Ledger  # noqa: E402


def course(*blocks):
    """Events of (bytes, spare) blocks that all live to the end, a spare one only for a moment."""
    ledger = Ledger()
    for size, spare in blocks:
        held = ledger.allocate(size, "cuda:0", "aten.convolution.default" if spare else "aten.add.Tensor")
        held.spare = spare
        if spare:
            ledger.free(held)
    return ledger.events


def test_a_workspace_that_finds_no_room_gives_way():
    events = course((40 * MiB, False), (200 * MiB, True), (40 * MiB, False))
    assert gets_through(events, 300 * MiB, most=False)
    assert gets_through(events, 100 * MiB, most=False)


def test_a_block_that_has_to_be_there_does_not_give_way():
    assert not gets_through(course((40 * MiB, False), (200 * MiB, False)), 100 * MiB, most=False)


def test_a_workspace_that_gave_way_stays_small():
    events = course((40 * MiB, False), *[(200 * MiB, True)] * 30, (40 * MiB, False))
    assert gets_through(events, 100 * MiB, most=False)


def test_a_convolutions_workspace_is_spare_and_the_copy_of_its_gradient_is_not():
    def step(model, x):
        out = model(x)
        out.backward(torch.ones((), device="cuda").expand_as(out))

    def build():
        return torch.nn.Conv2d(64, 64, 3, padding=1).cuda(), torch.rand(32, 64, 56, 56, device="cuda")

    small = outsize.estimate(step, build=build, budget="150MiB")
    assert small.fits is not False
    assert outsize.estimate(step, build=build, budget="60MiB").fits is False


def attention(batch, seq):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    model = Plain().cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(batch, seq, 64, device="cuda")


def step(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_attention_that_is_written_out_grows_with_the_square_of_the_sequence():
    footprint = outsize.estimate(step, build=attention, batch=4, seq=4096)
    by_batch, by_sequence = footprint.growth
    assert (by_batch.size, by_sequence.size) == ("batch", "sequence")
    assert by_sequence.square > 0
    assert by_sequence.error < 0.05
    assert len(by_sequence.traced) == 4
    assert by_sequence.at(8192) > 3 * by_sequence.at(4096)
    text = str(footprint)
    assert "sequence of 8192, with its square" in text


def test_a_step_that_grows_evenly_is_a_line_in_both():
    def build(batch, seq):
        model = torch.nn.Linear(512, 512).cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(batch, seq, 512, device="cuda")

    footprint = outsize.estimate(step, build=build, batch=64, seq=1024)
    assert [growth.square for growth in footprint.growth] == [0.0, 0.0]
    assert all(growth.error < 0.05 for growth in footprint.growth)
    assert outsize.estimate(step, build=lambda seq: build(8, seq), seq=1024).growth[0].size == "sequence"


def test_a_growth_says_the_bytes_of_any_size():
    assert Growth(size="batch", traced=(), fixed=100, each=10, error=0.0).at(7) == 170
    assert Growth(size="sequence", traced=(), fixed=100, each=10, square=2.0, error=0.0).at(7) == 268


class Pictures(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, number):
        return torch.zeros(3, 32, 32), number


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(1000)] * 3)


PICTURE = 3 * 32 * 32 * 4


def test_a_loader_without_workers_holds_one_batch_in_the_making():
    found = loading.of(DataLoader(Pictures(), batch_size=16))
    assert found.batch == 16 * PICTURE + 16 * 8
    assert (found.workers, found.shared, found.pinned, found.processes) == (0, 0, 0, 0)
    assert found.making == 16 * PICTURE


def test_workers_times_the_prefetch_factor_batches_are_ahead(monkeypatch):
    monkeypatch.setattr(loading, "_worker", lambda context: 20 * MiB)
    found = loading.of(DataLoader(Pictures(), batch_size=16, num_workers=3, prefetch_factor=4))
    assert found.ahead == 12
    assert found.shared == 12 * found.batch
    assert found.processes == 3 * 20 * MiB
    assert found.total == found.shared + found.making + found.processes


def test_pinned_copies_are_rounded_up_to_powers_of_two(monkeypatch):
    monkeypatch.setattr(loading, "_worker", lambda context: 0)
    found = loading.of(DataLoader(Pictures(), batch_size=10, num_workers=1, pin_memory=True))
    assert found.pinned == 3 * (131_072 + 128)


def test_a_stream_is_read_from_its_beginning():
    assert loading.of(DataLoader(Stream(), batch_size=8)).batch == 8 * 4000


def test_the_loader_is_part_of_the_hosts_side(monkeypatch):
    monkeypatch.setattr(loading, "_worker", lambda context: 20 * MiB)
    build = lambda: attention(2, 16)  # noqa: E731
    without = outsize.estimate(step, build=build)
    footprint = outsize.estimate(step, build=build, loader=DataLoader(Pictures(), batch_size=16, num_workers=2))
    assert footprint.host.bytes == without.host.bytes + footprint.loading.total
    assert "loader: " in str(footprint)


def test_what_is_no_loader_and_a_dataset_that_raises_are_named():
    with pytest.raises(InputError, match="DataLoader, not int"):
        loading.of(3)

    class Broken(Pictures):
        def __getitem__(self, number):
            raise KeyError("label")

    with pytest.raises(InputError, match="raised KeyError for its first sample: 'label'"):
        loading.of(DataLoader(Broken(), batch_size=2))
