"""What a step takes is foreseen without a card: kinds, peaks, bounds, and the step's own code as it stands."""

import forks
import pytest

torch = pytest.importorskip("torch")

import outsize  # noqa: E402
from outsize.core.errors import InputError  # noqa: E402
from outsize.core.units import MiB  # noqa: E402
from outsize.model.estimation import calibration, growth  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def mlp(width=1024, optimizer=torch.optim.AdamW, batch=64, device="cuda"):
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).to(
        device
    )
    return model, optimizer(model.parameters(), lr=1e-3), torch.rand(batch, width, device=device)


def train(model, optimizer, data):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def part(footprint, name):
    return sum(p.bytes for p in footprint.parts if p.name == name)


def test_weights_gradients_and_adams_two_states_are_counted_to_the_byte():
    footprint = outsize.estimate(train, build=mlp)
    weights = 2 * (1024 * 1024 + 1024) * 4
    assert part(footprint, "weights") == weights
    assert part(footprint, "optimizer state") == 2 * weights
    assert part(footprint, "gradients") == weights
    assert footprint.peak_label == "step 1 optimizer"


def test_the_parts_add_up_to_the_allocated_peak():
    footprint = outsize.estimate(train, build=mlp)
    assert sum(p.bytes for p in footprint.parts) == footprint.peak_allocated.bytes
    assert footprint.peak_requested.bytes <= footprint.peak_allocated.bytes <= footprint.peak_reserved.bytes
    assert footprint.peak_reserved.bytes <= footprint.peak_reserved.bound < footprint.device_use.bound


def test_each_thread_that_multiplies_keeps_a_cublas_workspace():
    hopper = outsize.estimate(train, build=mlp, card="H100 80GB")
    ada = outsize.estimate(train, build=mlp, card="RTX 4090")
    assert part(hopper, "workspace") >= 2 * 32 * MiB
    assert 2 * 8_519_680 <= part(ada, "workspace") < 2 * 32 * MiB


def test_foreach_optimizers_take_temporaries_that_a_loop_does_not():
    def loop(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, foreach=False)

    together = outsize.estimate(train, build=mlp)
    one_by_one = outsize.estimate(train, build=lambda: mlp(optimizer=loop))
    assert part(together, "temporaries") > part(one_by_one, "temporaries")


def test_autocast_saves_activations_in_the_lower_precision():
    def build():
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(6)]
        return torch.nn.Sequential(*layers).cuda(), torch.rand(16384, 512, device="cuda")

    def plain(model, data):
        model(data).mean().backward()

    def lower(model, data):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(data).mean()
        loss.backward()
        assert model[0][0].weight.grad.dtype == torch.float32

    half, full = outsize.estimate(lower, build=build), outsize.estimate(plain, build=build)
    assert part(half, "activations") < 0.7 * part(full, "activations")


def test_the_casting_rules_are_taken_off_again():
    outsize.estimate(train, build=mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(torch.rand(2, 3), torch.rand(4, 3)).dtype == torch.bfloat16
    assert not torch.cuda.is_available() or torch.cuda.device_count() > 0
    assert torch.nn.functional.dropout(torch.ones(4), 0.0).tolist() == [1.0] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_instead_of_keeping(reentrant):
    from torch.utils.checkpoint import checkpoint

    def build():
        layers = [
            torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)) for _ in range(6)
        ]
        return torch.nn.ModuleList(layers).cuda(), torch.rand(8192, 512, device="cuda", requires_grad=True)

    def step(layers, x, again):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        x.sum().backward()

    kept = outsize.estimate(step, build=lambda: (*build(), False), steps=1)
    redone = outsize.estimate(step, build=lambda: (*build(), True), steps=1)
    assert redone.peak_allocated.bytes < 0.75 * kept.peak_allocated.bytes


def test_accumulated_gradients_are_alive_while_the_next_forward_runs():
    def step(model, optimizer, data, rounds):
        for _ in range(rounds):
            model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    once = outsize.estimate(step, build=lambda: (*mlp(batch=8192), 1))
    thrice = outsize.estimate(step, build=lambda: (*mlp(batch=8192), 3))
    assert thrice.peak_allocated.bytes > once.peak_allocated.bytes


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_inference_without_grad_keeps_no_activations(quiet):
    def build():
        return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda(), torch.rand(
            16384, 512, device="cuda"
        )

    def without(model, data):
        with quiet():
            model(data)

    kept = outsize.estimate(lambda model, data: model(data), build=build)
    assert outsize.estimate(without, build=build).peak_allocated.bytes < 0.6 * kept.peak_allocated.bytes


def test_a_value_that_is_read_is_chosen_and_said():
    def step(model, optimizer, data):
        loss = model(data).mean()
        if loss.item() < 10:
            loss.backward()

    footprint = outsize.estimate(step, build=mlp)
    assert any("chosen" in note and "test_estimate.py" in note for note in footprint.notes)
    assert footprint.peak_requested.known == "estimate"


def test_filling_weights_needs_no_word():
    def build():
        model = torch.nn.Linear(64, 64).cuda()
        torch.nn.init.trunc_normal_(model.weight, std=0.02)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(4, 64, device="cuda")

    assert outsize.estimate(train, build=build).notes == ()


def test_small_host_tensors_keep_their_values():
    def build():
        rates = [x.item() for x in torch.linspace(0, 0.5, 5)]
        assert rates[-1] == 0.5
        return mlp(width=int(torch.tensor([32, 64]).max()) * 8)

    footprint = outsize.estimate(train, build=build)
    assert part(footprint, "weights") == 2 * (512 * 512 + 512) * 4
    assert not footprint.notes


def test_real_modules_and_optimizers_are_read_and_left_alone():
    model, optimizer, data = mlp(width=64, device="cpu")
    before = model[0].weight.clone()

    def step():
        train(model, optimizer, data)

    footprint = outsize.estimate(step)
    assert part(footprint, "weights") == sum(p.numel() for p in model.parameters()) * 4
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
    assert not optimizer.state


def test_tied_weights_are_counted_once():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(1000, 64)
            self.head = torch.nn.Linear(64, 1000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    model = Tied()
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    footprint = outsize.estimate(lambda m, t: m(t).sum().backward(), model, tokens)
    assert part(footprint, "weights") == 1000 * 64 * 4


def test_a_grad_scaler_step_goes_through():
    def build():
        model, optimizer, data = mlp()
        return model, optimizer, data, torch.amp.GradScaler("cuda")

    def step(model, optimizer, data, scaler):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(data).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()

    footprint = outsize.estimate(step, build=build)
    assert part(footprint, "optimizer state") > 0


def test_a_step_that_never_says_cuda_is_counted_on_the_card_and_says_so():
    footprint = outsize.estimate(train, build=lambda: mlp(device="cpu"))
    assert part(footprint, "weights") == 2 * (1024 * 1024 + 1024) * 4
    assert any("nothing was put on cuda:0" in note for note in footprint.notes)


def test_growth_is_a_line_and_the_largest_batch_fits_where_one_more_does_not():
    def build(batch):
        return mlp(width=512, batch=batch * 256)

    footprint = outsize.estimate(train, build=build, batch=8, budget="400MiB")
    (growth,) = footprint.growth
    assert growth.error < 0.2
    found = footprint.largest[0]
    assert outsize.estimate(train, build=lambda: build(found.largest), budget="400MiB").fits is not False
    assert not outsize.estimate(train, build=lambda: build(found.largest + 2), budget="400MiB").fits


@pytest.mark.parametrize("at", [1, 7, 32])
def test_growth_that_segments_hide_is_found_in_larger_traces(at):
    def play(size):
        return (8192 * size + 25 * MiB + 20 * MiB - 1) // (20 * MiB) * 20 * MiB

    line = growth.fit("batch", play, at, play(at))
    assert line.each == pytest.approx(8192, rel=0.15)
    rows = growth.largest(line, None, play)
    assert all(0.85 * 8192 * row.largest <= row.capacity for row in rows if row.largest < growth.MOST)
    flat = growth.fit("batch", lambda size: 40 * MiB, at, 40 * MiB)
    assert flat.each == 1 and flat.traced[-1][0] >= growth.MOST


def test_a_receipt_sets_a_run_beside_the_projection_and_widens_the_bound():
    footprint = outsize.estimate(train, build=mlp, card="H200")
    receipt = footprint.compare(
        allocated=footprint.peak_allocated.bytes, reserved=int(footprint.peak_reserved.bytes * 1.2)
    )
    assert receipt.allocated_error == 0
    assert not receipt.held
    outsize.learn_from_run(receipt)
    assert calibration.read("H200").reserved_margin > 0.2
    again = outsize.estimate(train, build=mlp, card="H200")
    assert again.peak_reserved.bound >= receipt.measured_reserved


def test_a_receipt_of_what_was_in_use_says_the_context():
    footprint = outsize.estimate(train, build=mlp, card="H200")
    reserved = footprint.peak_reserved.bytes
    outsize.learn_from_run(footprint.compare({"reserved_bytes.all.peak": reserved}, used=reserved + 500 * MiB))
    assert calibration.read("H200").context == 500 * MiB
    again = outsize.estimate(train, build=mlp, card="H200")
    assert again.device_use.bytes == reserved + 500 * MiB


def test_a_receipt_of_a_step_on_the_cpu_compares_resident_bytes():
    footprint = outsize.estimate(train, build=lambda: mlp(device="cpu"), device="cpu")
    receipt = footprint.compare(used=footprint.device_use.bytes * 2)
    assert receipt.use_error == -0.5
    assert not receipt.held
    assert "in use" in str(receipt)


def test_the_traced_step_does_not_touch_the_card_or_the_memory():
    code = """
import resource, torch, outsize
def build():
    model = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384) for _ in range(8)]).cuda()
    return model, torch.rand(4096, 16384, device="cuda")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
footprint = outsize.estimate(lambda m, x: m(x).sum().backward(), build=build)
assert footprint.peak_allocated.bytes > 16 * 2**30
assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 600 * 2**20
"""
    child = forks.start(code, imported=forks.TORCH)
    _, err = child.communicate()
    assert child.returncode == 0, err


# bad input


def test_a_step_that_raises_is_shown_with_its_own_line():
    def step(model, optimizer, data):
        model(data[:, :7])

    with pytest.raises(
        InputError, match=r"step raised RuntimeError at test_estimate.py:\d+ \(model\(data\[:, :7\]\)\)"
    ):
        outsize.estimate(step, build=mlp)


def test_a_missing_attribute_is_shown_with_its_own_line():
    with pytest.raises(InputError, match=r"AttributeError at test_estimate.py:\d+ .*no attribute 'wrong'"):
        outsize.estimate(lambda model, optimizer, data: model.wrong(data), build=mlp)


def test_an_unknown_card_or_device_is_named():
    with pytest.raises(InputError, match="unknown card 'rtx9999'"):
        outsize.estimate(train, build=mlp, card="rtx9999")
    with pytest.raises(InputError, match="'tpu'"):
        outsize.estimate(train, build=mlp, device="tpu")
    with pytest.raises(InputError, match="either build= or"):
        outsize.estimate(train, 1, build=mlp)
